"""Marking for deletion: what a newer start means for it."""

from __future__ import annotations

from safepoint.catalog import GenerationState
from safepoint.retention.policy import keep
from safepoint.storage.memory import MemoryStorage
from tests.build import begin, write_generation, write_incarnation
from tests.retention.saves import CHAIN, after_save, steps


class Joined(MemoryStorage):
    """A storage in which another process claims the next number right after the first mark."""

    has_joined = False

    def publish(self, path: str, data: bytes) -> None:
        super().publish(path, data)
        if path.endswith("deleted.json") and not self.has_joined:
            self.has_joined = True
            write_incarnation(self, 2)


def test_a_newer_start_ends_the_marking() -> None:
    """What it is about to resume from would be marked under its hands. Spec: C5"""
    storage = Joined()
    begin(storage)
    for step in (1, 2, 3, 4, 5):
        write_generation(storage, step, chain=CHAIN)
    report = after_save(storage, keep(last=2))
    assert len(report.marked) == 1
    assert len(steps(storage, GenerationState.DELETED)) == 1
    assert report.warnings == ("nothing more is marked: incarnation 2 is newer",)
