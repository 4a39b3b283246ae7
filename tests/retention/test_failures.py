"""Whatever an operation of a retention raises, the save before it stays committed, and what failed is done later."""

from __future__ import annotations

import contextlib
import errno
from collections.abc import Callable
from typing import Any

import pytest

from safepoint.catalog import GenerationState
from safepoint.errors import (
    CorruptionError,
    FencedError,
    FormatVersionError,
    InternalError,
    OutcomeUnknownError,
    StorageError,
)
from safepoint.faults.script import Effect, Fault, FaultScript
from safepoint.faults.storage import FaultyStorage
from safepoint.joining.follower import RankSession
from safepoint.retention.policy import keep
from safepoint.storage.base import Storage
from safepoint.storage.memory import MemoryStorage
from safepoint.testing.ambient import FakeWorld
from tests.build import write_generation
from tests.crash.job import Job, newest_step
from tests.retention.saves import CHAIN, DATA, after_save, everything, save, steps

LONGEST_S = 30
ERRORS: dict[str, Callable[[], Exception]] = {
    "a failing device": lambda: StorageError("the device failed", errno=errno.EIO),
    "a lost answer": lambda: OutcomeUnknownError("the answer was lost"),
    "an untranslated error of the system": lambda: OSError(errno.ESTALE, "stale handle"),
    "another word": lambda: FencedError("somebody is newer", found="incarnation 9"),
    "another bug": lambda: InternalError("a promise was broken"),
    "damage": lambda: CorruptionError("bytes contradict the record"),
    "a newer format": lambda: FormatVersionError("a newer format"),
}
# A reader takes these for what it is about to find, and need not warn of them.
FINDINGS = (CorruptionError, FormatVersionError, FencedError)


class Raising(FaultyStorage):
    """Raise an error at one operation of what begins with `begin`, or from that one on; before it is done, or after."""

    def __init__(self, inner: Storage, operation: int | None, error: Callable[[], Exception], *, lasts: bool) -> None:
        super().__init__(inner)
        self._operation, self._error, self._lasts = operation, error, lasts
        self.seen: int | None = None

    def begin(self) -> None:
        self.seen = 0

    def run(self, verb: str, path: str, *arguments: Any, **options: Any) -> Any:
        if self.seen is None:
            return super().run(verb, path, *arguments, **options)
        number, self.seen = self.seen, self.seen + 1
        is_met = self._operation is not None and (
            number == self._operation or (self._lasts and number > self._operation)
        )
        if not is_met:
            return super().run(verb, path, *arguments, **options)
        if number % 2:
            # Its own answer is lost, also that there is no such object.
            with contextlib.suppress(StorageError):
                super().run(verb, path, *arguments, **options)
        raise self._error()


def retained(
    operation: int | None, error: Callable[[], Exception], *, lasts: bool = False, is_background: bool = False
) -> tuple[MemoryStorage, Job, Raising]:
    """Return a job that has saved 40 with such a retention after it, which deletes one checkpoint and marks another."""
    storage = MemoryStorage()
    job = Job(storage, FakeWorld(), pid=1, is_background=is_background)
    job.start()
    for step in (10, 20, 30):
        saved(job, step)
    job.saver._storage = raising = Raising(storage, operation, error, lasts=lasts)
    retain = job.saver._retain

    def counted(session: RankSession) -> None:
        raising.begin()
        retain(session)

    job.saver._retain = counted  # type: ignore[method-assign]  # nothing else tells where retention begins
    saved(job, 40)
    return storage, job, raising


def saved(job: Job, step: int) -> None:
    """Save, wait for all that follows the save, and check that it was done without an error."""
    job.train_to(step)
    handle = job.save()
    job.saver.raise_owed(waits=True)
    assert handle.wait(deadline_s=LONGEST_S).step == step
    assert (handle.committed, handle.error) == (True, None)


def operation_count() -> int:
    *_, raising = retained(None, RuntimeError)
    assert raising.seen is not None
    return raising.seen


def check(operation: int, name: str, *, lasts: bool, is_background: bool, caplog: pytest.LogCaptureFixture) -> None:
    caplog.clear()
    error = ERRORS[name]
    storage, job, raising = retained(operation, error, lasts=lasts, is_background=is_background)
    assert raising.seen is not None and raising.seen > operation, "the error was never met"
    assert newest_step(storage) == 40
    assert len(steps(storage)) >= 2
    told = [record.message for record in caplog.records if record.message.startswith("retention: ")]
    assert told or isinstance(error(), FINDINGS), "nobody was told"
    job.saver._storage = storage
    del job.saver._retain
    for step in (50, 60, 70):
        saved(job, step)
    assert steps(storage) == [60, 70], "what failed was not made good"
    # A folder that lost its manifest already is left to the next start, without data.
    assert sum(path.endswith(DATA) for path in everything(storage, "generations")) <= 3
    job.die()
    if is_background:
        job.saver.close()


@pytest.mark.parametrize("is_background", [False, True], ids=["in the foreground", "behind"])
@pytest.mark.parametrize("name", ERRORS)
def test_an_error_in_a_retention_leaves_the_save_committed(
    name: str, is_background: bool, caplog: pytest.LogCaptureFixture
) -> None:
    """At a few operations, elsewhere for each error."""
    first = 2 * list(ERRORS).index(name) + is_background
    for operation in range(first, operation_count(), 2 * len(ERRORS)):
        check(operation, name, lasts=bool(operation % 2), is_background=is_background, caplog=caplog)


@pytest.mark.soak
@pytest.mark.parametrize("is_background", [False, True], ids=["in the foreground", "behind"])
@pytest.mark.parametrize("name", ERRORS)
def test_an_error_at_any_operation_of_a_retention_leaves_the_save_committed(
    name: str, is_background: bool, caplog: pytest.LogCaptureFixture
) -> None:
    count = operation_count()
    for operation in range(count):
        for lasts in (False, True):
            check(operation, name, lasts=lasts, is_background=is_background, caplog=caplog)
    print(f"counted: {2 * count} errors in a retention")


@pytest.mark.parametrize("name", ERRORS)
def test_a_deletion_that_raises_costs_its_own_generation_alone(name: str, storage: MemoryStorage) -> None:
    first, second, third = (save(storage, step, keep(last=9)).decisions[0].generation for step in (1, 2, 3))
    save(storage, 4, keep(last=9))
    save(storage, 5, keep(last=2))

    class Refusing(FaultyStorage):
        def delete(self, path: str) -> None:
            if second in path:
                raise ERRORS[name]()
            super().delete(path)

    report = after_save(Refusing(storage))
    assert report.swept.deleted == (first, third)
    assert [second in warning for warning in report.warnings] == [True]
    assert not report.stopped
    assert after_save(storage).swept.deleted == (second,)


def test_a_look_for_a_newer_start_that_fails_costs_its_own_generation_alone(storage: MemoryStorage) -> None:
    """What was deleted and marked beside it is done, and told."""
    first, second, third = (save(storage, step, keep(last=9)).decisions[0].generation for step in (1, 2, 3))
    save(storage, 4, keep(last=9))
    marked = save(storage, 5, keep(last=2)).marked
    assert sorted(marked) == [first, second, third]
    # The lineage, the sweep as a whole, and then each generation is looked at for.
    third_look = Fault(Effect.FAIL, verb="list", path="incarnations", occurrence=3)
    report = after_save(FaultyStorage(storage, FaultScript((third_look,))))
    assert report.swept.deleted == (first, third)
    assert [second in warning for warning in report.warnings] == [True]
    assert not report.stopped
    assert after_save(storage).swept.deleted == (second,)


def test_a_mark_beside_one_that_fails_is_told(storage: MemoryStorage) -> None:
    names = [write_generation(storage, step, chain=CHAIN) for step in (1, 2, 3, 4, 5)]
    unpublished = Fault(Effect.LOSE_ANSWER, verb="list", path="incarnations", occurrence=3)
    report = after_save(FaultyStorage(storage, FaultScript((unpublished,))))
    assert len(report.marked) == 2 and set(report.marked) < set(names[:3])
    assert len(report.warnings) == 1 and not report.stopped
    assert len(steps(storage, GenerationState.DELETED)) == 2
