"""Parts: what one rank writes of the boxes that it holds, and how the leader tells it.

A message names boxes by ranges of their numbers, so that it is short where a rank writes all it holds, or a few boxes.

Spec: C2.
"""

from __future__ import annotations

from collections.abc import Mapping
from operator import attrgetter

import msgspec
import numpy
import numpy.typing

from safepoint.errors import AbortedError
from safepoint.saving.layout import Layout, LayoutBox

Numbers = numpy.typing.NDArray[numpy.integer]


class Share(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True, gc=False):
    """Name what a rank writes of a box that it holds: a half-open range of the rows of that box of its layout."""

    box: int
    start: int
    stop: int


class ReplicaSet(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """Name boxes of a rank's layout that the same ranks hold; `number` is the same on all of them."""

    number: int
    is_leaders: bool
    boxes: tuple[int, ...]


class RankPart(msgspec.Struct, frozen=True):
    """Tell one rank what it writes, and what it holds together with others.

    `boxes` are the numbers of the boxes of its layout, in rising order; one that is cut may come several times.
    `cuts` tell, by the place in them, of which box only some rows are written.
    """

    boxes: tuple[int, ...] = ()
    cuts: Mapping[int, Share] = {}
    replicas: tuple[ReplicaSet, ...] = ()


Range = tuple[int, int]


class ReplicaRanges(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """Name the boxes of a replica set by half-open ranges of their numbers."""

    number: int
    is_leaders: bool
    boxes: tuple[Range, ...]


class PartMessage(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """Name boxes that are written whole by half-open ranges of their numbers, and of others the rows."""

    wholes: tuple[Range, ...]
    cuts: tuple[Share, ...]
    replicas: tuple[ReplicaRanges, ...]


def ranges_of(numbers: Numbers) -> tuple[Range, ...]:
    """Return numbers, each greater than the one before it, as half-open ranges."""
    if not len(numbers):
        return ()
    breaks = numpy.flatnonzero(numpy.diff(numbers) != 1)
    firsts = [numbers[0], *numbers[breaks + 1]]
    lasts = [*numbers[breaks], numbers[-1]]
    return tuple((int(first), int(last) + 1) for first, last in zip(firsts, lasts, strict=True))


def decode_part(message: bytes, layout: Layout, *, where: str) -> RankPart:
    """Return the part of a rank, told in a `PartMessage`.

    Raises:
        AbortedError: It is none of this layout.
    """
    try:
        told = msgspec.msgpack.decode(message, type=PartMessage)
    except msgspec.DecodeError as exc:
        raise AbortedError("a message of another rank cannot be decoded", where=where, found=str(exc)) from exc
    _check_names(told, layout, where)
    wholes = [number for start, stop in told.wholes for number in range(start, stop)]
    sets = [
        ReplicaSet(
            one.number, one.is_leaders, tuple(number for start, stop in one.boxes for number in range(start, stop))
        )
        for one in told.replicas
    ]
    shares = [*(Share(number, 0, layout.boxes[number].row_count) for number in wholes), *told.cuts]
    shares.sort(key=attrgetter("box", "start"))
    rows = [(0, layout.boxes[share.box].row_count) for share in shares]
    cuts = {place: one for place, one in enumerate(shares) if (one.start, one.stop) != rows[place]}
    return RankPart(tuple([share.box for share in shares]), cuts, tuple(sets))


def cut_box(box: LayoutBox, share: Share) -> LayoutBox:
    """Return the part of a box that a share names."""
    if not box.shape or (share.start, share.stop) == (0, box.row_count):
        return box
    offset = (box.offset[0] + share.start, *box.offset[1:])
    return msgspec.structs.replace(box, offset=offset, shape=(share.stop - share.start, *box.shape[1:]))


def written(layout: Layout, part: RankPart) -> tuple[LayoutBox, ...]:
    """Return the boxes that a rank writes, in the order of its part."""
    boxes = list(map(layout.boxes.__getitem__, part.boxes))
    for place, cut in part.cuts.items():
        boxes[place] = cut_box(boxes[place], cut)
    return tuple(boxes)


def _check_names(told: PartMessage, layout: Layout, where: str) -> None:
    """Raise `AbortedError` unless a message names boxes of a layout and rows of them; no range is spread out."""
    count = len(layout.boxes)
    ranges = [*told.wholes, *(pair for one in told.replicas for pair in one.boxes)]
    ranges += [(cut.box, cut.box + 1) for cut in told.cuts]
    strange = [pair for pair in ranges if not 0 <= pair[0] <= pair[1] <= count]
    if strange:
        raise AbortedError(
            "a part names a box that this rank does not hold",
            where=where,
            expected=f"{count} boxes",
            found=f"{strange[0][0]} to {strange[0][1] - 1}",
        )
    for cut in told.cuts:
        rows = layout.boxes[cut.box].row_count
        if not 0 <= cut.start <= cut.stop <= rows:
            found = f"{cut.start} to {cut.stop}"
            raise AbortedError("a part names rows that a box does not have", where=where, expected=rows, found=found)
