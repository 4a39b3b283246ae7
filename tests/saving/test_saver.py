"""The policy for saves that fail: who is told, when, and when training ends."""

from __future__ import annotations

import errno
import signal
import threading
import warnings

import pytest

from safepoint.errors import FencedError, OutcomeUnknownError, StorageError, TornSnapshotError
from safepoint.faults.script import Effect, Fault, FaultScript
from safepoint.faults.storage import FaultyStorage
from safepoint.group.solo import SoloGroup
from safepoint.saver import TOLERATED_FAILURES
from safepoint.saving.background import SaveHandle
from safepoint.schedule import every
from safepoint.signals import on_signals
from safepoint.stop import Stop
from safepoint.storage.memory import MemoryStorage
from safepoint.testing.ambient import FakeWorld
from tests.crash.job import Job, newest_step
from tests.retention.saves import everything

FULL = Fault(Effect.FAIL, verb="create", path="generations/*", errno=errno.ENOSPC, lasts=True)


class Full(FaultyStorage):
    """A storage that has no room left, which it says when it is asked."""

    def free_bytes(self) -> int | None:
        return 0


def started(*, is_background: bool = False) -> tuple[MemoryStorage, Job]:
    storage = MemoryStorage()
    job = Job(storage, FakeWorld(), pid=1, is_background=is_background)
    job.start()
    job.train_to(10)
    job.save().wait(deadline_s=30)
    return storage, job


def break_it(job: Job, *faults: Fault) -> FaultyStorage:
    faulty = FaultyStorage(job.storage, FaultScript(faults or (FULL,)))
    job.saver._storage = faulty
    return faulty


def scheduled(job: Job, step: int) -> None:
    job.train_to(step)
    job.save(is_scheduled=True)


def settle(job: Job) -> None:
    job.saver.raise_owed(waits=True)


def test_two_scheduled_failures_warn_and_the_third_in_a_row_raises() -> None:
    storage, job = started()
    break_it(job)
    for step in (20, 30):
        with pytest.warns(RuntimeWarning, match="a save failed, training goes on.*disk is full"):
            scheduled(job, step)
    with pytest.raises(StorageError, match="disk is full"):
        scheduled(job, 40)
    assert TOLERATED_FAILURES == 2
    assert newest_step(storage) == 10


@pytest.mark.parametrize("is_background", [False, True])
def test_a_storage_that_fails_before_the_copy_is_tolerated_like_one_that_fails_after_it(is_background: bool) -> None:
    storage, job = started(is_background=is_background)
    job.saver._storage = Full(storage)
    for step in (20, 30):
        with pytest.warns(RuntimeWarning, match="a save failed, training goes on.*was not begun"):
            scheduled(job, step)
    with pytest.raises(StorageError):
        scheduled(job, 40)
    assert newest_step(storage) == 10


def test_a_save_that_succeeds_forgives_the_failures_before_it() -> None:
    storage, job = started()
    for step in (20, 40):
        break_it(job)
        for failing in (step, step + 1):
            with pytest.warns(RuntimeWarning):
                scheduled(job, failing)
        job.saver._storage = storage
        scheduled(job, step + 2)
        assert newest_step(storage) == step + 2


def test_an_explicit_save_always_raises() -> None:
    _, job = started()
    break_it(job)
    job.train_to(20)
    with pytest.raises(StorageError, match="disk is full"):
        job.save()


def test_a_fenced_start_always_raises() -> None:
    storage, job = started()
    Job(storage, job.world, pid=2, takeover=True).start()
    with pytest.raises(FencedError):
        scheduled(job, 20)


def test_a_torn_snapshot_always_raises() -> None:
    _, job = started()

    def torn() -> object:
        raise TornSnapshotError("it moved")

    job._snapshot = torn  # type: ignore[method-assign,assignment]
    with pytest.raises(TornSnapshotError):
        scheduled(job, 20)


def test_a_capture_that_fails_ends_its_handle() -> None:
    """Somebody may wait for it."""
    _, job = started()
    handle = SaveHandle()

    def torn() -> object:
        raise TornSnapshotError("it moved")

    with pytest.raises(TornSnapshotError):
        job.saver.save(job.membership.require(), torn, handle)  # type: ignore[arg-type]
    with pytest.raises(TornSnapshotError):
        handle.wait(deadline_s=5)


def test_a_save_that_falls_due_at_the_close_raises_its_failure() -> None:
    _, job = started()
    break_it(job)
    job.train_to(20)
    job.saver._due._schedule = every(updates=5)
    handle = job.saver.take_due(20, incarnation=lambda: 1, is_explicit=True)
    assert handle is not None
    with pytest.raises(StorageError):
        job.saver.save(job.membership.require(), job._snapshot, handle)


def test_a_background_failure_is_told_at_the_next_boundary() -> None:
    storage, job = started(is_background=True)
    settle(job)
    break_it(job)
    scheduled(job, 20)
    with pytest.warns(RuntimeWarning, match="disk is full"):
        settle(job)
    job.saver.close()
    assert newest_step(storage) == 10


def test_a_background_failure_counts_like_any_other() -> None:
    _, job = started(is_background=True)
    settle(job)
    break_it(job)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for step in (20, 30, 40):
            scheduled(job, step)
    assert [warning.category for warning in caught] == [RuntimeWarning, RuntimeWarning]
    with pytest.raises(StorageError):
        settle(job)
    job.saver.close()


def test_a_background_failure_of_an_explicit_save_is_raised() -> None:
    _, job = started(is_background=True)
    settle(job)
    break_it(job)
    job.train_to(20)
    handle = job.save()
    with pytest.raises(StorageError):
        settle(job)
    with pytest.raises(StorageError):
        handle.wait(deadline_s=30)
    job.saver.close()


def test_a_save_that_is_not_made_for_the_failure_before_it_ends_its_handle() -> None:
    _, job = started(is_background=True)
    settle(job)
    break_it(job)
    scheduled(job, 20)
    job.train_to(30)
    handle = SaveHandle(is_explicit=True)
    with pytest.raises(StorageError):
        job.saver.save(job.membership.require(), job._snapshot, handle)
    with pytest.raises(StorageError):
        handle.wait(deadline_s=5)
    job.saver.close()


def test_waiting_raises_whatever_the_save_was() -> None:
    _, job = started(is_background=True)
    settle(job)
    break_it(job)
    scheduled(job, 20)
    with pytest.raises(StorageError):
        job.saver.raise_owed(waits=True, is_explicit=True)
    job.saver.close()


def test_a_failure_is_told_once() -> None:
    _, job = started(is_background=True)
    settle(job)
    break_it(job)
    scheduled(job, 20)
    with pytest.warns(RuntimeWarning):
        settle(job)
    settle(job)
    job.saver.close()


def test_no_deletion_follows_a_failed_save() -> None:
    """But that of its own objects.

    Spec: C7.1, C3.3
    """
    storage, job = started()
    job.live(20, 30, 40)
    before = everything(storage, "generations")
    for fault in (FULL, Fault(Effect.FAIL, verb="sync_folder", path="generations/*", occurrence=1)):
        faulty = break_it(job, fault)
        job.train_to(50)
        with pytest.raises((StorageError, OutcomeUnknownError)):
            job.save()
        assert all("step-000000000050" in path for _, verb, path in faulty.operations if verb.startswith("delete"))
        assert "deleted.json" not in " ".join(path for _, verb, path in faulty.operations if verb == "publish")
    assert before.items() <= everything(storage, "generations").items()


def test_a_deletion_that_fails_is_no_failed_save() -> None:
    storage, job = started()
    job.live(20, 30)
    break_it(job, Fault(Effect.FAIL, verb="delete", lasts=True))
    job.train_to(40)
    assert job.save().committed
    assert newest_step(storage) == 40


def test_a_save_that_can_have_no_thread_is_made_at_the_boundary(monkeypatch: pytest.MonkeyPatch) -> None:
    """And the ones after it are made in the background again."""
    storage, job = started(is_background=True)
    settle(job)
    start = threading.Thread.start

    def refuse(thread: threading.Thread) -> None:
        if thread.name == "safepoint-save":
            raise RuntimeError("can't start new thread")
        start(thread)

    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", refuse)
        job.train_to(20)
        assert job.save().committed
        assert newest_step(storage) == 20
        break_it(job)
        scheduled(job, 30)
    with pytest.warns(RuntimeWarning, match="disk is full"):
        settle(job)
    job.saver._storage = storage
    scheduled(job, 40)
    settle(job)
    assert newest_step(storage) == 40
    job.saver.close()


class SlowToCreate:
    """A storage that creates nothing until its gate is opened."""

    def __init__(self, inner: MemoryStorage) -> None:
        self._inner, self.gate, self.is_asked = inner, threading.Event(), threading.Event()

    def __getattr__(self, name: str) -> object:
        return getattr(self._inner, name)

    def create(self, path: str, *, size_bytes: int = 0) -> object:
        self.is_asked.set()
        assert self.gate.wait(60)
        return self._inner.create(path, size_bytes=size_bytes)


def test_the_last_save_has_to_wait_for_what_is_left_of_the_one_in_flight() -> None:
    """With 30 seconds of grace there is time for one of 20, and none for that and the half of another one."""
    storage, job = started(is_background=True)
    settle(job)
    job.saver._storage = slow = SlowToCreate(storage)  # type: ignore[assignment]
    job.saver._took_s = 20.0
    stop = job.saver._stop = Stop(on_signals("TERM"), SoloGroup(), job.ambient)
    job.saver._due._stop = stop
    scheduled(job, 20)
    assert slow.is_asked.wait(60)
    job.ambient.sleep(5.0)
    stop.receive(signal.SIGTERM)
    assert job.saver.take_due(30, incarnation=lambda: 1) is None, "35 s are needed"
    slow.gate.set()
    settle(job)
    job.saver._took_s = 20.0
    job.saver._due._stop = job.saver._stop = Stop(on_signals("TERM"), SoloGroup(), job.ambient)
    job.saver._stop.receive(signal.SIGTERM)
    assert job.saver.take_due(40, incarnation=lambda: 1) is not None, "20 s are needed"
    job.saver.close()


class SlowToDelete:
    """A storage that deletes nothing until its gate is opened."""

    def __init__(self, inner: MemoryStorage) -> None:
        self._inner, self.gate = inner, threading.Event()

    def __getattr__(self, name: str) -> object:
        return getattr(self._inner, name)

    def delete(self, path: str) -> None:
        assert self.gate.wait(60)
        self._inner.delete(path)


def test_the_loop_does_not_wait_for_the_deletion_of_large_saves(monkeypatch: pytest.MonkeyPatch) -> None:
    """And the next save does, so that there is room for it."""
    monkeypatch.setattr("safepoint.saver._LARGE_BYTES", 1)
    storage, job = started()
    job.live(20, 30)
    job.saver._storage = slow = SlowToDelete(storage)  # type: ignore[assignment]
    job.train_to(40)
    assert job.save().committed
    assert job.saver.is_saving
    slow.gate.set()
    job.train_to(50)
    assert job.save().committed
    settle(job)
    assert len(storage.list("generations")) == 3
    job.saver.close()


def test_a_bug_in_what_follows_a_large_save_is_raised_at_the_next_boundary(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("safepoint.saver._LARGE_BYTES", 1)
    _, job = started()
    settle(job)
    monkeypatch.setattr(job.saver, "_retain", lambda session: 1 / 0)
    job.train_to(20)
    assert job.save().committed
    with pytest.raises(ZeroDivisionError):
        settle(job)
    job.saver.close()
