"""Which boxes of a tensor one rank holds, from the cuts that were made through it. Pure.

A cut goes through one axis, in as many pieces as a dimension of the mesh has ranks, and a rank keeps the pieces of its
coordinate. Several cuts through one axis are made one after another, each through what the one before has left. A
strided cut first takes the axis apart into `factor` stretches and keeps a piece of each, so that a rank may hold rows
from several places; the local memory has them one behind the other.

A piece has the length that torch gives it: rounded up, so that the last ones may be shorter, or empty.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import product

Shape = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Cut:
    """Describe one cut: through which axis, into how many pieces, which of them is kept, from how many stretches."""

    axis: int
    count: int
    index: int
    factor: int = 1


@dataclass(frozen=True, slots=True)
class LocalBox:
    """Name one box: where it begins in the whole tensor, its lengths, and where it begins in the local memory."""

    offset: Shape
    shape: Shape
    start: Shape


@dataclass(frozen=True, slots=True)
class _Run:
    """Name a run of rows: where it begins in the whole axis and in the local one, and its length."""

    begin: int
    start: int
    length: int


def held_boxes(shape: Shape, cuts: Sequence[Cut]) -> list[LocalBox]:
    """Return the boxes that are left of a tensor after the cuts, in the order of the local memory.

    A rank that is left with nothing holds none; a tensor that has no elements is held as one box.
    """
    if math.prod(shape) == 0:
        return [LocalBox((0,) * len(shape), shape, (0,) * len(shape))]
    return [
        LocalBox(tuple(run.begin for run in runs), tuple(run.length for run in runs), tuple(run.start for run in runs))
        for runs in product(*_runs(shape, cuts))
    ]


def local_shape(shape: Shape, cuts: Sequence[Cut]) -> Shape:
    """Return the shape of the local memory after the cuts."""
    return tuple(sum(run.length for run in runs) for runs in _runs(shape, cuts))


def in_order_of_cutting(cuts: Sequence[Cut]) -> list[Cut] | None:
    """Return strided cuts as plain ones, in the order in which they were made; None if there is no such order.

    Data parallelism cuts what tensor parallelism has left, but its dimension of the mesh stands first: the cut is
    written as a strided one, whose factor is the number of pieces that the later dimensions make of the axis. Where the
    pieces are uneven, the two ways to read it differ.
    """
    made: list[Cut] = []
    for cut in reversed(cuts):
        pieces, place = 1, 0
        while pieces < cut.factor and place < len(made):
            pieces *= made[place].count if made[place].axis == cut.axis else 1
            place += 1
        if pieces != cut.factor:
            return None
        made.insert(place, replace(cut, factor=1))
    return made


def _runs(shape: Shape, cuts: Sequence[Cut]) -> list[list[_Run]]:
    held = [[_Run(0, 0, length)] for length in shape]
    for cut in cuts:
        held[cut.axis] = list(_kept(held[cut.axis], cut))
    return held


def _kept(runs: Sequence[_Run], cut: Cut) -> Iterator[_Run]:
    """Yield what a cut leaves of the runs, those that follow each other in the whole axis as one."""
    length, last = sum(run.length for run in runs), _Run(0, 0, 0)
    for stretch in range(cut.factor):
        begin, end = _piece(0, length, cut.factor, stretch)
        begin, end = _piece(begin, end, cut.count, cut.index)
        for run in runs:
            low, high = max(begin, run.start), min(end, run.start + run.length)
            if low >= high:
                continue
            kept = _Run(run.begin + low - run.start, last.start + last.length, high - low)
            if last.length and kept.begin == last.begin + last.length:
                last = replace(last, length=last.length + kept.length)
                continue
            if last.length:
                yield last
            last = kept
    if last.length:
        yield last


def _piece(begin: int, end: int, count: int, index: int) -> tuple[int, int]:
    length = -(-(end - begin) // count)
    return min(begin + length * index, end), min(begin + length * (index + 1), end)
