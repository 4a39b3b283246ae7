"""A save beside the training holds one boundary, has one failure, and neither is ever lost."""

from __future__ import annotations

import contextlib
import errno
import os
import sys
import threading
import warnings
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import safepoint as sp
from safepoint.faults.script import Effect, Fault, FaultScript
from safepoint.faults.storage import FaultyStorage
from safepoint.saving.background import BackgroundSaver, SaveHandle
from safepoint.storage.local import LocalStorage
from tests.manager.jobs import bits, build, die, picture, train
from tests.warm import WarmPython

LONGEST_WAIT_S = 60


class Gated:
    """A storage that creates no object until its gate is opened."""

    def __init__(self, url: Path) -> None:
        self._inner = LocalStorage(str(url))
        self.reached = threading.Event()
        self.gate = threading.Event()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def create(self, path: str, **hints: Any) -> Any:
        self.reached.set()
        assert self.gate.wait(LONGEST_WAIT_S)
        return self._inner.create(path, **hints)


@pytest.fixture
def gated(tmp_path: Path) -> Iterator[Gated]:
    storage = Gated(tmp_path)
    yield storage
    storage.gate.set()


def test_what_is_saved_is_the_boundary_although_the_loop_goes_on_changing_everything(
    tmp_path: Path, gated: Gated
) -> None:
    """Field reports B183, B185, B186, B187."""
    loop = {"best": torch.tensor([3.0]), "n": 3}
    job = build(tmp_path, storage=gated, background=True, items={"loop": loop})
    train(job, 3)
    at_three = picture(job)

    handle = job.manager.save()
    assert gated.reached.wait(LONGEST_WAIT_S)
    assert (handle.staged, handle.committed, handle.done) == (True, False, False)
    train(job, 6)
    for one in job.model.parameters():
        one.data.fill_(99.0)
    loop["best"].fill_(99.0)
    loop["n"] = 99
    gated.gate.set()
    result = handle.wait()
    die(job)

    assert (result.step, result.durability) == (3, "power")
    assert (handle.committed, handle.done) == (True, True)
    again_loop: dict[str, Any] = {}
    job = build(tmp_path, seed=4, items={"loop": again_loop})
    job.manager.restore()
    assert picture(job) == at_three
    assert again_loop["n"] == 3 and again_loop["best"].item() == 3.0
    job.manager.close()


def test_the_checkpoint_is_complete_when_the_handle_says_so(tmp_path: Path, gated: Gated) -> None:
    """Field report B193."""
    job = build(tmp_path, storage=gated, background=True)
    handle = job.manager.save()
    assert gated.reached.wait(LONGEST_WAIT_S)
    assert job.manager.checkpoints() == []

    with pytest.raises(sp.AbortedError, match="it goes on"):
        handle.wait(deadline_s=0.001)
    with pytest.raises(sp.AbortedError, match="longer than the wait allows"):
        job.manager.wait(deadline_s=0.001)
    gated.gate.set()
    job.manager.wait(deadline_s=LONGEST_WAIT_S)

    assert handle.committed
    assert [one.generation for one in job.manager.checkpoints()] == [handle.wait().generation]
    job.manager.close()


@pytest.mark.parametrize("most_bytes", [None, 32 << 20])
def test_the_thread_of_a_save_begins_when_the_call_has_ended_unless_the_call_waits_for_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, most_bytes: int | None
) -> None:
    begun, seen = threading.Event(), []
    launch = BackgroundSaver.launch

    def launched(saver: BackgroundSaver, handle: SaveHandle, work: Any, then: Any, **options: Any) -> None:
        launch(saver, handle, lambda: (begun.set(), work())[1], then, **options)
        seen.append(begun.wait(0.2 if most_bytes is None else LONGEST_WAIT_S))

    monkeypatch.setattr(BackgroundSaver, "launch", launched)
    job = build(tmp_path, background=True, staging_memory=most_bytes, items={"large": [torch.ones(10 << 20)]})
    train(job, 1)
    result = job.manager.save().wait(deadline_s=LONGEST_WAIT_S)
    job.manager.close()

    assert seen == [most_bytes is not None]
    assert result.step == 1


@pytest.mark.parametrize("place", range(8))
def test_an_interrupt_at_the_end_of_the_call_leaves_nothing_locked(tmp_path: Path, place: int) -> None:
    """It comes where Python code begins or goes on, and whoever handles it holds on to what it came through."""
    job = build(tmp_path, background=True)
    train(job, 1)
    thread, behind = job.manager._saver._thread, job.manager._saver.behind
    left, begun = iter(range(place, -1, -1)), threading.Event()

    def interrupt(frame: Any, event: str, argument: object) -> Any:
        if event in ("call", "line") and next(left, None) == 0:
            raise KeyboardInterrupt
        return interrupt

    def work() -> Any:
        begun.set()

    caught = []
    try:
        with behind.boundary(), thread.held_back():
            thread.launch(SaveHandle(), work, lambda: None, may_wait=True)
            sys.settrace(interrupt)
    except KeyboardInterrupt as exc:
        caught.append(exc)
    sys.settrace(None)
    is_begun = begun.wait(LONGEST_WAIT_S / 10)
    is_free = ThreadPoolExecutor(1).submit(behind._boundary.acquire, blocking=False).result()
    # Where it stays locked, nothing would end.
    with contextlib.suppress(RuntimeError):
        thread._gate.release()
    job.manager.close()

    assert (is_begun, is_free) == (True, True)


def test_at_most_one_save_is_in_flight(tmp_path: Path) -> None:
    storage = FaultyStorage(LocalStorage(str(tmp_path)))
    job = build(tmp_path, storage=storage, background=True, save=sp.every(updates=1))
    train(job, 6)
    job.manager.close()

    wrote = [
        path.split("/")[1] for _, verb, path in storage.operations if verb in ("create", "publish") and "/" in path
    ]
    order = [name for name in wrote if name.startswith("step-")]
    turns = [name for number, name in enumerate(order) if number == 0 or order[number - 1] != name]
    assert len(turns) == len(set(turns)) == 6


def test_twenty_saves_reuse_one_buffer(tmp_path: Path) -> None:
    """Field report B106."""
    model = nn.Linear(2500, 2000, bias=False)
    manager = sp.CheckpointManager(tmp_path, {"model": model}, background=True, keep=sp.keep(last=2))
    for _ in range(3):
        manager.after_update()
        manager.save()
    manager.wait()
    before = resident_bytes()

    for _ in range(20):
        manager.after_update()
        manager.save()
    manager.close()

    assert resident_bytes() - before < 2 * model.weight.nbytes


def resident_bytes() -> int:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


def failing(url: Path, *faults: Fault) -> FaultyStorage:
    return FaultyStorage(LocalStorage(str(url)), FaultScript(faults))


def full_disk(*, occurrence: int = 0, lasts: bool = False) -> Fault:
    return Fault(
        Effect.FAIL, verb="write", path="*.safetensors", errno=errno.ENOSPC, occurrence=occurrence, lasts=lasts
    )


@pytest.mark.parametrize("is_running", [False, True])
def test_an_interrupt_while_the_thread_is_started_loses_neither_the_save_nor_the_manager(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_running: bool
) -> None:
    """It may come before the thread runs, and when it does and nobody can say so."""
    job = build(tmp_path, background=True)
    start = threading.Thread.start

    def interrupted(thread: threading.Thread) -> None:
        if thread.name != "safepoint-save":
            start(thread)
            return
        if is_running:
            start(thread)
            thread._started.clear()  # type: ignore[attr-defined]
        raise KeyboardInterrupt

    train(job, 1)
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(threading.Thread, "start", interrupted)
        job.manager.save()
    train(job, 2)
    job.manager.save().wait(deadline_s=60)
    job.manager.wait()
    job.manager.close()
    assert [one.step for one in sp.open_run(tmp_path).checkpoints()] == [2, 1]


@pytest.mark.parametrize("ask", ["boundary", "wait", "close", "next save", "restore"])
def test_the_failure_of_a_save_that_was_asked_for_is_raised_at_the_next_occasion(tmp_path: Path, ask: str) -> None:
    """Field reports B189, B190."""
    job = build(tmp_path, storage=failing(tmp_path, full_disk(occurrence=1)), background=True)
    train(job, 1)
    job.manager.save().wait()
    train(job, 2)
    handle = job.manager.save()
    with pytest.raises(sp.StorageError):
        handle.wait()
    occasions = {
        "boundary": job.manager.after_update,
        "wait": job.manager.wait,
        "close": job.manager.close,
        "next save": job.manager.save,
        "restore": job.manager.restore,
    }

    with pytest.raises(sp.StorageError, match=r"No space|ENOSPC|space") as caught:
        occasions[ask]()

    assert caught.value is handle.error
    assert [one.step for one in job.manager.checkpoints()] == [1]
    job.manager.close()
    assert [one.step for one in job.manager.checkpoints()] == [1]


def test_an_update_whose_boundary_tells_a_failure_is_counted(tmp_path: Path) -> None:
    job = build(tmp_path, storage=failing(tmp_path, full_disk()), background=True)
    train(job, 1)
    handle = job.manager.save()
    with pytest.raises(sp.StorageError):
        handle.wait()
    with pytest.raises(sp.StorageError):
        train(job, 2)
    assert job.manager.progress.step == 2
    assert job.manager.save().wait().step == 2
    job.manager.close()


@pytest.mark.parametrize("background", [False, True])
def test_failures_on_schedule_are_told_twice_and_raised_at_the_third_in_a_row(tmp_path: Path, background: bool) -> None:
    storage = failing(tmp_path, full_disk(lasts=True))
    job = build(tmp_path, storage=storage, background=background, save=sp.every(updates=1))
    told = 0
    with pytest.raises(sp.StorageError):
        while True:
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                train(job, job.manager.progress.step + 1)
                job.manager.wait() if told == 2 and background else settle(job)
            told += sum("a save failed, training goes on" in str(one.message) for one in caught)
    assert told == 2
    die(job)


def settle(job: Any) -> None:
    """Let the save in flight end without asking for its failure."""
    errand = job.manager._saver._thread._errand
    if errand is not None:
        assert errand.ended.wait(60)


class Flaky:
    """A storage in which two of three saves fail."""

    def __init__(self, url: Path) -> None:
        self._inner = LocalStorage(str(url))
        self._count = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def create(self, path: str, **hints: Any) -> Any:
        if path.endswith(".safetensors"):
            self._count += 1
            if self._count % 3:
                raise sp.StorageError("a disk that comes and goes", where=path)
        return self._inner.create(path, **hints)


def test_a_success_forgives_the_failures_before_it(tmp_path: Path) -> None:
    job = build(tmp_path, storage=Flaky(tmp_path), save=sp.every(updates=1))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        train(job, 9)
    assert sum("a save failed" in str(one.message) for one in caught) == 6
    assert [one.step for one in job.manager.checkpoints()] == [9, 6, 3]
    job.manager.close()


def test_a_failed_save_leaves_the_training_and_the_older_checkpoints_as_they_are(tmp_path: Path) -> None:
    silent = build(tmp_path / "silent")
    expected = train(silent, 5)
    after = picture(silent)
    storage = failing(tmp_path / "run", full_disk(occurrence=1))
    job = build(tmp_path / "run", storage=storage, save=sp.every(updates=2))
    with pytest.warns(RuntimeWarning, match="a save failed"):
        found = train(job, 5)

    assert found == expected and picture(job) == after
    assert [one.step for one in job.manager.checkpoints()] == [2]
    job.manager.close()


SCRIPT = """
import errno, torch, safepoint as sp
from safepoint.storage.local import LocalStorage
from safepoint.faults.script import Effect, Fault, FaultScript
from safepoint.faults.storage import FaultyStorage
url, fails = "run", {fails}
fault = Fault(Effect.FAIL, verb="write", path="*.safetensors", errno=errno.ENOSPC)
storage = FaultyStorage(LocalStorage(url), FaultScript((fault,) if fails else ()))
model = torch.nn.Linear(300, 300)
manager = sp.CheckpointManager(url, {"model": model}, storage=storage, background=True)
manager.after_update()
manager.save()
"""


@pytest.mark.parametrize("fails, code", [(False, 0), (True, 5)])
def test_a_script_that_ends_without_asking_completes_its_save_or_fails(
    tmp_path: Path, warm_python: WarmPython, fails: bool, code: int
) -> None:
    """Field reports B189, B190, B191."""
    script = tmp_path / "script.py"
    script.write_text(SCRIPT.replace("{fails}", str(fails)))
    done = warm_python.run(script, folder=tmp_path, logs=tmp_path)

    assert done.returncode == code, done.errors
    assert ("a background save failed and nobody asked" in done.errors) == (code != 0)
    checkpoints = sp.open_run(tmp_path / "run").checkpoints()
    assert [one.step for one in checkpoints] == ([1] if code == 0 else [])


def test_a_background_run_that_dies_and_resumes_is_the_uninterrupted_one(tmp_path: Path) -> None:
    whole = build(tmp_path / "whole")
    expected = train(whole, 9)
    after = bits(dict(whole.model.state_dict()))
    job = build(tmp_path / "run", background=True, save=sp.every(updates=2))
    train(job, 5)
    die(job)
    job = build(tmp_path / "run", seed=3, background=True, save=sp.every(updates=2))
    assert job.manager.restore().step == 4
    assert train(job, 9) == expected[4:]
    assert bits(dict(job.model.state_dict())) == after
    job.manager.close()
