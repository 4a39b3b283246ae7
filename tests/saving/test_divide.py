"""Who writes what: evenly, each row once, and as a function of the layouts alone."""

from __future__ import annotations

import random
from dataclasses import dataclass, replace

import msgspec
import pytest

from safepoint.errors import AbortedError
from safepoint.format.extent import Box, check_tiling
from safepoint.saving.divide import Division, divide_alone
from safepoint.saving.divide import divide as divide_columns
from safepoint.saving.form import boxes_digest
from safepoint.saving.layout import Layout, LayoutBox, columns_of, cut_digest
from safepoint.saving.parts import PartMessage, RankPart, Share, decode_part, written

NOBODY_S_OWN: frozenset[str] = frozenset()


def plain(name: str, *shape: int, item: str = "model", dtype: str = "float32", is_leaders: bool = False) -> LayoutBox:
    return LayoutBox(item, name, dtype, shape, (0,) * len(shape), shape, is_leaders)


def rows(name: str, whole: tuple[int, ...], start: int, stop: int) -> LayoutBox:
    return LayoutBox("model", name, "float32", whole, (start, *(0 for _ in whole[1:])), (stop - start, *whole[1:]))


def layout(*boxes: LayoutBox) -> Layout:
    ordered = tuple(sorted(boxes, key=lambda box: (box.item, box.name, box.offset)))
    return Layout(ordered)


@dataclass(frozen=True)
class Divided:
    """A division, and what each rank makes of the part that it is told."""

    division: Division
    parts: tuple[RankPart, ...]
    planned: tuple[tuple[LayoutBox, ...], ...]

    @property
    def holders(self) -> tuple[tuple[int, ...], ...]:
        return self.division.holders


def divide(layouts: list[Layout], per_rank: frozenset[str], *, spreads: bool = True) -> Divided:
    division = divide_columns([columns_of(one) for one in layouts], per_rank, spreads=spreads)
    parts = [decode_part(part, one, where="") for part, one in zip(division.parts, layouts, strict=True)]
    planned = tuple(written(one, part) for one, part in zip(layouts, parts, strict=True))
    assert division.digests == tuple(map(cut_digest, planned))
    return Divided(division, tuple(parts), planned)


def sizes(division: Divided) -> list[int]:
    return [sum(box.size_bytes for box in boxes) for boxes in division.planned]


def check_is_whole(division: Divided) -> None:
    pieces: dict[str, list[LayoutBox]] = {}
    for box in (box for boxes in division.planned for box in boxes):
        pieces.setdefault(box.name, []).append(box)
    for name, boxes in pieces.items():
        check_tiling(boxes[0].global_shape, [Box(box.offset, box.shape) for box in boxes], where=name)


@pytest.mark.parametrize("world_size", [2, 3, 4, 7, 64])
def test_replicated_tensors_are_divided_within_a_tenth_of_the_fair_share(world_size: int) -> None:
    """Spec: C2.1"""
    model = layout(
        plain("embedding", 50_000, 64),
        *(plain(f"layer{n}.weight", 512, 512) for n in range(12)),
        *(plain(f"layer{n}.bias", 512) for n in range(12)),
        plain("scale", 1),
    )
    division = divide([model] * world_size, NOBODY_S_OWN)
    check_is_whole(division)
    fair = sum(box.size_bytes for box in model.boxes) / world_size
    assert sum(sizes(division)) == pytest.approx(fair * world_size)
    assert max(sizes(division)) <= 1.1 * fair
    assert division.division.tensor_counts == {"model": 26}
    assert division.holders == (tuple(range(world_size)),)


@pytest.mark.parametrize("seed", range(40))
def test_any_layouts_are_divided_whole_and_those_with_freedom_evenly(seed: int) -> None:
    """Spec: C2.1, C5.1"""
    print(f"seed {seed}")
    chance = random.Random(seed)
    world_size = chance.randint(2, 9)
    held: list[list[LayoutBox]] = [[] for _ in range(world_size)]
    for number in range(chance.randint(1, 12)):
        whole = (chance.randint(1, 4000), chance.randint(1, 8))
        parts = chance.choice([1, 1, 2, world_size])
        bounds = sorted([0, whole[0], *(chance.randint(0, whole[0]) for _ in range(parts - 1))])
        for rank in range(world_size):
            part = rank % parts
            held[rank].append(rows(f"t{number:02d}", whole, bounds[part], bounds[part + 1]))
    layouts = [layout(*boxes) for boxes in held]
    division = divide(layouts, NOBODY_S_OWN)
    check_is_whole(division)
    assert divide(layouts, NOBODY_S_OWN) == division
    total = sum(box.size_bytes for boxes in division.planned for box in boxes)
    assert sum(sizes(division)) == total == division.division.sizes_bytes["model"]
    for rank, boxes in enumerate(division.planned):
        for box in boxes:
            assert any(is_within(box, one) for one in held[rank]), "a rank writes what it holds"


def is_within(box: LayoutBox, other: LayoutBox) -> bool:
    start, end = other.offset[0], other.offset[0] + other.shape[0]
    return box.name == other.name and start <= box.offset[0] and box.offset[0] + box.shape[0] <= end


@pytest.mark.parametrize("world_size", [2, 4, 5])
def test_boxes_side_by_side_that_are_cut_into_rows_are_stored_as_planned(world_size: int) -> None:
    """Ranks that hold the same columns in several boxes, as strided shards that are replicated. Spec: C2.1, C5.1"""
    columns = [LayoutBox("model", "w", "float32", (40, 12), (0, start), (40, 4)) for start in range(0, 12, 4)]
    division = divide([layout(*columns, plain("bias", 3))] * world_size, NOBODY_S_OWN)
    check_is_whole(division)
    assert max(sizes(division)) <= 1.1 * min(sizes(division))


def test_a_rank_with_much_of_its_own_writes_less_of_what_is_shared() -> None:
    shared, own = plain("shared", 1000, 100), plain("own", 600, 100)
    division = divide([layout(own, shared), layout(shared)], NOBODY_S_OWN)
    assert sizes(division) == [320_000, 320_000]
    heavy = plain("own", 5000, 100)
    assert sizes(divide([layout(heavy, shared), layout(shared)], NOBODY_S_OWN)) == [2_000_000, 400_000]


def test_items_of_ranks_own_are_written_by_each_and_not_taken_for_replicas() -> None:
    own = layout(plain("t", 10, item="own"))
    division = divide([own] * 3, frozenset({"own"}))
    assert sizes(division) == [40, 40, 40]
    assert division.division.tensor_counts == {"own": 3}
    assert division.holders == ()
    other = layout(plain("t", 7, item="own"))
    assert sizes(divide([own, other], frozenset({"own"}))) == [40, 28]


def test_what_is_the_leader_s_is_written_by_the_lowest_holder() -> None:
    buffers = layout(*(plain(f"b{n}", 100, is_leaders=True) for n in range(4)))
    division = divide([layout(), buffers, buffers], NOBODY_S_OWN)
    assert sizes(division) == [0, 1600, 0]
    assert [one.is_leaders for one in division.parts[2].replicas] == [True]


def test_what_may_differ_between_holders_is_written_whole_by_the_lowest() -> None:
    """Spec: C5.4"""
    shared, parts = plain("shared", 1000, 100), [rows("part", (8, 4), start, start + 4) for start in (0, 4)]
    division = divide(
        [layout(parts[0], shared), layout(parts[0], shared), layout(parts[1], shared)], NOBODY_S_OWN, spreads=False
    )
    check_is_whole(division)
    assert [[box.name for box in boxes] for boxes in division.planned] == [["part", "shared"], [], ["part"]]
    assert division.holders == ((0, 1), (0, 1, 2)), "they are still compared"


def test_small_tensors_are_not_cut() -> None:
    model = layout(*(plain(f"t{n:03d}", 16) for n in range(300)))
    division = divide([model] * 4, NOBODY_S_OWN)
    assert all(not box.is_part for boxes in division.planned for box in boxes)
    assert max(sizes(division)) <= 1.1 * 300 * 64 / 4


@pytest.mark.parametrize("shape", [(), (1, 10**6)])
def test_what_has_one_row_is_written_whole(shape: tuple[int, ...]) -> None:
    division = divide([layout(plain("t", *shape))] * 3, NOBODY_S_OWN)
    assert sorted(len(boxes) for boxes in division.planned) == [0, 0, 1]


def test_different_tensors_under_one_name_are_refused_with_both_ranks() -> None:
    for other in (plain("t", 11), plain("t", 10, dtype="float64")):
        with pytest.raises(AbortedError, match=r"model/t.*as on rank 0.*on rank 2"):
            divide([layout(plain("t", 10)), layout(), layout(other)], NOBODY_S_OWN)


@pytest.mark.parametrize(
    "parts", [((0, 4), (5, 10)), ((0, 6), (5, 10)), ((0, 5), (5, 9))], ids=["gap", "overlap", "end"]
)
def test_boxes_with_a_gap_or_an_overlap_abort(parts: tuple[tuple[int, int], ...]) -> None:
    """Spec: C5.1"""
    with pytest.raises(AbortedError, match="model/t"):
        divide([layout(rows("t", (10, 3), *part)) for part in parts], NOBODY_S_OWN)


@pytest.mark.parametrize(
    ("wholes", "cuts", "found"),
    [
        (((0, 2),), (), "0 to 1"),
        (((0, 1 << 60),), (), "0 to"),
        (((1, 0),), (), "1 to -1"),
        (((-1, 1),), (), "-1 to 0"),
        ((), (Share(1, 0, 1),), "1 to 1"),
        ((), (Share(0, 0, 5),), "0 to 5"),
        ((), (Share(0, 3, 2),), "3 to 2"),
        ((), (Share(0, -1, 2),), "-1 to 2"),
    ],
)
def test_a_part_of_boxes_or_rows_that_a_rank_does_not_hold_is_refused_before_it_is_spread_out(
    wholes: tuple[tuple[int, int], ...], cuts: tuple[Share, ...], found: str
) -> None:
    message = msgspec.msgpack.encode(PartMessage(wholes, cuts, ()))
    with pytest.raises(AbortedError, match=found):
        decode_part(message, layout(plain("w", 4)), where="rank 0")


@pytest.mark.parametrize("seed", range(40))
def test_one_process_alone_is_dealt_what_one_of_several_would_be(seed: int) -> None:
    rng = random.Random(seed)
    boxes = [
        plain(f"n{number}", *(rng.randrange(4) for _ in range(rng.randrange(3))), item=rng.choice("ab"))
        for number in range(rng.randrange(8))
    ]
    held = layout(*boxes, *[rows("cut", (5, 2), 0, 2), rows("cut", (5, 2), 2, 5)] * (seed % 2))

    division, part = divide_alone(held)

    general = divide([held], NOBODY_S_OWN)
    assert part == general.parts[0]
    assert division == replace(general.division, digests=(boxes_digest(general.planned[0]),))


def test_one_process_that_holds_less_than_a_tensor_cannot_save_it() -> None:
    with pytest.raises(AbortedError, match="do not make a whole"):
        divide_alone(layout(plain("whole", 2), rows("cut", (5, 2), 0, 2)))
