"""Several ranks that write what has changed: each refers to what it stored itself."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from safepoint.catalog import examine_all, read_lineage
from safepoint.errors import AbortedError, SafepointError
from safepoint.faults.script import Effect, Fault, FaultScript
from safepoint.faults.storage import FaultyStorage
from safepoint.restoring.verify import verify_generation
from safepoint.saving.context import SaveResult, Workspace
from safepoint.saving.increment import Increments
from safepoint.storage.memory import MemoryStorage
from tests.saving.ranks.job import Held, Rank, Ranks, box, manifests, replicated, sharded, weights_at, whole

FROZEN = weights_at(1, 60)


def with_frozen_base(rank: int, world_size: int, step: int) -> Sequence[Held]:
    """Return what a rank of a sharded job holds, beside a part of a base that never changes, and one on all ranks."""
    start, stop = rank * 60 // world_size, (rank + 1) * 60 // world_size
    base = Held("base", "module", None, [box("w", FROZEN, start, stop), box("common", FROZEN, 0, 60)])
    return [*sharded(rank, world_size, step), base]


def save_all(rank: Rank) -> list[SaveResult | SafepointError]:
    rank.saver._workspace = Workspace(increments=Increments(3))
    return [rank.try_to_save(step) for step in (10, 20, 30, 40)]


@pytest.mark.parametrize("world_size", [2, 3])
def test_ranks_refer_to_what_did_not_change(world_size: int) -> None:
    """Spec: C13.3, C13.4, F7.5, C4.1"""
    job = Ranks(world_size, with_frozen_base)
    for outcome in job.run(save_all):
        results = outcome.returned()
        assert isinstance(results, list)
        assert all(isinstance(one, SaveResult) for one in results)
        assert [one.referenced_bytes for one in results] == [0, 120, 120, 0]
    found = manifests(job.storage)[::-1]
    assert [[int(name[5:17]) for name in one.ancestors] for one in found] == [[], [10], [10], []]
    assert len({one.items["base"].digest for one in found}) == 1
    for manifest, step in zip(found, (10, 20, 30, 40), strict=True):
        assert whole(job.storage, manifest, "base", "w") == FROZEN
        assert whole(job.storage, manifest, "base", "common") == FROZEN
        assert whole(job.storage, manifest, "model", "w") == weights_at(step)
    checked = [verify_generation(job.storage, one) for one in examine_all(job.storage, read_lineage(job.storage))]
    assert [one.findings for one in checked] == [()] * 4


def test_after_a_failure_on_one_rank_all_write_the_whole_state() -> None:
    """Spec: C13.4"""
    storage = MemoryStorage()
    fault = Fault(Effect.FAIL, verb="finish", path="*step-000000000020*/rank-00001-*.safetensors")
    job = Ranks(2, with_frozen_base, storage=storage, storages={1: FaultyStorage(storage, FaultScript((fault,)))})
    for outcome in job.run(save_all):
        results = outcome.returned()
        assert isinstance(results, list)
        assert isinstance(results[1], AbortedError)
    assert [len(one.ancestors) for one in manifests(storage)] == [1, 0, 0]


def test_ranks_that_are_asked_for_nothing_refer_to_nothing() -> None:
    job = Ranks(2, replicated)
    for outcome in job.run(lambda rank: [rank.save(step) for step in (10, 20)]):
        outcome.returned()
    assert [one.ancestors for one in manifests(job.storage)] == [[], []]
