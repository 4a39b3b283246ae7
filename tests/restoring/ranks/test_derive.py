"""Streams for another number of ranks: a function of what was saved, the step and the rank, and of nothing else."""

from __future__ import annotations

import random
from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest
import torch

from safepoint.contract import Contract
from safepoint.errors import RequestError
from safepoint.format.plain import encode_plain
from safepoint.format.stencil import encode_text
from safepoint.restoring.derive import derived_seed
from safepoint.restoring.restore import Restored
from safepoint.state.item import CapturedItem, Item, Permits, SavedItem
from safepoint.state.placement import undisturbed_streams
from safepoint.state.randomness import GeneratorItem, GlobalRandomItem
from safepoint.storage.memory import MemoryStorage
from tests.build import begin, write_generation
from tests.restoring.ranks.jobs import same, start

DERIVE = Contract("exact", {"world_size"}, rng="derive")
DIGEST = "00112233445566778899aabbccddeeff"
MAKERS = {
    "python": lambda rank: random.Random(100 + rank),
    "torch": lambda rank: torch.Generator().manual_seed(100 + rank),
    "pcg": lambda rank: np.random.default_rng(100 + rank),
    "legacy": lambda rank: np.random.RandomState(100 + rank),
    "philox": lambda rank: np.random.Generator(np.random.Philox(100 + rank)),
}


def generators(rank: int) -> dict[str, Item]:
    return {name: GeneratorItem(name, make(rank)) for name, make in MAKERS.items()}


def saved_by(world_size: int) -> MemoryStorage:
    """Return a run of which each rank saved generators of its own, at step 1."""
    storage = MemoryStorage()
    chain = begin(storage)
    items = [generators(rank) for rank in range(world_size)]
    plain = [{name: encode_plain(item.capture().plain) for name, item in named.items()} for named in items]
    types = {name: item.type for name, item in items[0].items()}
    ranks: list[dict[str, dict[str, Any]]] = [{name: {} for name in MAKERS} for _ in range(world_size)]
    kinds = dict.fromkeys(MAKERS, "per_rank")
    write_generation(storage, 1, chain=chain, ranks=ranks, plain_of_ranks=plain, kinds=kinds, types=types)
    return storage


def resumed(storage: MemoryStorage, world_size: int, contract: Contract = DERIVE) -> tuple[list[Any], list[Restored]]:
    """Restore on so many ranks; return the state of each rank's generators, and the reports."""
    items: list[Mapping[str, Item]] = [generators(50 + rank) for rank in range(world_size)]
    reports = start([storage] * world_size, items, contract=contract).reports()
    return [{name: item.capture().plain for name, item in named.items()} for named in items], reports


@pytest.mark.parametrize("now", [1, 2, 4])
def test_each_rank_gets_streams_of_its_own_and_the_same_ones_each_time(now: int) -> None:
    """Spec: C11.9"""
    storage = saved_by(3)
    states, reports = resumed(storage, now)
    assert resumed(storage, now)[0] == states
    texts = {name: [repr(of_rank[name]) for of_rank in states] for name in MAKERS}
    for name, of_ranks in texts.items():
        assert len(set(of_ranks)) == now, name
    # A rank's stream does not depend on how many others there are.
    assert resumed(storage, now + 4)[0][:now] == states
    assert same([report.promise for report in reports])
    promise = reports[0].promise
    assert promise.level == "same_data"
    told = {reason.word: (reason.level, reason.saved, reason.current) for reason in promise.reasons}
    expected = ("same_data", "of 3 ranks", f"derived at step 1 for {now} ranks")
    assert {word: told[word] for word in told if word != "world_size"} == {
        f"{name}.derived": expected for name in MAKERS
    }
    assert reports[0].saved is not None and sorted(reports[0].saved.derived) == sorted(MAKERS)
    assert reports[0].left_fresh == ()


def test_without_the_rule_the_change_is_refused_by_name_and_with_it_other_changes_still_are() -> None:
    storage = saved_by(3)
    items: list[Mapping[str, Item]] = [generators(rank) for rank in range(2)]
    before = [{name: item.capture().plain for name, item in named.items()} for named in items]
    errors = start([storage] * 2, items).errors()
    assert same(errors) and all(f"'{name}.per_rank'" in errors[0] for name in MAKERS)
    # What is offered is all that is needed: the test above resumes with it.
    offered = "Resume on 3 ranks, or accept it with Contract(level='exact', permit={'world_size'}, rng='derive')"
    assert offered in errors[0]
    errors = start([storage] * 2, items, contract=Contract("exact", rng="derive")).errors()
    assert same(errors) and "world_size" in errors[0] and "derived" not in errors[0].split("permit=")[1]
    assert [{name: item.capture().plain for name, item in named.items()} for named in items] == before


def test_the_same_number_of_ranks_gets_its_own_streams_back() -> None:
    states, reports = resumed(saved_by(3), 3, Contract(rng="derive"))
    expected = [{name: item.capture().plain for name, item in generators(rank).items()} for rank in range(3)]
    assert repr(states) == repr(expected)
    assert reports[0].promise.level == "exact" and reports[0].promise.reasons == ()


def test_seeds_are_pinned() -> None:
    """Spec: C11.9"""
    seeds = [derived_seed("noise", "state", digest=DIGEST, step=7, rank=rank) for rank in (0, 1, 3)]
    assert seeds == SEEDS
    other = [
        derived_seed("other", "state", digest=DIGEST, step=7, rank=0),
        derived_seed("noise", "numpy", digest=DIGEST, step=7, rank=0),
        derived_seed("noise", "state", digest=DIGEST[::-1], step=7, rank=0),
        derived_seed("noise", "state", digest=DIGEST, step=8, rank=0),
    ]
    assert len({*other, *seeds}) == 7


def test_streams_of_a_seed_are_pinned() -> None:
    """Spec: C11.9"""
    with undisturbed_streams():
        draws: dict[str, list[float]] = {}
        for name, make in MAKERS.items():
            generator = make(0)
            item = GeneratorItem(name, generator)
            apply(item, seed=2**64 - 1)
            draws[name] = [_draw(generator) for _ in range(2)]
        streams = GlobalRandomItem()
        apply(streams, seed=5)
        draws["global"] = [random.random(), float(np.random.rand()), float(torch.rand(()))]
    assert draws == DRAWS


def test_a_generator_that_cannot_be_begun_anew_is_left_to_the_refusal_by_name() -> None:
    class Strange(np.random.MT19937):
        @property
        def state(self) -> dict[str, Any]:
            return {"bit_generator": "Strange", "state": {"key": 1}}

        @state.setter
        def state(self, value: dict[str, Any]) -> None: ...

    assert GeneratorItem("odd", np.random.Generator(Strange(3))).derive(lambda name: 1) is None


def test_a_contract_refuses_an_unknown_rule() -> None:
    with pytest.raises(RequestError, match="rule for streams"):
        Contract(rng="invent")  # type: ignore[arg-type]


def apply(item: GeneratorItem | GlobalRandomItem, *, seed: int) -> None:
    """Derive with one seed for all streams, and set what comes of it as a restore does."""
    before = repr(item.capture())
    tree = item.derive(lambda name: seed)
    assert repr(item.capture()) == before, "deriving touched the generator"
    saved = SavedItem(item.type, tree)
    assert item.check(saved) == []
    item.apply(saved, Permits())
    assert repr(item.capture()) == repr(CapturedItem(item.type, encode_text(tree)))


def _draw(generator: Any) -> float:
    if isinstance(generator, torch.Generator):
        return float(torch.rand((), generator=generator))
    return float(generator.random())


SEEDS = [2974120249949835035, 2974120249949835036, 2974120249949835038]
DRAWS = {
    "python": [0.021825695401270107, 0.3380953268613758],
    "torch": [0.9937993884086609, 0.5713063478469849],
    "pcg": [0.6800266789616931, 0.8453117585624743],
    "legacy": [0.33195353020883156, 0.4892115899156373],
    "philox": [0.592210864289833, 0.941539071847896],
    "global": [0.6229016948897019, 0.3407984189512352, 0.8302518725395203],
}
