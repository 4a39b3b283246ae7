"""A loader divided among ranks: one record of all, and each sample once where another number of ranks goes on."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from safepoint.contract import Contract, judge
from safepoint.data import GlobalOrder, ResumableLoader
from safepoint.format.manifest import Conditions
from safepoint.restoring.match import Choice
from safepoint.state.item import Permits, SavedItem
from safepoint.state.stateful import StatefulItem
from safepoint.storage.memory import MemoryStorage
from safepoint.testing.ambient import FakeWorld
from tests.restoring.ranks.jobs import start
from tests.saving.ranks.job import Rank, Ranks, manifests, replicated

LENGTH = 94
GLOBAL_BATCH = 12
SEED = 11


def loaders(world_size: int, *, batch: int = GLOBAL_BATCH) -> list[ResumableLoader]:
    return [
        ResumableLoader(
            range(LENGTH),  # type: ignore[arg-type]
            batch // world_size,
            seed=SEED,
            rank=rank,
            world_size=world_size,
            name="numbers",
            collate_fn=list,
        )
        for rank in range(world_size)
    ]


def take(ranks: Sequence[ResumableLoader], batches: int | None) -> list[int]:
    """Let all ranks take so many batches, or the rest of the epoch; return the samples by batch and rank."""
    iterators = [iter(loader) for loader in ranks]
    seen: list[int] = []
    for _ in range(ranks[0].remaining if batches is None else batches):
        for iterator in iterators:
            seen += next(iterator)
        for loader in ranks:
            loader.commit()
    return seen


def save(ranks: Sequence[ResumableLoader], step: int, storage: MemoryStorage, world: FakeWorld) -> None:
    """Save the loaders as items of a job of as many ranks."""

    def holds(rank: int, world_size: int, at: int) -> list[Any]:
        return [*replicated(rank, world_size, at)[:1], StatefulItem("data", ranks[rank])]

    def act(rank: Rank) -> None:
        rank.save(step)

    for outcome in Ranks(len(ranks), holds, storage=storage, world=world, first_pid=step).run(act):
        outcome.returned()


@pytest.mark.parametrize(("first", "second"), [(2, 3), (0, 1), (5, 2), (7, 0)])
def test_4_then_2_then_3_ranks_use_each_sample_once_in_the_same_order(first: int, second: int) -> None:
    """94 samples are no multiple of the global batch, nor of any of these numbers of ranks but 2."""
    world, seen = FakeWorld(), []
    before: Sequence[ResumableLoader] | None = None
    for step, (world_size, batches) in enumerate([(4, first), (2, second), (3, None)], start=1):
        ranks = loaders(world_size)
        storage = MemoryStorage()
        if before is not None:
            save(before, step * 100, storage, world)
            (manifest,) = manifests(storage)
            assert manifest.items["data"].kind == "global"
            items = [{"data": StatefulItem("data", loader)} for loader in ranks]
            choice = Choice(only=frozenset({"data"}))
            for report in start(
                [storage] * world_size, items, contract=Contract("approximate"), choice=choice
            ).reports():
                assert "world_size" in {reason.word for reason in report.promise.reasons}
        seen += take(ranks, batches)
        assert all(loader.state_dict() == ranks[0].state_dict() for loader in ranks)
        before = ranks
    assert seen == GlobalOrder(LENGTH, seed=SEED).block(0, LENGTH)


@pytest.mark.parametrize(("now", "batch"), [(2, 16), (3, 6)])
def test_another_global_batch_is_named_and_uses_each_sample_once_all_the_same(now: int, batch: int) -> None:
    old = loaders(4)
    seen = take(old, 3)
    ranks = loaders(now, batch=batch)
    for loader in ranks:
        item = StatefulItem("data", loader)
        saved = SavedItem("stateful", StatefulItem("data", old[0]).capture().plain)
        words = {one.word for one in item.check(saved)}
        assert words == {"world_size", "global_batch"}
        item.apply(saved, Permits(frozenset(words)))
    seen += take(ranks, None)
    assert seen == GlobalOrder(LENGTH, seed=SEED).block(0, LENGTH)


def test_the_contract_says_what_another_global_batch_makes_of_an_update() -> None:
    def of(loader: ResumableLoader, world_size: int) -> Conditions:
        return Conditions(world_size, loader.global_batch, 2, {}, {}, {}, {}, None, {})

    saved = of(loaders(4)[0], 4)
    kept = judge(saved, of(loaders(3)[0], 3))
    assert [(one.word, one.level) for one in kept.reasons] == [("world_size", "same_data")]
    other = judge(saved, of(loaders(2, batch=6)[0], 2))
    assert other.level == "approximate"
    told = {(one.word, one.subject): (one.saved, one.current) for one in other.reasons}
    assert told["global_batch", "global batch"] == ("12", "6")
    assert told["global_batch", "samples per update"] == ("24", "12 (accumulation=4 keeps them)")
