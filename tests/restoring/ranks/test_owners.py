"""What each rank had of its own comes back to that rank, and is refused by name where the ranks are others."""

from __future__ import annotations

import pytest

from safepoint.catalog import examine, read_lineage
from safepoint.contract import Contract
from safepoint.errors import CorruptionError, Difference
from safepoint.format.names import GenerationName
from safepoint.format.plain import encode_plain
from safepoint.restoring.match import Choice
from safepoint.restoring.restore import RestoreContext, restore_late
from safepoint.restoring.together import Ranks
from safepoint.restoring.validate import SavedState
from safepoint.storage.memory import MemoryStorage
from safepoint.testing.ranks import RankThread, RankThreads
from tests.build import Values, begin, floats, write_generation
from tests.restoring.ranks.jobs import Part, View, conditions, dealt, same, start
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
    return dealt(storage, manifest, world_size)[rank]


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
            "model": encode_plain(
                {
                    "entries": {name: number for name in names},
                    "extra": {f"m{number}": number},
                    "training": [f"m{number}"],
                }
            ),
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
    """Spec: C11.10"""
    saved = found(stages(), rank=rank, world_size=world_size)
    assert saved.items["model"].plain == {
        "entries": {"a0": 0, "a1": 1, "b0": 0, "b1": 1},
        "extra": {"m0": 0, "m1": 1},
        "training": ["m0", "m1"] if world_size != 2 else [f"m{rank}"],
    }
    assert saved.contradictions == {}
    assert sorted(saved.items["model"].specs) == ["a0", "a1", "b0", "b1"]
    optimizer = saved.items["optimizer"].plain
    assert isinstance(optimizer, dict)
    groups = [group["parameters"] for group in optimizer["groups"]]
    assert [sorted(names) for names in groups] == [["model/a0", "model/a1"], ["model/b0", "model/b1"]]
    assert [len(group["devices"]) for group in optimizer["groups"]] == [2, 2]
    # The order that an optimizer's own tree has: states follow the groups.
    listed = [name.removeprefix("model/") for names in groups for name in names]
    assert list(optimizer["state"]["model"]) == listed


def users() -> MemoryStorage:
    """Return a run of two ranks that have files of their own beside the parts of a tensor."""
    storage = MemoryStorage()
    chain = begin(storage)
    trees = [{"x": encode_plain(of_user(rank))} for rank in range(2)]
    ranks = [
        {"x": {"ema": Values("float32", (1,), floats(float(rank)).data, global_shape=(2,), offset=(rank,))}}
        for rank in range(2)
    ]
    write_generation(storage, 1, chain=chain, ranks=ranks, plain_of_ranks=trees, kinds={"x": "sharded"})
    return storage


def of_user(rank: int) -> dict[str, object]:
    return {"files": [f"f{rank}a", f"f{rank}b"], "seen": {f"k{rank}": rank}, "flag": rank}


def held_by(rank: int, world_size: int) -> dict[str, Part]:
    size = 2 // world_size
    return {"x": Part("x", {"ema": [BoxMemory((rank * size,), (size,), 4)]})}


def test_on_as_many_ranks_each_is_given_the_values_that_it_saved() -> None:
    """Spec: C11.10"""
    items = [held_by(rank, 2) for rank in range(2)]
    start([users()] * 2, items).reports()
    assert [named["x"].plain for named in items] == [of_user(0), of_user(1)]


def test_values_that_differ_by_rank_are_refused_by_name_on_another_number_of_ranks_and_can_be_permitted() -> None:
    """Spec: C11.10"""
    named = held_by(0, 1)
    (error,) = start([users()], [named]).errors()
    assert error.startswith("ContractError") and "'x.per_rank'" in error
    assert all(place in error for place in ("files[0]", "files[1]", "seen.k1", "flag"))
    assert not named["x"].is_touched
    (report,) = start([users()], [named], contract=Contract("exact", {"world_size", "x.per_rank"})).reports()
    assert report.promise.level == "approximate"
    assert named["x"].plain == of_user(0)
    assert named["x"].reads("ema") == [floats(0.0, 1.0).data]


def test_a_rank_is_given_its_own_extra_state_and_settings_of_an_optimizer() -> None:
    storage = MemoryStorage()
    chain = begin(storage)

    def rank(number: int) -> dict[str, object]:
        group = {"parameters": ["model/w"], "devices": ["cpu"], "options": {"lr": 0.5}}
        return {
            "model": encode_plain({"entries": {"w": 1}, "extra": {"": {"seen": [f"file{number}"]}}, "training": []}),
            "optimizer": encode_plain(
                {
                    "class": "Adam",
                    "groups": [group],
                    "state": {"model": {"w": {"step": 3.0}}},
                    "other": {"of": [f"o{number}"]},
                    "extra": {"count": number},
                }
            ),
        }

    trees = [rank(0), rank(1)]
    write_generation(storage, 1, chain=chain, ranks=[{"model": {}, "optimizer": {}}, {}], plain_of_ranks=trees)
    for number in range(2):
        items = found(storage, rank=number, world_size=2).items
        assert {name: encode_plain(item.plain) for name, item in items.items()} == trees[number]
    assert found(storage, rank=0, world_size=1).contradictions == {
        "model": ("extra..seen[0]",),
        "optimizer": ("other.of[0]", "extra.count"),
    }


def noted_by(*holders: int, of: int) -> MemoryStorage:
    """Return a run of so many ranks, some of which had a note beside the weights."""
    storage = MemoryStorage()
    chain = begin(storage)
    ranks: list[dict[str, dict[str, Values]]] = [{"note": {}, "model": {}}, *({} for _ in range(1, of))]
    trees = [{"model": encode_plain(1)} if rank == 0 else {} for rank in range(of)]
    trees[holders[0]]["note"] = encode_plain({"text": "x"})
    write_generation(storage, 1, chain=chain, ranks=ranks, plain_of_ranks=trees, holders={"note": holders})
    return storage


def noting(*holders: int, of: int) -> list[dict[str, Part]]:
    names = [["model", *(["note"] if rank in holders else [])] for rank in range(of)]
    return [{name: Part(name, {}) for name in held} for held in names]


@pytest.mark.parametrize("holders", [(0,), (1,), (1, 2)])
def test_what_only_some_ranks_had_is_restored_by_those(holders: tuple[int, ...]) -> None:
    """Spec: C11.11"""
    items = noting(*holders, of=3)
    assert all(report.left_fresh == () for report in start([noted_by(*holders, of=3)] * 3, items).reports())
    assert [named["note"].plain for named in items if "note" in named] == [{"text": "x"}] * len(holders)


def test_a_rank_that_has_no_more_what_it_had_is_named() -> None:
    """Spec: C11.11"""
    for holders, live, lacking in (((1, 2), (1,), 2), ((0,), (), 0), ((0, 1, 2), (0, 2), 1)):
        errors = start([noted_by(*holders, of=3)] * 3, noting(*live, of=3)).errors()
        assert same(errors) and errors[0].startswith("MismatchError")
        assert "'note' (rank " + str(lacking) + ")" in errors[0] and "note.removed" in errors[0]


@pytest.mark.parametrize("holders", [(0,), (0, 1)])
def test_in_a_job_of_another_size_an_item_is_gone_only_if_no_rank_has_it(holders: tuple[int, ...]) -> None:
    """Spec: C11.11"""
    storage = noted_by(*holders, of=2)
    start([storage] * 3, noting(2, of=3)).reports()
    errors = start([storage] * 3, noting(of=3)).errors()
    assert same(errors) and "note.removed" in errors[0]


def test_what_no_holder_of_an_item_has_of_it_any_more_is_missing_although_other_ranks_have_not_the_item() -> None:
    gone = Difference("note.removed", "note.w", "a parameter", "absent")
    storage = noted_by(0, 1, of=2)
    items = noting(1, 2, of=3)
    items[1]["note"].differences = (gone,)
    start([storage] * 3, items).reports()
    items[2]["note"].differences = (gone,)
    errors = start([storage] * 3, items).errors()
    assert same(errors) and "note.w" in errors[0]


def test_an_index_of_a_rank_that_had_not_an_item_must_not_list_it() -> None:
    """Spec: F7.7"""
    storage = MemoryStorage()
    trees = [{"model": encode_plain(1)}, {"model": encode_plain(2)}]
    write_generation(storage, 1, chain=begin(storage), ranks=[{}, {}], plain_of_ranks=trees, holders={"model": (0,)})
    with pytest.raises(CorruptionError, match=r"00001-of-00002\.json.*'model'"):
        found(storage, rank=0, world_size=2)


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
