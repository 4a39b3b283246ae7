"""Let each operation of a start and of a save fail in each way: an error with a name, and nothing older is harmed."""

from __future__ import annotations

import errno

import pytest

from safepoint.catalog import read_lineage
from safepoint.errors import AbortedError, OutcomeUnknownError, SafepointError, StorageError
from safepoint.faults.disk import SimulatedDisk
from safepoint.faults.script import Effect, Fault, FaultScript, random_script
from safepoint.faults.storage import FaultyStorage
from safepoint.storage.base import Storage
from safepoint.storage.memory import MemoryStorage
from safepoint.testing.ambient import FakeWorld
from tests.crash.damage import files_of
from tests.crash.job import Job, check_state_is_told, newest_step, whole_state

NUMBERS = (errno.EIO, errno.ENOSPC, errno.ESTALE)


def started(storage: Storage) -> Job:
    """Return a job with steps 10, 20 and 30, whose next save marks one checkpoint and deletes another."""
    job = Job(storage, FakeWorld(), pid=1)
    job.start()
    job.live(10, 20, 30)
    return job


def saving_through(storage: Storage, *faults: Fault, seed: int = 0) -> tuple[Job, FaultyStorage]:
    """Return a job whose later saves meet these faults, counted from the first operation of the next save."""
    job = started(storage)
    faulty = FaultyStorage(storage, FaultScript(faults, seed))
    job.saver._storage = faulty
    return job, faulty


def operations_of_a_save() -> list[tuple[int, str, str]]:
    job, faulty = saving_through(MemoryStorage())
    job.live(40)
    return faulty.operations


def operations_of_a_start() -> list[tuple[int, str, str]]:
    storage = MemoryStorage()
    started(storage).end()
    faulty = FaultyStorage(storage)
    Job(faulty, FakeWorld(), pid=2).start()
    return faulty.operations


SAVE = operations_of_a_save()
START = operations_of_a_start()


def save_meeting(fault: Fault, seed: int) -> None:
    """Save once with the fault and once without, and check what a reader finds after each."""
    storage = MemoryStorage()
    job, faulty = saving_through(storage, fault, seed=seed)
    older = immutable_files(storage)
    job.train_to(40)
    try:
        job.save()
        allowed = {40}
    except OutcomeUnknownError:
        allowed = {30, 40}
    except (StorageError, AbortedError) as exc:
        assert str(exc)
        allowed = {30}
        left = immutable_files(storage)
        assert older == {path: left.get(path) for path in older}, "a failed save touched what was there"
    assert faulty.fired, "the fault was never met"
    assert newest_step(storage) in allowed
    tried = attempts(storage)
    job.saver._storage = storage
    job.save()
    assert newest_step(storage) == 40
    assert attempts(storage) - tried, "a later save used the folder of a failed one"
    job.live(50)
    job.die()
    again = Job(storage, FakeWorld(states={1: "gone"}), pid=2)
    assert again.start().step == 50
    assert again.state() == whole_state(50)


def immutable_files(storage: Storage) -> dict[str, bytes]:
    """Return all files but those that change in place, which nothing depends on."""
    found = files_of(storage)
    return {path: data for path, data in found.items() if not path.endswith((".alive", ".jsonl"))}


def attempts(storage: Storage) -> set[str]:
    return {entry.name for entry in storage.list("generations") if entry.name.startswith("step-000000000040-")}


def test_a_save_has_enough_operations_to_mean_something() -> None:
    assert len(SAVE) > 50
    assert {"make_folder", "create", "write", "finish", "sync_folder", "publish", "delete"} <= {
        verb for _, verb, _ in SAVE
    }


@pytest.mark.parametrize("number", NUMBERS, ids=errno.errorcode.get)
@pytest.mark.parametrize("lasts", [False, True], ids=["once", "from then on"])
def test_a_failure_at_an_operation_of_a_save_leaves_the_checkpoints(number: int, lasts: bool, seed: int) -> None:
    """Spec: C3.2, C6.2, C7.1"""
    first = NUMBERS.index(number) + 2 * lasts
    operations = range(first, len(SAVE), 5)
    for operation in operations:
        save_meeting(Fault(Effect.FAIL, operation=operation, errno=number, lasts=lasts), seed)
    print(f"counted: {len(operations)} errors")


@pytest.mark.soak
def test_a_lost_answer_at_any_operation_of_a_save_leaves_the_checkpoints(seed: int) -> None:
    """Once, and from then on.

    Spec: C6.2
    """
    for operation in range(len(SAVE)):
        save_meeting(Fault(Effect.LOSE_ANSWER, operation=operation), seed)
        save_meeting(Fault(Effect.LOSE_ANSWER, operation=operation, lasts=True), seed)
    print(f"counted: {2 * len(SAVE)} lost answers")


@pytest.mark.soak
@pytest.mark.parametrize("number", (*NUMBERS, errno.EACCES, errno.EDQUOT, errno.EINTR), ids=errno.errorcode.get)
@pytest.mark.parametrize("lasts", [False, True], ids=["once", "from then on"])
def test_a_failure_at_any_operation_of_a_save_leaves_the_checkpoints(number: int, lasts: bool, seed: int) -> None:
    """Spec: C3.2, C6.2, C7.1"""
    for operation in range(len(SAVE)):
        save_meeting(Fault(Effect.FAIL, operation=operation, errno=number, lasts=lasts), seed)
    print(f"counted: {len(SAVE)} errors")


def test_a_short_write_at_each_write_of_a_save_leaves_the_checkpoints(seed: int) -> None:
    """Spec: C5.1"""
    writes = [
        operation
        for operation, verb, path in SAVE
        if verb == "write" or (verb == "publish" and path.endswith("manifest.json"))
    ]
    for operation in writes:
        save_meeting(Fault(Effect.CUT_SHORT, operation=operation), seed)
    print(f"counted: {len(writes)} short writes")


def test_a_lost_answer_at_an_operation_of_a_save_leaves_the_checkpoints(seed: int) -> None:
    """Spec: C6.2"""
    operations = range(0, len(SAVE), 2)
    for operation in operations:
        save_meeting(Fault(Effect.LOSE_ANSWER, operation=operation), seed)
    print(f"counted: {len(operations)} lost answers")


def test_a_failed_sync_is_never_made_good_by_a_later_one(seed: int) -> None:
    """What the failed sync should have made durable is lost at the next power cut, and nothing misses it.

    Spec: C3.2
    """
    for operation, verb, path in SAVE:
        if verb not in ("finish", "sync_folder") or not path.startswith("generations"):
            continue
        disk = SimulatedDisk()
        job, faulty = saving_through(disk, Fault(Effect.FAIL, operation=operation), seed=seed)
        job.train_to(40)
        try:
            job.save()
        except (StorageError, OutcomeUnknownError):
            pass
        assert faulty.fired
        job.saver._storage = disk
        job.save()
        job.die()
        for number, state in enumerate(disk.crash_states(seed, 8)):
            start = Job(state, FakeWorld(states={1: "gone"}), pid=2 + number)
            assert start.start().step == 40
            assert start.state() == whole_state(40)


def start_meeting(operation: int, effect: Effect, number: int, seed: int, *, lasts: bool) -> None:
    """Start with a fault, which may end the start, and then without."""
    storage = MemoryStorage()
    started(storage).end()
    faulty = FaultyStorage(storage, FaultScript((Fault(effect, operation, errno=number, lasts=lasts),), seed))
    job = Job(faulty, FakeWorld(), pid=2)
    try:
        report = job.start()
        assert report.step in (20, 30)
        assert job.state() == whole_state(report.step)
        assert report.step == 30 or report.refused
    except SafepointError as exc:
        check_state_is_told(job, exc)
    job.die()
    again = Job(storage, FakeWorld(states={2: "gone"}), pid=3)
    report = again.start()
    assert report.step in (20, 30)
    assert again.state() == whole_state(report.step)
    again.live(60)
    assert newest_step(storage) == 60


@pytest.mark.parametrize("effect", [Effect.FAIL, Effect.LOSE_ANSWER, Effect.FLIP_BIT, Effect.CUT_SHORT])
def test_a_failure_at_an_operation_of_a_start_is_a_typed_error_and_leaves_the_lineage(
    effect: Effect, seed: int
) -> None:
    """Spec: C8.5, C9.2"""
    fail_starts(effect, seed, START[seed % 2 :: 2])


@pytest.mark.soak
@pytest.mark.parametrize("effect", [Effect.FAIL, Effect.LOSE_ANSWER, Effect.FLIP_BIT, Effect.CUT_SHORT])
def test_a_failure_at_any_operation_of_a_start_is_a_typed_error_and_leaves_the_lineage(
    effect: Effect, seed: int
) -> None:
    """Spec: C8.5, C9.2"""
    fail_starts(effect, seed, START)


def fail_starts(effect: Effect, seed: int, operations: list[tuple[int, str, str]]) -> None:
    count = 0
    for operation, verb, _ in operations:
        if effect in (Effect.CUT_SHORT, Effect.FLIP_BIT) and verb not in ("read", "read_into", "size"):
            # A record that was stored wrong is damage; a store that hides a part of its names is none to build on.
            continue
        if Fault(effect).meets(operation, verb, ""):
            start_meeting(operation, effect, errno.EIO, seed, lasts=operation % 2 == 1 and effect is Effect.FAIL)
            count += 1
    print(f"counted: {count} starts that meet {effect.value!r}")


@pytest.mark.soak
def test_random_scripts_of_failures_leave_a_usable_run(seed: int) -> None:
    """Also through several faults at once; whatever is restored is whole and of one step."""
    for count in range(3000):
        storage = MemoryStorage()
        script = random_script(seed + count, operation_count=len(SAVE))
        job = started(storage)
        job.saver._storage = FaultyStorage(storage, script)
        try:
            job.live(40, 50)
        except (SafepointError, BaseException) as exc:  # noqa: BLE001 (a simulated crash is none of Exception)
            assert not isinstance(exc, KeyboardInterrupt)
        job.die()
        again = Job(storage, FakeWorld(states={1: "gone"}), pid=2)
        report = again.start()
        assert report.step in (20, 30, 40, 50), script
        assert again.state() == whole_state(report.step), script
        assert read_lineage(storage).newest == 2
    print("counted: 3000 scripts")
