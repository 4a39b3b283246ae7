"""Cut the power at the operations of a job that writes increments, with retention deleting behind it.

The checkpoint chosen is whole, what it refers to included; it is not older than the newest save that was reported done;
the next save succeeds. Nothing that a usable checkpoint refers to is ever gone.
"""

from __future__ import annotations

import pytest

from safepoint.catalog import GenerationState, examine_all, read_lineage
from safepoint.faults.disk import SimulatedDisk
from safepoint.faults.script import Effect, Fault, FaultScript, SimulatedCrash
from safepoint.faults.storage import FaultyStorage
from safepoint.restoring.verify import verify_generation
from safepoint.storage.base import Storage
from safepoint.testing.ambient import FakeWorld
from tests.crash.job import Job, whole_state

FULL_EVERY = 3


def live(storage: Storage, world: FakeWorld, done: list[int]) -> None:
    """Run a start whose saves refer to each other, across two full ones and the first deletions."""
    job = Job(storage, world, pid=1, full_every=FULL_EVERY)
    try:
        job.start()
        for step in range(10, 80, 10):
            job.live(step)
            done.append(step)
    finally:
        job.die()


def operation_count() -> int:
    storage = FaultyStorage(SimulatedDisk())
    live(storage, FakeWorld(), [])
    return len(storage.operations)


OPERATIONS = operation_count()


def test_the_job_refers_to_older_saves_and_deletes_some() -> None:
    storage = SimulatedDisk()
    live(storage, FakeWorld(), [])
    found = examine_all(storage, read_lineage(storage))
    referring = [one.name.step for one in found if one.manifest is not None and one.manifest.ancestors]
    assert referring and 20 not in [one.name.step for one in found]


@pytest.mark.parametrize("operation", range(2, OPERATIONS, 19))
def test_a_power_cut_leaves_a_usable_run(operation: int, seed: int) -> None:
    cut_the_power(operation, seed, states=4)


@pytest.mark.soak
@pytest.mark.parametrize("operation", range(OPERATIONS))
def test_a_power_cut_at_any_operation_leaves_a_usable_run(operation: int, seed: int) -> None:
    cut_the_power(operation, seed, states=12)


def cut_the_power(operation: int, seed: int, *, states: int) -> None:
    disk, world, done = SimulatedDisk(), FakeWorld(), [0]
    storage = FaultyStorage(disk, FaultScript((Fault(Effect.STOP, operation=operation, lasts=True),), seed=seed))
    with pytest.raises(SimulatedCrash):
        live(storage, world, done)
    number = -1
    for number, state in enumerate(disk.crash_states(seed, states)):
        recover(state, world, pid=100 + number, at_least=done[-1])
    print(f"counted: 1 power cut, {number + 1} states of the disk")


def recover(disk: Storage, world: FakeWorld, *, pid: int, at_least: int) -> None:
    job = Job(disk, world, pid=pid, full_every=FULL_EVERY)
    try:
        report = job.start()
        assert report.step >= at_least
        assert report.step == 0 or job.state() == whole_state(report.step)
        job.live(report.step + 1, report.step + 2)
    finally:
        job.die()
    usable = [one for one in examine_all(disk, read_lineage(disk)) if one.state is GenerationState.COMMITTED]
    assert usable[0].name.step == report.step + 2
    assert usable[0].manifest is not None and len(usable[0].manifest.ancestors) == 1
    assert [verify_generation(disk, one).findings for one in usable] == [()] * len(usable)
