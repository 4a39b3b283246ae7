"""Layouts: which boxes of which tensors a rank holds, without any content.

A layout is exchanged by its digest, and in full only where the other side does not know it. Then it goes in columns:
what names the boxes, which ranks that hold parts of the same tensors have in common, and a table of numbers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate, chain
from operator import attrgetter

import msgspec
import numpy
import numpy.typing

from safepoint.format.columns import WIDE, Columns, Frame, HeldTensor, Table, columns_from, table_digest
from safepoint.format.digest import digest_bytes
from safepoint.format.dtypes import DTYPES
from safepoint.format.extent import BoxLike, Shape, element_count
from safepoint.state.item import CapturedTensor, TensorSpec
from safepoint.state.snapshot import SnapshotItem

_KEYED = attrgetter("item", "name", "offset")
_SPEC: Callable[[CapturedTensor], TensorSpec] = attrgetter("spec")
_IS_LEADERS: Callable[[CapturedTensor], bool] = attrgetter("is_leaders")
# Of an item: its name, what its tensors are, and which of them are the leader's.
_Held = tuple[str, list[TensorSpec], list[bool]]


class LayoutBox(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True, gc=False):
    """Name one box that a rank holds; `is_leaders` as in `CapturedTensor`."""

    item: str
    name: str
    dtype: str
    global_shape: Shape
    offset: Shape
    shape: Shape
    is_leaders: bool = False

    @property
    def row_count(self) -> int:
        """Return the number of rows, counted along the first axis; a 0-dim box has one."""
        return self.shape[0] if self.shape else 1

    @property
    def row_bytes(self) -> int:
        """Return the size of one row."""
        return element_count(self.shape[1:]) * DTYPES[self.dtype].size_bytes

    @property
    def size_bytes(self) -> int:
        """Return the size of the box."""
        return element_count(self.shape) * DTYPES[self.dtype].size_bytes

    @property
    def is_part(self) -> bool:
        """Return whether the box is less than its tensor."""
        return self.shape != self.global_shape


@dataclass(frozen=True, slots=True)
class Layout:
    """Hold the boxes of one rank, sorted by item, name and offset."""

    boxes: tuple[LayoutBox, ...]


class Layouts:
    """Make the layouts of snapshots; that of the last one is given again where the same boxes are held."""

    def __init__(self) -> None:
        self._held: list[_Held] | None = None
        self._layout = Layout(())
        self._order: list[int] | None = None
        self._columns: Columns | None = None

    def of(self, items: Sequence[SnapshotItem]) -> tuple[Layout, tuple[CapturedTensor, ...]]:
        """Return the layout of a snapshot, and its tensors in the same order."""
        held = [(item.name, list(map(_SPEC, item.tensors)), list(map(_IS_LEADERS, item.tensors))) for item in items]
        if held != self._held:
            boxes = [
                LayoutBox(item, spec.name, spec.dtype, spec.global_shape, spec.offset, spec.shape, is_leaders)
                for item, specs, leaders in held
                for spec, is_leaders in zip(specs, leaders, strict=True)
            ]
            order = sorted(range(len(boxes)), key=list(map(_KEYED, boxes)).__getitem__)
            self._layout, self._held = Layout(tuple(boxes[place] for place in order)), held
            self._columns = None
            self._order = None if order == list(range(len(order))) else order
        tensors = tuple(chain.from_iterable(item.tensors for item in items))
        return self._layout, tensors if self._order is None else tuple(tensors[place] for place in self._order)

    def columns(self) -> Columns:
        """Return the layout of the last snapshot in columns."""
        self._columns = self._columns or columns_of(self._layout)
        return self._columns


def columns_of(layout: Layout) -> Columns:
    """Return a layout in columns."""
    boxes = layout.boxes
    tensors = tuple(HeldTensor(box.item, box.name, box.dtype, box.global_shape, box.is_leaders) for box in boxes)
    frame = Frame.of(tensors, digest_bytes(msgspec.msgpack.encode(tensors)))
    return columns_from(frame, _table(boxes))


def divided_items(layouts: Iterable[Columns]) -> set[str]:
    """Return the items of which any box is less than its tensor."""
    found: set[str] = set()
    wholes: dict[str, tuple[Table, list[str]]] = {}
    for one in layouts:
        tensors = one.frame.tensors
        if one.frame.digest not in wholes:
            shapes = numpy.array([length for tensor in tensors for length in tensor.global_shape], numpy.int64)
            wholes[one.frame.digest] = shapes, [tensor.item for tensor in tensors for _ in tensor.global_shape]
        shape, items = wholes[one.frame.digest]
        if not found.issuperset(items):
            found.update(items[place] for place in numpy.flatnonzero(one.table[1] != shape).tolist())
    return found


def cut_digest(boxes: Iterable[BoxLike]) -> str:
    """Return the digest of boxes in whatever order: names, types, shapes and offsets, no content.

    Spec: C4.
    """
    ordered = sorted(boxes, key=_KEYED)
    tensors = tuple(HeldTensor(box.item, box.name, box.dtype, box.global_shape) for box in ordered)
    return table_digest(digest_bytes(msgspec.msgpack.encode(tensors)), _table(ordered))


class CutDigests:
    """Make the digests of what ranks store, as `cut_digest` does, from columns.

    What names the boxes is kept from one rank to the next: ranks that hold parts of the same tensors write the same.
    """

    def __init__(self) -> None:
        self._known: dict[str, tuple[bytes, str, Table]] = {}

    def digest(self, columns: Columns, wholes: Table, cuts: Table) -> str:
        """Return the digest of some boxes of a layout.

        Args:
            columns: The layout.
            wholes: The numbers of boxes that are stored whole, in rising order.
            cuts: Number, first row and end of each range of rows that is stored of another box: three rows of numbers.
        """
        numbers = wholes
        is_cut = numpy.zeros(len(wholes), numpy.bool_)
        if cuts.shape[1]:
            numbers = numpy.concatenate([wholes, cuts[0]])
            is_cut = numpy.arange(len(numbers)) >= len(wholes)
            order = numpy.lexsort((numpy.concatenate([is_cut[: len(wholes)], cuts[1]]), numbers))
            numbers, is_cut = numbers[order], is_cut[order]
        names, places = self._names(columns.frame, numbers)
        table = columns.table[:, places].astype(WIDE)
        if cuts.shape[1]:
            tensors = [columns.frame.tensors[number] for number in numbers.tolist()]
            begins = numpy.array([0, *accumulate(len(tensor.global_shape) for tensor in tensors)])
            firsts = begins[:-1][is_cut]
            order = numpy.lexsort((cuts[1], cuts[0]))
            table[0, firsts] += cuts[1][order]
            table[1, firsts] = (cuts[2] - cuts[1])[order]
            _sort_cut(table, tensors, begins, is_cut)
        return table_digest(names, table)

    def _names(self, frame: Frame, numbers: Table) -> tuple[str, Table]:
        """Return the digest of the names of some boxes, and the places of their axes."""
        key = numbers.tobytes()
        known = self._known.get(frame.digest)
        if known is None or known[0] != key:
            listed = numbers.tolist()
            held = [frame.tensors[number] for number in listed]
            tensors = [HeldTensor(one.item, one.name, one.dtype, one.global_shape) for one in held]
            axes = chain.from_iterable(
                range(frame.ends[number] - len(tensor.global_shape), frame.ends[number])
                for number, tensor in zip(listed, tensors, strict=True)
            )
            places = numpy.array(list(axes), numpy.int64)
            known = key, digest_bytes(msgspec.msgpack.encode(tensors)), places
            self._known[frame.digest] = known
        return known[1], known[2]


def _sort_cut(
    table: Table, tensors: Sequence[HeldTensor], begins: Table, is_cut: numpy.typing.NDArray[numpy.bool_]
) -> None:
    """Put the boxes of each tensor that is cut in the order of their offsets.

    Rows cut off the first of two boxes that lie side by side begin below the second one.
    """
    end = 0
    for place in numpy.flatnonzero(is_cut).tolist():
        if place < end:
            continue
        first, end = place, place + 1
        while first and _is_same(tensors[first - 1], tensors[place]):
            first -= 1
        while end < len(tensors) and _is_same(tensors[end], tensors[place]):
            end += 1
        if end - first > 1:
            run = table[:, begins[first] : begins[end]].reshape(2, end - first, -1)
            order = numpy.lexsort(run[0].T[::-1])
            table[:, begins[first] : begins[end]] = run[:, order].reshape(2, -1)


def _is_same(one: HeldTensor, other: HeldTensor) -> bool:
    return (one.item, one.name) == (other.item, other.name)


def _table(boxes: Sequence[BoxLike]) -> Table:
    """Return offsets and lengths of all boxes, axis after axis."""
    offsets = list(chain.from_iterable(box.offset for box in boxes))
    lengths = list(chain.from_iterable(box.shape for box in boxes))
    return numpy.array([offsets, lengths], numpy.int64)
