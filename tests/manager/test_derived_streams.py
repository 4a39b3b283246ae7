"""One process goes on from two ranks with streams derived from theirs, and every later checkpoint says so."""

from __future__ import annotations

from typing import Any

import torch

import safepoint as sp
from safepoint.state.randomness import GeneratorItem, GlobalRandomItem
from safepoint.storage.memory import MemoryStorage
from tests.saving.ranks.job import Held, Rank, Ranks, manifests

DERIVED = {"noise.derived_at": 10, "rng.derived_at": 10}


def saved_by_two_ranks() -> MemoryStorage:
    def holds(rank: int, world_size: int, step: int) -> list[Any]:
        streams = GlobalRandomItem().derive(lambda name: rank)
        return [Held("rng", "global_random", streams), GeneratorItem("noise", torch.Generator().manual_seed(rank))]

    def act(rank: Rank) -> None:
        rank.save(10)

    job = Ranks(2, holds)
    for outcome in job.run(act):
        outcome.returned()
    assert isinstance(job.storage, MemoryStorage)
    return job.storage


def start(storage: MemoryStorage, noise: torch.Generator, contract: sp.Contract) -> sp.RestoreReport:
    """Restore, make one update, and save."""
    manager = sp.CheckpointManager(
        "memory://run", {"noise": noise}, contract=contract, storage=storage, takeover=True, config=None
    )
    with manager:
        report = manager.restore(required=True)
        manager.after_update()
        manager.save()
    return report


def test_a_restore_with_derived_streams_says_so_and_so_does_every_checkpoint_after_it() -> None:
    """Spec: C11.9"""
    storage, noise = saved_by_two_ranks(), torch.Generator()
    before = torch.get_rng_state()
    try:
        report = start(storage, noise, sp.Contract("approximate", rng="derive"))
        assert {"noise.derived", "rng.derived"} <= {reason.word for reason in report.reasons}
        assert "derived at step 10 for 1 ranks" in str(report) and report.left_fresh == ()
        assert not torch.equal(torch.get_rng_state(), before)
        again = start(storage, torch.Generator(), sp.Contract(permit={"data_position"}))
        assert again.step == 11 and {reason.word for reason in again.reasons} == {"data_position"}
    finally:
        torch.set_rng_state(before)
    newest, after, first = manifests(storage)
    assert [one.step for one in (newest, after, first)] == [12, 11, 10]
    for one in (newest, after):
        assert {name: step for name, step in one.conditions.counts.items() if "derived" in name} == DERIVED
