"""Overlaps: which boxes of some layouts have something in common with which boxes of others, in columns of numbers."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy

from safepoint.format.blocks import Block, Inventory
from safepoint.format.columns import Columns, Table

# So many pairs of boxes are looked at together.
_PAIRS_AT_ONCE = 1 << 20


@dataclass(frozen=True, slots=True)
class Overlaps:
    """Name pairs of boxes that have elements in common, by layout and place in it, and how many elements."""

    layouts: Table
    places: Table
    others: Table
    other_places: Table
    counts: Table


def find_overlaps(
    layouts: Sequence[Columns], others: Sequence[Columns], left_out: frozenset[str]
) -> Iterator[Overlaps]:
    """Yield the pairs of a box of one of `layouts` and one of `others`, of one tensor, that overlap.

    Args:
        layouts: Boxes of which those of one tensor do not overlap each other; equal layouts have digests of their own.
        others: Any boxes; equal ones may have one digest, and the first of them then stands for all.
        left_out: Items that are not looked at.

    Raises:
        CorruptionError: Two layouts name tensors of different types or shapes alike.
    """
    inventory = Inventory([*layouts, *others], left_out)
    for block in inventory.blocks():
        is_other = block.layouts >= len(layouts)
        if is_other.all() or not is_other.any():
            continue
        filled = (block.shapes > 0).all(axis=0)
        mine, theirs = block.only(filled & ~is_other), block.only(filled & is_other)
        for one, other in _pairs(mine, theirs):
            offsets = numpy.maximum(mine.offsets[:, one], theirs.offsets[:, other])
            ends = numpy.minimum(
                mine.offsets[:, one] + mine.shapes[:, one], theirs.offsets[:, other] + theirs.shapes[:, other]
            )
            does_meet = (ends > offsets).all(axis=0)
            one, other = one[does_meet], other[does_meet]
            counts = (ends - offsets)[:, does_meet].prod(axis=0)
            bases = inventory.bases
            yield Overlaps(
                mine.layouts[one],
                mine.keys[one] - bases[mine.layouts[one]],
                theirs.layouts[other] - len(layouts),
                theirs.keys[other] - bases[theirs.layouts[other]],
                counts,
            )


def _pairs(mine: Block, theirs: Block) -> Iterator[tuple[Table, Table]]:
    """Yield pairs of boxes of one tensor that may overlap, by their rows; some at a time."""
    if not len(mine.keys) or not len(theirs.keys):
        return
    nothing = numpy.zeros(len(mine.keys), numpy.int64), numpy.zeros(len(theirs.keys), numpy.int64)
    starts, asked = (mine.offsets[0], theirs.offsets[0]) if mine.axes else nothing
    ends = asked + theirs.shapes[0] if mine.axes else asked + 1
    # Boxes that lie side by side begin alike, and the one before may be longer than either.
    longest = numpy.zeros(mine.last - mine.first, numpy.int64)
    numpy.maximum.at(longest, mine.tensors - mine.first, mine.shapes[0] if mine.axes else nothing[0] + 1)
    order = numpy.lexsort((starts, mine.tensors))
    tensors, starts = mine.tensors[order], starts[order]
    first = _counts_below(tensors, starts, theirs.tensors, asked - longest[theirs.tensors - mine.first] + 1)
    last = _counts_below(tensors, starts, theirs.tensors, ends)
    counts = numpy.maximum(last - first, 0)
    bounds = numpy.flatnonzero(numpy.diff(numpy.cumsum(counts) // _PAIRS_AT_ONCE)) + 1
    for own in numpy.split(numpy.arange(len(counts)), bounds):
        other = numpy.repeat(own, counts[own])
        within = numpy.arange(len(other)) - numpy.repeat(numpy.cumsum(counts[own]) - counts[own], counts[own])
        if len(other):
            yield order[first[other] + within], other


def _counts_below(tensors: Table, starts: Table, asked_tensors: Table, asked: Table) -> Table:
    """Return for each question how many of the boxes, sorted by tensor and row, stand before it."""
    all_tensors = numpy.concatenate([asked_tensors, tensors])
    values = numpy.concatenate([asked, starts])
    is_box = numpy.arange(len(values)) >= len(asked)
    # A question stands before the boxes that begin just there.
    order = numpy.lexsort((is_box, values, all_tensors))
    below = numpy.empty(len(values), numpy.int64)
    below[order] = numpy.cumsum(is_box[order])
    return below[: len(asked)]
