"""What each rank had of its own comes back to that rank, and is refused by name where the ranks are others."""

from __future__ import annotations

import pytest

from safepoint.catalog import examine, read_lineage
from safepoint.contract import Contract
from safepoint.errors import CorruptionError
from safepoint.format.names import GenerationName
from safepoint.format.plain import encode_plain
from safepoint.restoring.match import Choice
from safepoint.restoring.restore import RestoreContext, restore_late
from safepoint.restoring.together import Ranks
from safepoint.restoring.validate import SavedState, read_index_texts, validate
from safepoint.storage.memory import MemoryStorage
from safepoint.testing.ranks import RankThread, RankThreads
from tests.build import Values, begin, floats, write_generation
from tests.restoring.ranks.jobs import Part, View, conditions, same, start
from tests.restoring.tiles import BoxMemory


def own(name: str = "gen") -> dict[str, Part]:
    """Return an item that takes a vector of one element, as one rank has it."""
    return {name: Part(name, {"state": [BoxMemory((0,), (1,), 4)]})}


def saved_by(world_size: int, *, name: str = "gen", kind: str = "per_rank") -> MemoryStorage:
    """Return a run of which rank r saved r in a tensor, and in a plain value."""
    storage = MemoryStorage()
    chain = begin(storage)
    ranks = [{name: {"state": floats(float(rank))}} for rank in range(world_size)]
    plain = [{name: encode_plain({"rank": rank})} for rank in range(world_size)]
    write_generation(storage, 1, chain=chain, ranks=ranks, plain_of_ranks=plain, kinds={name: kind})
    return storage


def found(storage: MemoryStorage, *, rank: int, world_size: int) -> SavedState:
    lineage = read_lineage(storage)
    (name,) = [GenerationName.parse(entry.name) for entry in storage.list("generations")]
    assert name is not None
    manifest = examine(storage, name, lineage).manifest
    assert manifest is not None
    return validate(manifest, read_index_texts(storage, manifest), rank=rank, world_size=world_size)


@pytest.mark.parametrize("world_size", [2, 4])
def test_what_a_rank_had_of_its_own_comes_back_to_it(world_size: int) -> None:
    items = [own() for _ in range(world_size)]
    start([saved_by(world_size)] * world_size, items).reports()
    for rank, named in enumerate(items):
        assert named["gen"].reads("state") == [floats(float(rank)).data]
        assert named["gen"].plain == {"rank": rank}


def test_another_number_of_ranks_is_refused_by_the_names_of_what_each_rank_had() -> None:
    """Spec: C11.6"""
    storage = saved_by(2)
    for now in (1, 4):
        items = [own() for _ in range(now)]
        errors = start([storage] * now, items).errors()
        assert same(errors) and errors[0].startswith("ContractError")
        assert "'gen.per_rank'" in errors[0] and "Resume on 2 ranks" in errors[0]
        assert not any(named["gen"].is_touched for named in items)


def test_what_no_rank_can_be_given_is_left_as_it_is_where_that_is_permitted_or_asked_for() -> None:
    storage = saved_by(2)
    permitted = Contract("exact", {"world_size", "gen.per_rank"})
    for contract, choice in ((permitted, Choice()), (Contract("approximate"), Choice(skip=frozenset({"gen"})))):
        items = [own() for _ in range(3)]
        for report in start([storage] * 3, items, contract=contract, choice=choice).reports():
            assert report.left_fresh == ("gen",)
            assert report.promise.level == "approximate"
        assert not any(named["gen"].is_touched for named in items)


@pytest.mark.parametrize(("saved", "now"), [(2, 4), (4, 2), (1, 2), (2, 1)])
def test_the_global_random_streams_of_other_ranks_need_the_word_rng(saved: int, now: int) -> None:
    """Those of one process count as its own, though there was nobody that they could differ from.

    Spec: C11.6
    """
    storage = saved_by(saved, name="rng", kind="global" if saved == 1 else "per_rank")
    items = [own("rng") for _ in range(now)]
    errors = start([storage] * now, items).errors()
    assert same(errors) and errors[0].startswith("ContractError") and "'rng'" in errors[0]
    reports = start([storage] * now, items, contract=Contract("exact", {"world_size", "rng"})).reports()
    assert all(report.left_fresh == ("rng",) for report in reports)
    assert not any(named["rng"].is_touched for named in items)


def test_streams_that_were_equal_on_all_ranks_are_given_to_any_number_of_ranks() -> None:
    storage = MemoryStorage()
    chain = begin(storage)
    ranks = [{"rng": {"state": floats(5.0)} if rank == 0 else {}} for rank in range(2)]
    write_generation(storage, 1, chain=chain, ranks=ranks, plain={"rng": encode_plain(1)})
    items = [own("rng") for _ in range(4)]
    start([storage] * 4, items).reports()
    assert all(named["rng"].reads("state") == [floats(5.0).data] for named in items)


def test_an_item_that_one_rank_did_not_have_is_added_there() -> None:
    storage = MemoryStorage()
    chain = begin(storage)
    trees = [{"gen": encode_plain(1), "model": encode_plain(1)}, {}]
    write_generation(storage, 1, chain=chain, ranks=[{"gen": {}}, {}], plain_of_ranks=trees, kinds={"gen": "per_rank"})
    assert "gen" in found(storage, rank=0, world_size=2).items
    assert "gen" not in found(storage, rank=1, world_size=2).items
    assert found(storage, rank=1, world_size=2).ownerless == ()
    assert found(storage, rank=1, world_size=3).ownerless == ("gen",)


def stages() -> MemoryStorage:
    """Return a run of two stages of a pipeline: each rank has other layers, and other groups of parameters."""
    storage = MemoryStorage()
    chain = begin(storage)

    def rank(number: int) -> dict[str, object]:
        names = [f"{letter}{number}" for letter in "ab"]
        groups = [{"parameters": [f"model/{name}"], "devices": ["cpu"], "options": {"lr": 0.5}} for name in names]
        optimizer = {
            "class": "Adam",
            "groups": groups,
            "state": {"model": {name: {"step": 3.0} for name in names}},
            "other": {},
            "extra": {},
        }
        return {
            "model": encode_plain({"entries": {name: number for name in names}, "training": [f"m{number}"]}),
            "optimizer": encode_plain(optimizer),
        }

    ranks: list[dict[str, dict[str, Values]]] = [
        {"model": {"a0": floats(0.0), "b0": floats(1.0)}, "optimizer": {}},
        {"model": {"a1": floats(2.0), "b1": floats(3.0)}, "optimizer": {}},
    ]
    kinds = {"model": "sharded", "optimizer": "sharded"}
    write_generation(storage, 1, chain=chain, ranks=ranks, plain_of_ranks=[rank(0), rank(1)], kinds=kinds)
    return storage


@pytest.mark.parametrize(("rank", "world_size"), [(0, 2), (1, 2), (0, 1), (2, 3)])
def test_trees_that_differ_by_rank_are_put_together_by_name(rank: int, world_size: int) -> None:
    saved = found(stages(), rank=rank, world_size=world_size)
    assert saved.items["model"].plain == {
        "entries": {"a0": 0, "a1": 1, "b0": 0, "b1": 1},
        "training": ["m0", "m1"],
    }
    assert sorted(saved.items["model"].specs) == ["a0", "a1", "b0", "b1"]
    optimizer = saved.items["optimizer"].plain
    assert isinstance(optimizer, dict)
    groups = [group["parameters"] for group in optimizer["groups"]]
    assert [sorted(names) for names in groups] == [["model/a0", "model/a1"], ["model/b0", "model/b1"]]
    assert [len(group["devices"]) for group in optimizer["groups"]] == [2, 2]
    # The order that an optimizer's own tree has: states follow the groups.
    listed = [name.removeprefix("model/") for names in groups for name in names]
    assert list(optimizer["state"]["model"]) == listed


def test_where_the_trees_of_ranks_contradict_each_other_each_rank_keeps_its_own_value() -> None:
    storage = MemoryStorage()
    chain = begin(storage)
    trees = [{"model": encode_plain({"flag": rank, "name": "x"})} for rank in range(2)]
    write_generation(storage, 1, chain=chain, ranks=[{"model": {}}, {}], plain_of_ranks=trees)
    assert [found(storage, rank=rank, world_size=2).items["model"].plain for rank in range(2)] == [
        {"flag": 0, "name": "x"},
        {"flag": 1, "name": "x"},
    ]


def test_boxes_that_contradict_each_other_or_leave_a_gap_are_damage_that_names_the_tensor() -> None:
    """Spec: C11.5"""

    def boxes(*offsets: int, whole: tuple[int, ...] = (4,)) -> MemoryStorage:
        storage = MemoryStorage()
        chain = begin(storage)
        ranks = []
        for number, offset in enumerate(offsets):
            shape = whole if number else (4,)
            box = Values("float32", (2,), floats(0.0, 1.0).data, global_shape=shape, offset=(offset,))
            ranks.append({"model": {"w": box}})
        write_generation(storage, 1, chain=chain, ranks=ranks, kinds={"model": "sharded"})
        return storage

    assert len(found(boxes(0, 2), rank=0, world_size=1).tensors["model", "w"]) == 2
    for storage, what in ((boxes(0, 0), "overlap"), (boxes(0), "gap"), (boxes(0, 2, whole=(5,)), "contradict")):
        with pytest.raises(CorruptionError, match=f"{what}.*model/w"):
            found(storage, rank=0, world_size=1)


def test_a_late_item_is_restored_by_all_ranks_or_by_none() -> None:
    storage = saved_by(2)
    items = [own() for _ in range(2)]
    views = [View(storage), View(storage)]

    def act(rank: RankThread) -> None:
        named = items[rank.rank]
        ranks = Ranks(rank.group, deadline_s=60.0)
        context = RestoreContext(
            storage=views[rank.rank],
            ambient=rank.ambient,
            items=named,
            contract=Contract(),
            conditions=conditions(2),
            ranks=ranks,
        )
        restore_late(context, found(storage, rank=rank.rank, world_size=2), "gen")

    assert [outcome.error for outcome in RankThreads(2).run(act)] == [None, None]
    assert [named["gen"].plain for named in items] == [{"rank": 0}, {"rank": 1}]
    views[1].damaged = "*"
    errors = [str(outcome.error) for outcome in RankThreads(2).run(act)]
    assert same(errors) and "[rank 1: " in errors[0] and "may hold a mixture" in errors[0]
