"""How attempts are named: none has the name of another, and of those at one step the later one has the greater."""

from __future__ import annotations

import errno

import pytest

from safepoint.catalog import list_generations
from safepoint.errors import StorageError
from safepoint.faults.script import Effect, Fault, FaultScript
from safepoint.faults.storage import FaultyStorage
from safepoint.saving.context import Attempts
from safepoint.storage.memory import MemoryStorage
from safepoint.testing.ambient import FakeWorld
from tests.crash.job import Job


def test_attempts_at_a_step_whose_folders_are_there_are_counted() -> None:
    """Spec: F5.2"""
    storage = MemoryStorage()
    job = Job(storage, FakeWorld(), pid=1)
    job.start()
    job.live(10)
    stuck = (
        Fault(Effect.FAIL, verb="create", path="*of-00001.json", errno=errno.ENOSPC, lasts=True),
        Fault(Effect.FAIL, verb="delete", errno=errno.EIO, lasts=True),
    )
    job.train_to(20)
    for _ in range(2):
        job.saver._storage = FaultyStorage(storage, FaultScript(stuck))
        with pytest.raises(StorageError, match="disk is full"):
            job.save()
    job.saver._storage = storage
    job.save()
    named = [(name.step, name.nonce[:2]) for name in list_generations(storage)]
    assert named == [(20, "02"), (20, "01"), (20, "00"), (10, "00")]


def test_only_a_step_beyond_all_attempts_of_an_incarnation_is_known_to_have_none() -> None:
    attempts = Attempts()
    asked = [(1, 0), (1, 10), (1, 10), (1, 5), (1, 11), (2, 5), (2, 5), (2, 4), (1, 12), (2, 6)]
    assert [attempts.begin(*one) for one in asked] == [True, True, False, False, True, True, False, False, False, True]
