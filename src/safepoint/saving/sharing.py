"""Sharing: what is written of boxes that several ranks hold, and by which of them.

Spec: C2.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import numpy

from safepoint.errors import InternalError
from safepoint.format.blocks import Block, Flags, Inventory
from safepoint.format.tiling import Column

# A cut that would move less than this part of a rank's quota is not made.
_SMALLEST_CUT = 0.02


@dataclass(frozen=True, slots=True)
class Pieces:
    """Hold what ranks write of boxes of several holders: rank, key of the box in the rank's layout, range of rows."""

    ranks: Column
    keys: Column
    starts: Column
    stops: Column
    is_whole: Flags

    @classmethod
    def joined(cls, pieces: Sequence[Pieces]) -> Pieces:
        """Return pieces in the order of ranks, boxes and rows."""
        columns = zip(*((one.ranks, one.keys, one.starts, one.stops, one.is_whole) for one in pieces), strict=True)
        ranks, keys, starts, stops, is_whole = map(numpy.concatenate, columns)
        order = numpy.lexsort((starts, keys, ranks))
        return cls(ranks[order], keys[order], starts[order], stops[order], is_whole[order])


@dataclass(frozen=True, slots=True)
class Shared:
    """Hold boxes of several holders: the key in the first layout that has it, number of rows, bytes of a row.

    `counts` tells how many layouts have a box; their numbers, and the keys of the box in them, lie from `begins` on in
    `layouts` and `keys`. `signs` are equal where these layouts are.
    """

    firsts: Column
    row_counts: Column
    row_bytes: Column
    signs: Column
    counts: Column
    begins: Column
    layouts: Column
    keys: Column

    @classmethod
    def joined(cls, parts: Sequence[Shared]) -> Shared:
        """Return the boxes of several parts in one."""
        sizes = numpy.cumsum([0, *(len(one.keys) for one in parts)])
        begins = [one.begins + size for one, size in zip(parts, sizes.tolist(), strict=False)]
        columns = [
            (one.firsts, one.row_counts, one.row_bytes, one.signs, one.counts, begin, one.layouts, one.keys)
            for one, begin in zip(parts, begins, strict=True)
        ]
        return cls(*(numpy.concatenate(column) for column in zip(*columns, strict=True)))


@dataclass(frozen=True, slots=True)
class HolderSet:
    """Hold the boxes of one set of holders: their places among the shared ones, and their keys by layout."""

    holders: tuple[int, ...]
    is_leaders: bool
    places: Column
    layouts: Column
    keys: Column


def find_shared(inventory: Inventory, is_alone: Flags, loads: Column) -> Shared:
    """Flag the boxes that one rank alone holds, add them to its load, and return all others; no empty part."""
    rank_counts = numpy.array([len(ranks) for ranks in inventory.ranks], numpy.int64)
    first_ranks = numpy.array([ranks[0] for ranks in inventory.ranks], numpy.int64)
    # Sums of these tell which layouts were added up; `_sets` compares the layouts themselves.
    marks = _marks(len(inventory.layouts))
    found = [_nothing_shared()]
    for block in inventory.blocks():
        row_counts = block.shapes[0] if block.axes else numpy.ones(len(block.keys), numpy.int64)
        is_empty = inventory.is_empty[block.tensors]
        if is_empty.any():
            # All that an empty tensor has are its name and shape.
            block.offsets[:, is_empty] = 0
            block.shapes[:, is_empty] = 0
        order, begins = _alike(block, (block.shapes > 0).all(axis=0) | is_empty)
        counts = numpy.diff(begins, append=len(order))
        firsts = order[begins]
        size_bytes = block.shapes[:, firsts].prod(axis=0) * inventory.element_bytes[block.tensors[firsts]]
        layouts = block.layouts[firsts]
        has_one = (counts == 1) & (rank_counts[layouts] == 1)
        is_alone[block.keys[firsts[has_one]]] = True
        numpy.add.at(loads, first_ranks[layouts[has_one]], size_bytes[has_one])
        if has_one.all():
            continue
        signs = numpy.add.reduceat(marks[block.layouts[order]], begins)
        others = ~has_one
        members = order[numpy.repeat(others, counts)]
        rows = row_counts[firsts]
        row_bytes = numpy.where(size_bytes > 0, size_bytes // numpy.maximum(rows, 1), 0)
        found.append(
            Shared(
                block.keys[firsts[others]],
                rows[others],
                row_bytes[others],
                signs[others],
                counts[others],
                numpy.cumsum(counts[others]) - counts[others],
                block.layouts[members],
                block.keys[members],
            )
        )
    return Shared.joined(found)


def _alike(block: Block, is_meant: Flags) -> tuple[Column, Column]:
    """Return an order of some boxes in which equal ones follow each other, by layout, and where each begins in it.

    A box that a layout names twice is left out the second time.
    """
    keys = [column for axis in range(block.axes) for column in (block.offsets[axis], block.shapes[axis])]
    order = numpy.lexsort((block.layouts, *reversed(keys), block.tensors))
    order = order if is_meant.all() else order[is_meant[order]]
    is_new = numpy.ones(len(order), numpy.bool_)
    is_new[1:] = _differ(block.tensors, order)
    for key in keys:
        is_new[1:] |= _differ(key, order)
    is_kept = is_new.copy()
    is_kept[1:] |= _differ(block.layouts, order)
    return order[is_kept], numpy.flatnonzero(is_new[is_kept])


def _differ(column: Column | Flags, order: Column) -> Flags:
    """Return of each place in an order but the first whether the one before it has another value."""
    ordered = column[order]
    differ: Flags = ordered[1:] != ordered[:-1]
    return differ


def _marks(count: int) -> Column:
    """Return numbers whose sums, modulo 2^64, hardly ever are equal by chance."""
    marks = numpy.arange(1, count + 1, dtype=numpy.uint64) * numpy.uint64(0x9E3779B97F4A7C15)
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
        marks = (marks ^ (marks >> numpy.uint64(shift))) * numpy.uint64(factor)
    return (marks ^ (marks >> numpy.uint64(31))).view(numpy.int64)


def find_sets(inventory: Inventory, shared: Shared) -> list[HolderSet]:
    """Return the sets of holders in their order, each with its boxes in the order of the layouts.

    Few holders leave little choice, so they come first.
    """
    if not len(shared.firsts):
        return []
    leaders = inventory.are_leaders(shared.firsts)
    order = numpy.lexsort((shared.firsts, leaders, shared.signs, shared.counts))
    is_new = numpy.ones(len(order), numpy.bool_)
    is_new[1:] = _differ(leaders, order) | _differ(shared.signs, order) | _differ(shared.counts, order)
    found = []
    for places in numpy.split(order, numpy.flatnonzero(is_new)[1:]):
        members = shared.begins[places][:, None] + numpy.arange(shared.counts[places[0]])
        layouts = shared.layouts[members]
        if (layouts != layouts[0]).any():
            raise InternalError("boxes of different holders were taken for those of one set", found=len(places))
        holders = tuple(sorted(itertools.chain.from_iterable(inventory.ranks[n] for n in layouts[0].tolist())))
        found.append(HolderSet(holders, bool(leaders[places[0]]), places, layouts[0], shared.keys[members]))
    return sorted(found, key=lambda one: (len(one.holders), one.holders, one.is_leaders))


def give(inventory: Inventory, shared: Shared, one: HolderSet, loads: Column, *, spreads: bool) -> Pieces:
    """Give the lowest holder of a set the boxes that it writes alone."""
    is_given = numpy.full(len(one.places), not spreads or one.is_leaders)
    is_given |= shared.row_bytes[one.places] == 0
    places, rank = one.places[is_given], one.holders[0]
    row_counts = shared.row_counts[places]
    loads[rank] += int((row_counts * shared.row_bytes[places]).sum())
    keys = one.keys[is_given, int(numpy.flatnonzero(one.layouts == inventory.layout_of[rank])[0])]
    begins = numpy.zeros(len(places), numpy.int64)
    return Pieces(begins + rank, keys, begins, row_counts, numpy.ones(len(places), numpy.bool_))


def spread(inventory: Inventory, shared: Shared, one: HolderSet, loads: Column) -> Pieces:
    """Divide the boxes of one set of holders, so that those who have little to write get more."""
    is_spread = shared.row_bytes[one.places] > 0
    places, keys, holders = one.places[is_spread], one.keys[is_spread], numpy.array(one.holders, numpy.int64)
    if not len(places):
        return no_pieces()
    row_counts, row_bytes = shared.row_counts[places], shared.row_bytes[places]
    ends = numpy.cumsum(row_counts * row_bytes)
    begins = ends - row_counts * row_bytes
    bounds = numpy.cumsum(_quotas(loads[holders].tolist(), int(ends[-1])))
    # The box in which each bound lies, and how far.
    boxes = numpy.maximum(numpy.searchsorted(begins, bounds) - 1, 0)
    ahead, behind = bounds - begins[boxes], ends[boxes] - bounds
    smallest = _SMALLEST_CUT * float(bounds[-1]) / len(holders)
    is_cut = (ahead > smallest) & (behind > smallest)
    boxes, ahead = boxes[is_cut], ahead[is_cut]
    rows = numpy.minimum(row_counts[boxes], (2 * ahead + row_bytes[boxes]) // (2 * row_bytes[boxes]))
    boxes = numpy.concatenate([numpy.arange(len(places)), boxes])
    starts = numpy.concatenate([numpy.zeros(len(places), numpy.int64), rows])
    order = numpy.lexsort((starts, boxes))
    is_new = numpy.append(True, _differ(boxes, order) | _differ(starts, order))
    order = order[is_new & (starts < row_counts[boxes])[order]]
    boxes, starts = boxes[order], starts[order]
    stops = numpy.where(numpy.append(boxes[1:] != boxes[:-1], True), row_counts[boxes], numpy.append(starts[1:], 0))
    middles = begins[boxes] + (starts + stops) * row_bytes[boxes] // 2
    ranks = holders[numpy.minimum(numpy.searchsorted(bounds, middles, "right"), len(holders) - 1)]
    numpy.add.at(loads, ranks, (stops - starts) * row_bytes[boxes])
    columns = numpy.searchsorted(one.layouts, inventory.layout_of[ranks])
    is_whole = (starts == 0) & (stops == row_counts[boxes])
    return Pieces(ranks, keys[boxes, columns], starts, stops, is_whole)


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
    left = total
    for load in loads:
        quotas.append(min(max(0, level - load), left))
        left -= quotas[-1]
    return quotas


def no_pieces() -> Pieces:
    nothing = numpy.zeros(0, numpy.int64)
    return Pieces(nothing, nothing, nothing, nothing, numpy.zeros(0, numpy.bool_))


def _nothing_shared() -> Shared:
    return Shared(*[numpy.zeros(0, numpy.int64)] * 8)
