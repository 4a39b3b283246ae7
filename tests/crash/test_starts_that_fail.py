"""Starts that die, loop, restore nothing or are turned away: the lineage survives them all."""

from __future__ import annotations

import errno
from collections.abc import Callable
from pathlib import Path

import pytest

from safepoint.catalog import read_lineage
from safepoint.errors import FencedError, NotFoundError, OutcomeUnknownError, RequestError, StorageError
from safepoint.faults.disk import SimulatedDisk
from safepoint.faults.script import Effect, Fault, FaultScript, SimulatedCrash
from safepoint.faults.storage import FaultyStorage
from safepoint.restoring.select import Wish
from safepoint.storage.base import Storage
from safepoint.storage.local import LocalStorage
from safepoint.testing.ambient import FakeWorld
from tests.crash.job import Job, newest_step, whole_state

MakeStorage = Callable[[], Storage]


@pytest.fixture(params=["local", "disk"])
def storage(request: pytest.FixtureRequest, tmp_path: Path) -> Storage:
    return LocalStorage(tmp_path / "run") if request.param == "local" else SimulatedDisk()


def lived(storage: Storage) -> FakeWorld:
    """Let a first start save steps 10 and 20, and die."""
    world = FakeWorld()
    job = Job(storage, world, pid=1)
    job.start()
    job.live(10, 20)
    job.die()
    return world


def die_at(storage: Storage, world: FakeWorld, pid: int, fault: Fault) -> None:
    """Start, and die within the operation that the fault meets."""
    job = Job(FaultyStorage(storage, FaultScript((fault,))), world, pid=pid)
    with pytest.raises(SimulatedCrash):
        job.start()
    job.die()
    assert job.membership.is_joined is False
    world.states[pid] = "gone"


def check_goes_on(storage: Storage, world: FakeWorld, *, pid: int, step: int) -> None:
    """Start properly, and check that it goes on from a step and that its own save is found."""
    job = Job(storage, world, pid=pid)
    report = job.start()
    assert (report.step, report.refused) == (step, ())
    assert job.state() == whole_state(step)
    job.live(step + 5)
    job.die()
    assert newest_step(storage) == step + 5


BETWEEN = Fault(Effect.STOP, verb="publish", path="incarnations/*.resumed.json", lasts=True)
AT_CLAIM = Fault(Effect.STOP, verb="publish", path="incarnations/*", lasts=True)
AT_BEAT = Fault(Effect.STOP, verb="put", path="*.alive", lasts=True)
AFTER = Fault(Effect.STOP, verb="append", path="journal/*", lasts=True)


@pytest.mark.parametrize("fault", [AT_CLAIM, AT_BEAT, BETWEEN, AFTER], ids=["claim", "beat", "between", "after"])
def test_a_start_that_dies_while_it_joins_changes_no_lineage(storage: Storage, fault: Fault) -> None:
    """Spec: C9.2, C1.5"""
    world = lived(storage)
    die_at(storage, world, 2, fault)
    check_goes_on(storage, world, pid=3, step=20)


def test_several_crash_looping_starts_change_no_lineage(storage: Storage) -> None:
    """Spec: C9.2, F6.4"""
    world = lived(storage)
    for pid in range(2, 9):
        die_at(storage, world, pid, BETWEEN)
    check_goes_on(storage, world, pid=9, step=20)
    lineage = read_lineage(storage)
    assert [link.incarnation for link in lineage.chain] == [1, 9]
    assert lineage.newest == 9


def test_a_crash_loop_before_the_first_checkpoint_ends_in_a_fresh_start(storage: Storage) -> None:
    world = FakeWorld()
    for pid in range(2, 6):
        die_at(storage, world, pid, BETWEEN)
    job = Job(storage, world, pid=6)
    assert job.start().is_fresh
    job.live(5)
    assert newest_step(storage) == 5


def test_a_start_that_restored_and_never_saved_changes_nothing_for_the_next(storage: Storage) -> None:
    world = lived(storage)
    for pid in (2, 3, 4):
        job = Job(storage, world, pid=pid)
        assert job.start().step == 20
        job.train_to(27)
        job.die()
    job = Job(storage, world, pid=5)
    report = job.start()
    assert (report.step, report.replayed) == (20, 7)


def test_a_start_that_never_restores_is_refused_at_its_first_boundary(storage: Storage) -> None:
    """Spec: C1.5"""
    world = lived(storage)
    job = Job(storage, world, pid=2)
    with pytest.raises(RequestError, match="did not start from one"):
        job.train_to(1)
    with pytest.raises(RequestError, match="did not start from one"):
        job.save()
    job.die()
    check_goes_on(storage, world, pid=3, step=20)


def test_a_start_that_asked_for_a_step_that_is_not_there_changes_no_lineage(storage: Storage) -> None:
    world = lived(storage)
    for pid, wish in ((2, Wish(15)), (3, Wish(15, branch=True)), (4, Wish(10))):
        job = Job(storage, world, pid=pid)
        with pytest.raises((NotFoundError, RequestError)):
            job.start(wish)
        job.die()
    check_goes_on(storage, world, pid=5, step=20)


def test_a_start_that_was_turned_away_changes_no_lineage(storage: Storage) -> None:
    """Spec: C1.2"""
    world = FakeWorld()
    holder = Job(storage, world, pid=1)
    holder.start()
    holder.live(10)
    for pid in (2, 3):
        with pytest.raises(FencedError):
            Job(storage, world, pid=pid).start()
    holder.live(20)
    holder.die()
    check_goes_on(storage, world, pid=4, step=20)


@pytest.mark.parametrize("verb", ["publish", "sync_folder", "put", "list", "read", "append", "make_folder"])
def test_a_start_whose_storage_fails_is_a_typed_error_and_changes_no_lineage(storage: Storage, verb: str) -> None:
    world = lived(storage)
    for occurrence in range(0, 12, 3):
        fault = Fault(Effect.FAIL, verb=verb, occurrence=occurrence)
        job = Job(FaultyStorage(storage, FaultScript((fault,))), world, pid=2 + occurrence)
        try:
            job.start()
        except (StorageError, OutcomeUnknownError):
            pass
        job.die()
    check_goes_on(storage, world, pid=30, step=20)


def test_a_start_whose_journal_cannot_be_written_trains_without_one(storage: Storage) -> None:
    """Spec: F8.1"""
    world = lived(storage)
    fault = Fault(Effect.FAIL, verb="append", path="journal/*", errno=errno.ENOSPC)
    job = Job(FaultyStorage(storage, FaultScript((fault,))), world, pid=2)
    assert job.start().step == 20
    job.live(30)
    job.die()
    check_goes_on(storage, world, pid=3, step=30)


def test_a_lost_answer_to_a_record_is_settled_by_reading(storage: Storage) -> None:
    """Spec: F6.2"""
    world = FakeWorld()
    faults = (
        Fault(Effect.LOSE_ANSWER, verb="publish", path="run.json"),
        Fault(Effect.LOSE_ANSWER, verb="publish", path="incarnations/000001.json"),
        Fault(Effect.LOSE_ANSWER, verb="publish", path="incarnations/000001.resumed.json"),
    )
    faulty = FaultyStorage(storage, FaultScript(faults))
    job = Job(faulty, world, pid=1)
    assert job.start().is_fresh
    assert len(faulty.fired) == 3
    job.live(10)
    assert read_lineage(storage).newest == 1
    assert newest_step(storage) == 10


def test_a_power_cut_between_claim_and_record_leaves_the_lineage(seed: int) -> None:
    """Spec: C9.2"""
    disk = SimulatedDisk()
    world = lived(disk)
    die_at(disk, world, 2, BETWEEN)
    for number, state in enumerate(disk.crash_states(seed, 20)):
        check_goes_on(state, world, pid=10 + number, step=20)
