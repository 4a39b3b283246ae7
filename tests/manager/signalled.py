"""Trainings in processes of their own, which tell what they do and wait after each word, and signals sent to them.

The processes are forked off a server that has imported everything, so that each begins at once.
"""

from __future__ import annotations

import ctypes
import logging
import multiprocessing
import os
import signal
import sys
import threading
import time
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing import forkserver
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

import safepoint as sp
from safepoint.ambient import SystemAmbient
from safepoint.data import WorkerStart
from safepoint.storage.local import LocalStorage
from tests.manager.jobs import Job, build, close_window, microbatch, step

LONGEST_WAIT_S = 60
# The first optimizer of a process imports the compiler of torch, which takes long.
EVERYTHING = ["tests.manager.signalled", "torch._dynamo"]

Body = Callable[["Line", Path], None]


class Line:
    """Tell the test what happens here, and wait until it lets the process go on."""

    def __init__(self, end: Connection) -> None:
        self._end = end

    def __call__(self, *word: Any) -> None:
        self._end.send(word)
        self._end.recv()


class Training:
    """Follow a training process."""

    def __init__(self, body: Body, *arguments: Any) -> None:
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(EVERYTHING)
        with pytest.MonkeyPatch.context() as patch:
            # The server that imports it looks nowhere else.
            patch.setenv("PYTHONPATH", os.pathsep.join(sys.path))
            forkserver.ensure_running()
        self._end, other = context.Pipe()
        self.process = context.Process(target=_run, args=(body, other, arguments))
        self.process.start()
        self.words: list[tuple[Any, ...]] = []
        self._is_waiting = False
        other.close()

    def until(self, *beginning: Any) -> None:
        """Let the process go on until it says a word that begins so, and leave it waiting there."""
        while self._hear()[: len(beginning)] != beginning:
            pass

    def go(self) -> None:
        """Answer the last word, if that has not been done, and do not wait for the next one."""
        if self._is_waiting:
            self._is_waiting = False
            self._end.send(None)

    def end(self) -> int | None:
        """Let the process go on to its end, and return its exit code: negative for a signal."""
        while self._hear(expects_more=False):
            pass
        return self.code

    def said(self, kind: str) -> list[tuple[Any, ...]]:
        """Return what the process said of a kind, without the kind."""
        return [word[1:] for word in self.words if word[0] == kind]

    def signal(self, number: int, *, to_group: bool = False) -> None:
        """Send a signal to the process, or to its group."""
        assert self.process.pid is not None
        (os.killpg if to_group else os.kill)(self.process.pid, number)

    def children(self) -> list[int]:
        """Return the processes that the process has started, such as the workers of its loader."""
        found = Path(f"/proc/{self.process.pid}/task").glob("*/children")
        return [int(pid) for path in found for pid in path.read_text().split()]

    @property
    def code(self) -> int | None:
        """Return the exit code once the process has ended."""
        self.process.join(LONGEST_WAIT_S)
        return self.process.exitcode

    def _hear(self, *, expects_more: bool = True) -> tuple[Any, ...]:
        """Let the process go on, and return its next word; nothing at the end."""
        try:
            self.go()
            assert self._end.poll(LONGEST_WAIT_S), f"the process says nothing after {self.words[-3:]}"
            self.words.append(self._end.recv())
            self._is_waiting = True
        except (EOFError, ConnectionResetError, BrokenPipeError):
            assert not expects_more, f"the process ended with {self.code} after {self.words[-3:]}"
            return ()
        return self.words[-1]


def still_there(pids: Iterable[int]) -> list[int]:
    """Return which processes are there, having given each time to end."""
    end = time.monotonic() + LONGEST_WAIT_S
    left = list(pids)
    while left and time.monotonic() < end:
        left = [pid for pid in left if Path(f"/proc/{pid}").exists()]
        threading.Event().wait(0.01)
    return left


@contextmanager
def training(body: Body, *arguments: Any) -> Iterator[Training]:
    """Run a training process, which is killed at the end of the block if it is still there."""
    one = Training(body, *arguments)
    try:
        yield one
    finally:
        one.process.kill()
        one.process.join(LONGEST_WAIT_S)


def _run(body: Body, end: Connection, arguments: Iterable[Any]) -> None:
    # As a scheduler starts a job: the leader of a process group.
    os.setpgid(0, 0)
    torch.set_num_threads(1)
    line = Line(end)
    logging.getLogger("safepoint").addHandler(_Telling(line))
    warnings.simplefilter("ignore")
    body(line, *arguments)


class _Telling(logging.Handler):
    """Tell warnings, but not from the relay's thread, whose word nobody waits for."""

    def __init__(self, line: Line) -> None:
        super().__init__(logging.WARNING)
        self._line = line

    def emit(self, record: logging.LogRecord) -> None:
        if record.threadName == "MainThread":
            self._line("warned", record.getMessage())


@dataclass(frozen=True)
class Loop:
    """Say what a training loop is like: whether it looks at `should_stop`, and what else it does."""

    until: int = 12
    looks: bool = True
    workers: str = "none"
    with_epochs: bool = True


def train(line: Line, root: Path, signals: sp.Signals | None, loop: Loop) -> None:
    """Train, and end as the manager says."""
    job = build(root, workers=2 if loop.workers == "own" else 0, signals=signals, save=sp.every(updates=100))
    line("made")
    with job.manager as manager:
        line("restored", manager.restore().step)
        run_loop(line, job, loop, foreign_loader() if loop.workers == "foreign" else None)
        line("closing")
    sys.exit(manager.exit_code)


def run_loop(line: Line, job: Job, loop: Loop, foreign: Any = None) -> None:
    """Run the loop of a script; it tells each update before its boundary, and each validation."""
    manager = job.manager
    while manager.progress.step < loop.until and not manager.should_stop:
        for batch in manager.batches(job.loader if foreign is None else foreign):
            loss = step(job, batch)
            line("update", manager.progress.step + 1, loss.hex())
            manager.after_update()
            if manager.progress.step == loop.until or (loop.looks and manager.should_stop):
                break
        if manager.epoch_end_due and not manager.should_stop:
            line("validating", manager.progress.step)
            manager.end_epoch()


def foreign_loader(**options: Any) -> DataLoader[Any]:
    """Return torch's own loader with two workers; its position is not saved."""
    data = TensorDataset(torch.linspace(0, 1, 88).view(22, 4), torch.arange(22))
    return DataLoader(data, batch_size=4, num_workers=2, **options)


def plain_loop(line: Line, root: Path) -> None:
    """Train as a loop does that knows nothing of signals and iterates a prepared foreign loader by itself."""
    job = build(root)
    with job.manager as manager:
        manager.restore()
        for batch in foreign_loader(worker_init_fn=WorkerStart()):
            step(job, batch)
            line("update", manager.progress.step + 1)
            manager.after_update()


def windows(line: Line, root: Path) -> None:
    """Train in windows of two microbatches, whose batches workers load, and never look whether to stop."""
    job = build(root, workers=2, signals=sp.on_signals("TERM"), save=sp.every(updates=100))
    with job.manager as manager:
        line("restored", manager.restore().step)
        for number, batch in enumerate(job.loader):
            microbatch(job, batch)
            line("microbatch", number)
            manager.after_microbatch()
            if number % 2:
                close_window(job)
                manager.after_update()


def interrupted_twice(line: Line, root: Path) -> None:
    """Say when the first interrupt was noted, and wait for the second one."""
    job = build(root, signals=sp.on_signals("INT"))
    with job.manager as manager:
        manager.restore()
        line("ready")
        relay: Any = manager._stop._relay
        while signal.SIGINT not in relay._interrupted:
            signal.sigtimedwait([], 0.01)
        line("noted")
        run_loop(line, job, Loop())


def with_own_handler(line: Line, root: Path, loop: Loop, ends: bool) -> None:
    """Train in a program that has a handler of its own."""

    def own(number: int, frame: object) -> None:
        met.append(number)
        if ends:
            sys.exit(3)

    met: list[int] = []
    signal.signal(signal.SIGTERM, own)
    job = build(root, signals=sp.on_signals("TERM"))
    with job.manager as manager:
        line("restored", manager.restore().step)
        try:
            run_loop(line, job, loop)
        finally:
            line("ran", len(met))
    line("put back", signal.getsignal(signal.SIGTERM) is own)
    sys.exit(manager.exit_code)


def stuck(line: Line, root: Path, previous: str) -> None:
    """Train, and never come back from a call that is not Python's."""
    if previous == "own":
        signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(3))
    job = build(root, signals=sp.on_signals("TERM", grace_s=0.2))
    job.manager.restore()
    # Told beside the main thread, which is in its call by the time of the signal.
    threading.Thread(target=line, args=("restored", 0), daemon=True).start()
    if previous == "own":
        # Python runs handlers between two calls of a lock with a limit.
        while True:
            signal.sigtimedwait([], 0.01)
    library, lock = ctypes.CDLL(None), ctypes.create_string_buffer(64)
    library.pthread_mutex_lock(lock)
    library.pthread_mutex_lock(lock)


class SlowClock(SystemAmbient):
    """A clock that a save moves on by far."""

    seconds = 0.0

    def monotonic(self) -> float:
        return super().monotonic() + SlowClock.seconds


class Watched:
    """Let the test hold each save at its first object; or let it take long."""

    def __init__(self, root: Path, line: Line, *, takes_s: float) -> None:
        self._inner, self._line, self._takes_s = LocalStorage(root), line, takes_s

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def create(self, path: str, **options: Any) -> Any:
        if path.startswith("generations/") and path.endswith(".safetensors"):
            SlowClock.seconds += self._takes_s
            self._line("writing")
        return self._inner.create(path, **options)


def with_slow_saves(line: Line, root: Path, signals: sp.Signals, takes_s: float, saves: int) -> None:
    """Train with saves that take long, every so many updates."""
    storage = Watched(root, line, takes_s=takes_s)
    job = build(root, signals=signals, storage=storage, ambient=SlowClock(), save=sp.every(updates=saves))
    with job.manager as manager:
        manager.restore()
        run_loop(line, job, Loop())
    sys.exit(manager.exit_code)


def with_a_child(line: Line, root: Path) -> None:
    """Train in a process that has a child of its own, which is ended by the signal as ever."""
    job = build(root, signals=sp.on_signals("TERM", "USR1"))
    with job.manager as manager:
        manager.restore()
        child = os.fork()
        if not child:
            os.kill(os.getpid(), signal.SIGUSR1)
            os._exit(0)
        ended_by = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        run_loop(line, job, Loop(until=3))
        line("child", ended_by, manager.should_stop)


def with_full_disk(line: Line, root: Path) -> None:
    """Train, and have no room for the last save."""

    class Full(Watched):
        def create(self, path: str, **options: Any) -> Any:
            if path.startswith("generations/"):
                raise sp.StorageError("cannot create", where=path, found="no space left on device")
            return super().create(path, **options)

    job = build(root, signals=sp.on_signals("TERM"), storage=Full(root, line, takes_s=0))
    with job.manager as manager:
        line("restored", manager.restore().step)
        try:
            run_loop(line, job, Loop())
        except sp.StorageError:
            line("failed", manager.should_stop, manager.exit_code)
            raise


def train_rank(line: Line, root: Path, rank: int, then: str) -> None:
    """Be one of two ranks of the same training; say one update, and run freely from there until the run should stop."""
    meeting = root.with_suffix(".meeting")
    torch.distributed.init_process_group("gloo", init_method=f"file://{meeting}", rank=rank, world_size=2)
    job = build(root, signals=sp.on_signals("TERM", grace_s=10.0, then=then))
    with job.manager as manager:
        manager.restore()
        while not manager.should_stop:
            for batch in manager.batches(job.loader):
                step(job, batch)
                if manager.progress.step == 4:
                    line("update", 5)
                torch.distributed.barrier()
                manager.after_update()
                if manager.should_stop:
                    break
            if manager.epoch_end_due and not manager.should_stop:
                manager.end_epoch()
        line("stopped", manager.progress.step)
    torch.distributed.destroy_process_group()
    sys.exit(manager.exit_code)
