"""A child that is forked off a job holds nothing of the run: it writes, joins and waits for nothing."""

from __future__ import annotations

import os
import signal
import threading
import warnings
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

import safepoint as sp
from safepoint.ambient import SystemAmbient
from safepoint.errors import AbortedError, FencedError, RequestError, SafepointError
from safepoint.storage.base import Storage
from safepoint.storage.local import LocalStorage
from safepoint.testing.ambient import FakeWorld
from tests.crash.job import Job, newest_step
from tests.joining.hooks import HookedStorage
from tests.retention.saves import everything

pytestmark = pytest.mark.skipif(not hasattr(os, "fork"), reason="there is no fork here")

_LONGEST_S = 30


def in_child(work: Callable[[], object]) -> str:
    """Return what `work` returned in a child that was forked off, as text, or the error that it raised."""
    out, into = os.pipe()
    with warnings.catch_warnings():
        # Newer Pythons warn of a fork beside threads, which is what is tested.
        warnings.simplefilter("ignore", DeprecationWarning)
        pid = os.fork()
    if pid == 0:
        # A child that hangs is ended, and has said nothing.
        signal.alarm(_LONGEST_S)
        try:
            text = str(work())
        except SafepointError as exc:
            text = type(exc).__name__
        os.write(into, text.encode())
        os._exit(0)
    os.close(into)
    with open(out, encoding="utf-8") as file:
        text = file.read()
    os.waitpid(pid, 0)
    return text


def started(root: Path, *, is_background: bool = False) -> tuple[Storage, Job]:
    storage = LocalStorage(root)
    job = Job(storage, FakeWorld(), pid=1, ambient=SystemAmbient(), is_background=is_background)
    job.start()
    job.live(10)
    job.saver.raise_owed(waits=True)
    return storage, job


def unmoved(storage: Storage) -> dict[str, bytes]:
    """Return everything that lies there but the heartbeat, which the parent may move at any time."""
    return {path: data for path, data in everything(storage).items() if not path.endswith(".alive")}


def test_a_child_that_ends_does_not_say_that_its_parent_is_gone(tmp_path: Path) -> None:
    """Spec: C1.8"""
    storage, job = started(tmp_path / "run")
    before = unmoved(storage)
    assert in_child(job.end) == "None"
    assert storage.read("incarnations/000001.alive", limit_bytes=64) != b"closed"
    assert unmoved(storage) == before
    with pytest.raises(FencedError):
        Job(storage, FakeWorld(), pid=2, ambient=SystemAmbient()).start()
    job.live(20)
    assert newest_step(storage) == 20
    job.end()
    assert storage.read("incarnations/000001.alive", limit_bytes=64) == b"closed"


def test_a_child_cannot_save_or_note_an_update(tmp_path: Path) -> None:
    """Spec: C1.8"""
    storage, job = started(tmp_path / "run")
    session = job.session
    assert session is not None
    before = unmoved(storage)
    assert in_child(lambda: job.train_to(20)) == RequestError.__name__
    assert in_child(job.save) == RequestError.__name__
    assert in_child(lambda: session.journal.update(20)) == RequestError.__name__
    assert in_child(lambda: session.claim) == RequestError.__name__
    assert in_child(lambda: job.membership.is_joined) == "False"
    assert unmoved(storage) == before
    job.end()


def test_a_child_neither_waits_for_a_save_in_flight_nor_ends_it(tmp_path: Path) -> None:
    storage, job = started(tmp_path / "run", is_background=True)
    is_writing, may_go_on = threading.Event(), threading.Event()

    def hold_up() -> None:
        is_writing.set()
        assert may_go_on.wait(_LONGEST_S)

    job.saver._storage = HookedStorage(storage, "create", ".safetensors", hold_up)
    job.train_to(20)
    handle = job.save()
    assert is_writing.wait(_LONGEST_S)
    assert in_child(lambda: job.saver.raise_owed(waits=True)) == "None"
    assert in_child(job.saver._thread._report_at_exit) == "None"
    assert in_child(handle.wait) == AbortedError.__name__
    may_go_on.set()
    assert handle.wait(deadline_s=_LONGEST_S).step == 20
    job.saver.raise_owed(waits=True)
    job.saver.close()
    job.end()


def test_a_manager_that_a_child_closes_stays_open_in_the_parent(tmp_path: Path) -> None:
    """Also where a save is due: the parent makes it."""
    model = torch.nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    manager = sp.CheckpointManager(tmp_path / "run", {"model": model, "optimizer": optimizer}, save=sp.every(updates=2))
    manager.restore()
    optimizer.step()
    manager.after_update(samples=1)
    storage = LocalStorage(tmp_path / "run")
    before = unmoved(storage)
    assert in_child(manager.close) == "None"
    assert in_child(lambda: manager.after_update(samples=1)) == RequestError.__name__
    assert in_child(manager.save) == RequestError.__name__
    assert unmoved(storage) == before
    optimizer.step()
    manager.after_update(samples=1)
    assert [checkpoint.step for checkpoint in manager.checkpoints()] == [2]
    manager.close()


def test_a_child_may_hold_a_run_of_its_own(tmp_path: Path) -> None:
    _, job = started(tmp_path / "run")

    def live() -> int:
        own = Job(LocalStorage(tmp_path / "other"), FakeWorld(), pid=1, ambient=SystemAmbient())
        own.start()
        own.live(5)
        own.end()
        return newest_step(own.storage)

    assert in_child(live) == "5"
    job.end()
