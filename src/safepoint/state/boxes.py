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


@dataclass(frozen=True, slots=True)
class Share:
    """Hold what is left of a tensor: the shape of the local memory, and its boxes in the order of that memory.

    A rank that is left with nothing holds no box; a tensor that has no elements is held as one box.
    """

    shape: Shape
    boxes: tuple[LocalBox, ...]


def share_of(shape: Shape, cuts: Sequence[Cut]) -> Share:
    """Return what is left of a tensor of this shape after the cuts."""
    held = [[_Run(0, 0, length)] for length in shape]
    for cut in cuts:
        held[cut.axis] = list(_kept(held[cut.axis], cut))
    local = tuple(sum(run.length for run in runs) for runs in held)
    if math.prod(shape) == 0:
        return Share(local, (LocalBox((0,) * len(shape), shape, (0,) * len(shape)),))
    boxes = (
        LocalBox(tuple(run.begin for run in runs), tuple(run.length for run in runs), tuple(run.start for run in runs))
        for runs in product(*held)
    )
    return Share(local, tuple(boxes))


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
