"""Divide: who writes which box, as a pure function of the ranks' layouts.

1. A box that one rank alone holds is written by that rank.
2. A box that several ranks hold is written once. Boxes are divided so that, as far as the sets of holders allow, all
   ranks write the same number of bytes; a box is cut into row ranges where that is needed.
3. Of a box that is the leader's, or whose holders may hold other bytes, the lowest holder writes all.
4. What is planned tiles every tensor exactly, or the save is refused here.

Spec: C2, C5.
"""

from __future__ import annotations

import bisect
import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import msgspec

from safepoint.errors import AbortedError, CorruptionError
from safepoint.format.extent import Box, Shape, check_tiling, element_count
from safepoint.saving.layout import Layout, LayoutBox

# A cut that would move less than this part of a rank's quota is not made.
_SMALLEST_CUT = 0.02


class Share(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """Name what a rank writes of a box that it holds: a half-open range of the rows of that box of its layout."""

    box: int
    start: int
    stop: int


class ReplicaSet(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """Name boxes of a rank's layout that the same ranks hold; `number` is the same on all of them."""

    number: int
    is_leaders: bool
    boxes: tuple[int, ...]


class RankPart(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """Tell one rank what it writes, and what it holds together with others."""

    shares: tuple[Share, ...] = ()
    replicas: tuple[ReplicaSet, ...] = ()


@dataclass(frozen=True, slots=True)
class Division:
    """Hold the part of each rank.

    `planned` are the boxes that each rank writes, `holders` the ranks of each replica set, `tensor_counts` and
    `sizes_bytes` what is stored of each item.
    """

    parts: tuple[RankPart, ...]
    planned: tuple[tuple[LayoutBox, ...], ...]
    holders: tuple[tuple[int, ...], ...]
    tensor_counts: dict[str, int]
    sizes_bytes: dict[str, int]


@dataclass(slots=True)
class _Held:
    """Collect where one box lies: by layout, its number in that."""

    box: LayoutBox
    numbers: dict[int, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class _Ranks:
    """Hold the different layouts, the ranks that have each, and which one each rank has."""

    layouts: tuple[Layout, ...]
    ranks: tuple[tuple[int, ...], ...]
    layout_of: tuple[int, ...]

    @classmethod
    def of(cls, layouts: Sequence[Layout]) -> _Ranks:
        by_digest: dict[str, list[int]] = {}
        for rank, layout in enumerate(layouts):
            by_digest.setdefault(layout.digest, []).append(rank)
        different = list(by_digest.values())
        place = {rank: number for number, ranks in enumerate(different) for rank in ranks}
        return cls(
            tuple(layouts[ranks[0]] for ranks in different),
            tuple(map(tuple, different)),
            tuple(place[rank] for rank in range(len(layouts))),
        )

    def holders(self, held: _Held) -> tuple[int, ...]:
        if len(held.numbers) == 1:
            return self.ranks[next(iter(held.numbers))]
        return tuple(sorted(itertools.chain.from_iterable(self.ranks[number] for number in held.numbers)))

    def share(self, held: _Held, rank: int, start: int = 0, stop: int | None = None) -> Share:
        return Share(held.numbers[self.layout_of[rank]], start, held.box.row_count if stop is None else stop)


def divide(layouts: Sequence[Layout], per_rank: frozenset[str], *, spreads: bool = True) -> Division:
    """Return who writes what.

    Args:
        layouts: The layout of each rank.
        per_rank: The items of which each rank writes its own.
        spreads: Whether the holders of a box are known to hold the same, so that each may write some of it; if not,
            rows of several holders could make a mixture that no rank ever had.

    Raises:
        AbortedError: Ranks hold tensors of different types or shapes under one name, or their boxes do not make a
            whole; the tensor is named.

    Spec: C2, C5.
    """
    ranks = _Ranks.of(layouts)
    shares, loads = _own(layouts, per_rank)
    shared: dict[tuple[tuple[int, ...], bool], list[_Held]] = {}
    for held in _boxes(ranks, per_rank):
        holders = ranks.holders(held)
        if len(holders) > 1:
            shared.setdefault((holders, held.box.is_leaders), []).append(held)
        if len(holders) == 1 or not spreads or held.box.is_leaders or not held.box.size_bytes:
            shares[holders[0]].append(ranks.share(held, holders[0]))
            loads[holders[0]] += held.box.size_bytes
    replicas: list[list[ReplicaSet]] = [[] for _ in layouts]
    # Few holders leave little choice, so they come first.
    order = sorted(shared, key=lambda key: (len(key[0]), key))
    for number, (holders, is_leaders) in enumerate(order):
        members = shared[holders, is_leaders]
        for layout in members[0].numbers:
            own = ReplicaSet(number, is_leaders, tuple(held.numbers[layout] for held in members))
            for rank in ranks.ranks[layout]:
                replicas[rank].append(own)
        if spreads and not is_leaders:
            _distribute([held for held in members if held.box.size_bytes], holders, ranks, loads, shares)
    parts = tuple(
        RankPart(tuple(sorted(own, key=lambda share: (share.box, share.start))), tuple(sets))
        for own, sets in zip(shares, replicas, strict=True)
    )
    planned = tuple(written(layout, part) for layout, part in zip(layouts, parts, strict=True))
    _prove(planned, per_rank)
    return Division(parts, planned, tuple(holders for holders, _ in order), *_totals(planned, per_rank))


def written(layout: Layout, part: RankPart) -> tuple[LayoutBox, ...]:
    """Return the boxes that a rank writes, in the order of its shares."""
    return tuple(cut_box(layout.boxes[share.box], share) for share in part.shares)


def cut_box(box: LayoutBox, share: Share) -> LayoutBox:
    """Return the part of a box that a share names."""
    if not box.shape or (share.start, share.stop) == (0, box.row_count):
        return box
    offset = (box.offset[0] + share.start, *box.offset[1:])
    return msgspec.structs.replace(box, offset=offset, shape=(share.stop - share.start, *box.shape[1:]))


def _own(layouts: Sequence[Layout], per_rank: frozenset[str]) -> tuple[list[list[Share]], list[int]]:
    """Return by rank the shares of items of ranks' own, and their bytes."""
    shares: list[list[Share]] = []
    loads = []
    for layout in layouts:
        own = [(number, box) for number, box in enumerate(layout.boxes) if box.item in per_rank] if per_rank else []
        shares.append([Share(number, 0, box.row_count) for number, box in own])
        loads.append(sum(box.size_bytes for _, box in own))
    return shares, loads


def _boxes(ranks: _Ranks, per_rank: frozenset[str]) -> Iterable[_Held]:
    """Return each box once, with its holders; none of items of ranks' own, and no empty part."""
    found: dict[object, _Held] = {}
    wholes: dict[tuple[str, str], tuple[tuple[str, Shape], int]] = {}
    for layout, held in enumerate(ranks.layouts):
        rank = ranks.ranks[layout][0]
        for number, box in enumerate(held.boxes):
            if box.item in per_rank:
                continue
            name = (box.item, box.name)
            first, holder = wholes.setdefault(name, ((box.dtype, box.global_shape), rank))
            _check_alike(box, first, rank, holder)
            is_empty_whole = not element_count(box.global_shape)
            if not box.size_bytes and not is_empty_whole:
                continue
            # All that an empty tensor has are its name and shape.
            key = (*name, () if is_empty_whole else (box.offset, box.shape))
            found.setdefault(key, _Held(box)).numbers.setdefault(layout, number)
    return found.values()


def _check_alike(box: LayoutBox, first: tuple[str, Shape], rank: int, holder: int) -> None:
    if (box.dtype, box.global_shape) != first:
        raise AbortedError(
            "ranks hold different tensors under one name",
            where=f"{box.item}/{box.name}",
            expected=f"{first[0]} of shape {first[1]}, as on rank {holder}",
            found=f"{box.dtype} of shape {box.global_shape} on rank {rank}",
        )


def _distribute(
    members: Sequence[_Held], holders: tuple[int, ...], ranks: _Ranks, loads: list[int], shares: list[list[Share]]
) -> None:
    """Divide the boxes of one set of holders, so that those who have little to write get more."""
    quotas = _quotas([loads[rank] for rank in holders], sum(held.box.size_bytes for held in members))
    bounds = list(itertools.accumulate(quotas))
    smallest = _SMALLEST_CUT * bounds[-1] / len(holders)
    begin = 0
    for held in members:
        box = held.box
        cuts = {0, box.row_count}
        for bound in bounds[bisect.bisect_right(bounds, begin) : bisect.bisect_left(bounds, begin + box.size_bytes)]:
            ahead, behind = bound - begin, begin + box.size_bytes - bound
            if ahead > smallest and behind > smallest:
                cuts.add(min(box.row_count, (2 * ahead + box.row_bytes) // (2 * box.row_bytes)))
        for start, stop in itertools.pairwise(sorted(cuts)):
            middle = begin + (start + stop) * box.row_bytes // 2
            rank = holders[min(bisect.bisect_right(bounds, middle), len(holders) - 1)]
            shares[rank].append(ranks.share(held, rank, start, stop))
            loads[rank] += (stop - start) * box.row_bytes
        begin += box.size_bytes


def _quotas(loads: Sequence[int], total: int) -> list[int]:
    """Return how many of `total` bytes each gets, so that the least loaded are filled up to one level."""
    level, below = 0, 0
    ordered = sorted(loads)
    for count, load in enumerate(ordered, start=1):
        below += load
        level = -(-(total + below) // count)
        if count == len(loads) or level <= ordered[count]:
            break
    quotas: list[int] = []
    for load in loads:
        quotas.append(min(max(0, level - load), total - sum(quotas)))
    return quotas


def _prove(planned: Sequence[Sequence[LayoutBox]], per_rank: frozenset[str]) -> None:
    pieces: dict[tuple[str, str], list[Box]] = {}
    shapes: dict[tuple[str, str], Shape] = {}
    for box in itertools.chain.from_iterable(planned):
        if box.item not in per_rank:
            pieces.setdefault((box.item, box.name), []).append(Box(box.offset, box.shape))
            shapes[box.item, box.name] = box.global_shape
    for (item, name), boxes in pieces.items():
        where = f"{item}/{name}"
        try:
            check_tiling(shapes[item, name], boxes, where=where)
        except CorruptionError as exc:
            raise AbortedError("the ranks' parts do not make a whole tensor", where=where, found=str(exc)) from exc


def _totals(planned: Sequence[Sequence[LayoutBox]], per_rank: frozenset[str]) -> tuple[dict[str, int], dict[str, int]]:
    names: dict[str, set[tuple[str, int]]] = {}
    sizes: dict[str, int] = {}
    for rank, boxes in enumerate(planned):
        for box in boxes:
            names.setdefault(box.item, set()).add((box.name, rank if box.item in per_rank else 0))
            sizes[box.item] = sizes.get(box.item, 0) + box.size_bytes
    return {item: len(found) for item, found in names.items()}, sizes
