"""Cut the power at every operation of a job's life, and start again from what the disk may then hold.

The invariants are the same at every point: the checkpoint chosen is whole and of one step, it is not older than the
newest save that was reported done, and the next save succeeds and is found.
"""

from __future__ import annotations

import pytest

from safepoint.catalog import read_lineage
from safepoint.faults.disk import SimulatedDisk
from safepoint.faults.script import Effect, Fault, FaultScript, SimulatedCrash
from safepoint.faults.storage import FaultyStorage
from safepoint.retention.retain import retain
from safepoint.storage.base import Storage
from safepoint.testing.ambient import FakeAmbient, FakeWorld
from tests.crash.job import LAST_TWO, Job, newest_step, whole_state


def live(storage: Storage, world: FakeWorld, done: list[int]) -> None:
    """Run two starts of a job: three saves, an end, two saves more; retention deletes on the way."""
    first = Job(storage, world, pid=1)
    try:
        first.start()
        for step in (10, 20, 30):
            first.train_to(step)
            first.save()
            done.append(step)
        first.end()
    finally:
        first.die()
    second = Job(storage, world, pid=2)
    try:
        second.start()
        for step in (40, 50):
            second.train_to(step)
            second.save()
            done.append(step)
    finally:
        second.die()


def operation_count() -> int:
    storage = FaultyStorage(SimulatedDisk())
    live(storage, FakeWorld(), [])
    return len(storage.operations)


OPERATIONS = operation_count()


def recover(disk: Storage, world: FakeWorld, *, pid: int, at_least: int) -> None:
    """Start on what is left, and check every invariant."""
    job = Job(disk, world, pid=pid)
    try:
        report = job.start()
        assert report.step >= at_least
        assert report.step == 0 or job.state() == whole_state(report.step)
        job.train_to(report.step + 1)
        job.save()
    finally:
        job.die()
    assert newest_step(disk) == report.step + 1


def test_the_life_of_a_job_has_enough_operations_to_mean_something() -> None:
    assert OPERATIONS > 200


@pytest.mark.parametrize("operation", range(1, OPERATIONS, 3))
def test_a_power_cut_leaves_a_usable_run(operation: int, seed: int) -> None:
    cut_the_power(operation, seed, states=6)


@pytest.mark.soak
@pytest.mark.parametrize("operation", range(OPERATIONS))
def test_a_power_cut_at_any_operation_leaves_a_usable_run(operation: int, seed: int) -> None:
    cut_the_power(operation, seed, states=24)


def cut_the_power(operation: int, seed: int, *, states: int) -> None:
    disk, world, done = SimulatedDisk(), FakeWorld(), [0]
    storage = FaultyStorage(disk, FaultScript((Fault(Effect.STOP, operation=operation, lasts=True),), seed=seed))
    with pytest.raises(SimulatedCrash):
        live(storage, world, done)
    number = -1
    for number, state in enumerate(disk.crash_states(seed, states)):
        recover(state, world, pid=100 + number, at_least=done[-1])
    print(f"counted: 1 power cut, {number + 1} states of the disk")


def pruned(storage: Storage, disk: SimulatedDisk, world: FakeWorld) -> None:
    """Let a job live and end, and delete all but two checkpoints as the command line does, in two calls."""
    job = Job(disk, world, pid=1, keeps=None)
    job.start()
    job.live(10, 20, 30, 40, 50)
    job.end()
    job.die()
    ambient = FakeAmbient(world, pid=9)
    for _ in range(2):
        lineage = read_lineage(disk)
        assert lineage.run is not None
        retain(storage, run=lineage.run, incarnation=1, policy=LAST_TWO, ambient=ambient)


def prune_operation_count() -> int:
    disk = SimulatedDisk()
    storage = FaultyStorage(disk)
    pruned(storage, disk, FakeWorld())
    assert len(disk.list("generations")) == 2
    return len(storage.operations)


PRUNE_OPERATIONS = prune_operation_count()


def cut_a_prune(operations: range, seed: int, *, states: int) -> None:
    count = 0
    for operation in operations:
        disk, world = SimulatedDisk(), FakeWorld()
        script = FaultScript((Fault(Effect.STOP, operation=operation, lasts=True),), seed=seed)
        with pytest.raises(SimulatedCrash):
            pruned(FaultyStorage(disk, script), disk, world)
        for state in disk.crash_states(seed, states):
            count += 1
            recover(state, world, pid=100 + count, at_least=50)
    print(f"counted: {len(operations)} power cuts in a prune, {count} states of the disk")


def test_a_power_cut_in_a_prune_leaves_a_usable_run(seed: int) -> None:
    """Spec: C12.1, C12.4"""
    cut_a_prune(range(seed % 19, PRUNE_OPERATIONS, 19), seed, states=4)


@pytest.mark.soak
def test_a_power_cut_at_any_operation_of_a_prune_leaves_a_usable_run(seed: int) -> None:
    """Spec: C12.1, C12.4"""
    cut_a_prune(range(PRUNE_OPERATIONS), seed, states=24)


# The start and the save that follow a crash have about so many operations.
RECOVERY_OPERATIONS = 135


@pytest.mark.parametrize("operation", range(0, OPERATIONS, 21))
def test_a_crash_during_a_recovery_leaves_a_usable_run(operation: int, seed: int) -> None:
    cut_the_recovery(operation, seed, points=range(operation % 34, RECOVERY_OPERATIONS, 34))


@pytest.mark.soak
@pytest.mark.parametrize("operation", range(0, OPERATIONS, 3))
def test_a_crash_at_any_operation_of_a_recovery_leaves_a_usable_run(operation: int, seed: int) -> None:
    cut_the_recovery(operation, seed, points=range(operation % 5, RECOVERY_OPERATIONS, 5))


def cut_the_recovery(operation: int, seed: int, *, points: range) -> None:
    disk, world, done = SimulatedDisk(), FakeWorld(), [0]
    storage = FaultyStorage(disk, FaultScript((Fault(Effect.STOP, operation=operation, lasts=True),), seed=seed))
    with pytest.raises(SimulatedCrash):
        live(storage, world, done)
    for again in points:
        state = next(iter(disk.crash_states(seed + again, 4)))
        script = FaultScript((Fault(Effect.STOP, operation=again, lasts=True),), seed=seed)
        try:
            recover(FaultyStorage(state, script), world, pid=200 + again, at_least=done[-1])
        except SimulatedCrash:
            pass
        recover(next(iter(state.crash_states(seed, 4))), world, pid=400 + again, at_least=done[-1])
    print(f"counted: {len(points)} second power cuts")
