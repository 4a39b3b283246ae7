"""What nobody damaged is never called damaged: no refusal, no warning, no finding, however the job lived and died."""

from __future__ import annotations

import logging
import random

import pytest

from safepoint.catalog import NEVER_COMPLETED, GenerationState, examine_all, read_lineage
from safepoint.errors import AbortedError, OutcomeUnknownError, StorageError
from safepoint.faults.script import Effect, Fault, FaultScript, SimulatedCrash
from safepoint.faults.storage import FaultyStorage
from safepoint.restoring.records import check_records
from safepoint.restoring.verify import verify_generation
from safepoint.retention.policy import keep
from safepoint.storage.base import Storage
from safepoint.storage.memory import MemoryStorage
from safepoint.testing.ambient import FakeWorld
from tests.crash.job import Job, whole_state

STARTS = 20
LONGEST_SAVE = 90


def check_start(storage: Storage, world: FakeWorld, *, pid: int, newest: int) -> Job:
    """Start, and check that nothing but saves that were cut off is complained of."""
    lineage = read_lineage(storage)
    assert lineage.damage == ()
    assert check_records(storage, lineage) == []
    found = examine_all(storage, lineage)
    assert not [entry for entry in found if entry.state is GenerationState.DAMAGED]
    for entry in found:
        assert entry.manifest is None or entry.tombstone is not None or verify_generation(storage, entry).holds
    job = Job(storage, world, pid=pid, keeps=keep(last=1 + pid % 3), piece_bytes=1 << 20)
    report = job.start()
    assert {entry.reason for entry in report.refused} <= {NEVER_COMPLETED}
    assert report.step >= newest
    assert job.state() == whole_state(report.step)
    return job


def live(storage: Storage, world: FakeWorld, chance: random.Random, caplog: pytest.LogCaptureFixture) -> int:
    """Let a job start so many times, save, and end in one of four ways; return how many restores that were."""
    newest, step = 0, 0
    for pid in range(1, STARTS + 1):
        job = check_start(storage, world, pid=pid, newest=newest)
        assert caplog.records == [], "something undamaged was warned of"
        step = job.step
        for _ in range(chance.randrange(4)):
            step += chance.randrange(1, 4)
            job.live(step)
            newest = step
        way = chance.choice(["ends", "dies", "dies in a save", "fails in a save"])
        if way.endswith("in a save"):
            effect = Effect.STOP if way.startswith("dies") else Effect.FAIL
            fault = Fault(effect, operation=chance.randrange(LONGEST_SAVE), lasts=True)
            job.saver._storage = FaultyStorage(storage, FaultScript((fault,), chance.randrange(100)))
            try:
                job.live(step + 1)
                newest = step + 1
            except (SimulatedCrash, StorageError, AbortedError, OutcomeUnknownError):
                newest = max(newest, step)
            caplog.clear()
        if way == "ends":
            job.end()
        job.die()
    return STARTS


def play(count: int, seed: int, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING)
    restores = 0
    for number in range(count):
        restores += live(MemoryStorage(), FakeWorld(), random.Random(seed + number), caplog)
    print(f"counted: {restores} restores of undamaged runs, no false alarm")


def test_undamaged_runs_are_restored_without_any_complaint(seed: int, caplog: pytest.LogCaptureFixture) -> None:
    play(1, seed, caplog)


@pytest.mark.soak
def test_a_thousand_undamaged_restores_are_made_without_any_complaint(
    seed: int, caplog: pytest.LogCaptureFixture
) -> None:
    play(60, seed, caplog)
