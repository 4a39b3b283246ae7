"""Blocks: the boxes of all ranks, tensor after tensor, in columns of numbers.

1. Layouts that are equal stand here once, with the ranks that have them.
2. Tensors are numbered so that those with equally many axes follow each other. A block holds all boxes of a range of
   them; it is made when it is asked for, so that the boxes of all ranks are never there twice.
3. A box is known by its key: the number of boxes in the layouts before its own, and its place in its own.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy
import numpy.typing

from safepoint.errors import CorruptionError
from safepoint.format.columns import Columns, Frame, HeldTensor, Table
from safepoint.format.dtypes import DTYPES
from safepoint.format.extent import element_count
from safepoint.format.tiling import Column

Flags = numpy.typing.NDArray[numpy.bool_]

BLOCK_BOXES = 1 << 17
_AT_ONCE = 64


@dataclass(frozen=True, slots=True)
class Block:
    """Hold all boxes of the tensors `first` to `last`, which have equally many axes; half-open.

    `tensors`, `layouts` and `keys` are by box, `offsets` and `shapes` such columns for each axis. Boxes of one layout
    and tensor are in their order in the layout.
    """

    first: int
    last: int
    axes: int
    tensors: Column
    layouts: Column
    keys: Column
    offsets: Column
    shapes: Column

    def only(self, which: numpy.typing.NDArray[numpy.generic]) -> Block:
        """Return a block of some boxes, given by flags or places, in that order."""
        return Block(
            self.first,
            self.last,
            self.axes,
            self.tensors[which],
            self.layouts[which],
            self.keys[which],
            self.offsets[:, which],
            self.shapes[:, which],
        )


@dataclass(frozen=True, slots=True)
class _Group:
    """Hold layouts with one frame, and the number of the tensor of each box; -1 for items of ranks' own.

    `table` has the numbers of all of them: offsets and lengths, by place in a layout, by layout. `places` tell where
    the axes of each box begin.
    """

    frame: Frame
    layouts: Column
    table: Table
    tensors: Column
    places: Column


class Inventory:
    """Number the tensors and boxes that ranks hold.

    Args:
        layouts: The layout of each rank.
        per_rank: Items of which each rank has its own; their boxes have keys, and are in no block.

    Raises:
        CorruptionError: Ranks hold tensors of different types or shapes under one name.
    """

    def __init__(self, layouts: Sequence[Columns], per_rank: frozenset[str]) -> None:
        by_digest: dict[str, list[int]] = {}
        for rank, layout in enumerate(layouts):
            by_digest.setdefault(layout.digest, []).append(rank)
        self.layouts = tuple(layouts[ranks[0]] for ranks in by_digest.values())
        self.ranks = tuple(map(tuple, by_digest.values()))
        self.layout_of = numpy.empty(len(layouts), numpy.int64)
        for number, ranks in enumerate(self.ranks):
            self.layout_of[list(ranks)] = number
        ends = numpy.cumsum([len(layout.frame.tensors) for layout in self.layouts])
        self.bases: Column = numpy.concatenate([[0], ends]).astype(numpy.int64)
        self._groups: list[_Group] = []
        self._own: dict[str, Sequence[int]] = {}
        self.tensors = self._number(per_rank)
        self.element_bytes: Column = numpy.array([DTYPES[one.dtype].size_bytes for one in self.tensors], numpy.int64)
        self.is_empty: Flags = numpy.array([not element_count(one.global_shape) for one in self.tensors], numpy.bool_)

    def own_boxes(self, layout: int) -> Sequence[int]:
        """Return the places in a layout of the boxes of ranks' own items."""
        return self._own[self.layouts[layout].frame.digest]

    def tensors_of(self, keys: Column) -> Column:
        """Return the tensor of each of some boxes."""
        return self._of_boxes([group.tensors for group in self._groups], keys)

    def are_leaders(self, keys: Column) -> Flags:
        """Return whether each of some boxes is the leader's."""
        flags = [numpy.array([tensor.is_leaders for tensor in group.frame.tensors]) for group in self._groups]
        return self._of_boxes(flags, keys).astype(numpy.bool_)

    def blocks(self) -> Iterator[Block]:
        """Yield all boxes but those of ranks' own items."""
        counts = numpy.zeros(len(self.tensors), numpy.int64)
        for group in self._groups:
            numpy.add.at(counts, group.tensors[group.tensors >= 0], len(group.layouts))
        axes = [len(tensor.global_shape) for tensor in self.tensors]
        first, total = 0, 0
        for number, count in enumerate(counts.tolist()):
            if number > first and (axes[number] != axes[first] or total + count > BLOCK_BOXES):
                yield self._block(first, number, axes[first])
                first, total = number, 0
            total += count
        if self.tensors:
            yield self._block(first, len(self.tensors), axes[first])

    def _number(self, per_rank: frozenset[str]) -> tuple[HeldTensor, ...]:
        """Group the layouts, and return all tensors in the order of their numbers."""
        by_frame: dict[str, list[int]] = {}
        for layout, columns in enumerate(self.layouts):
            by_frame.setdefault(columns.frame.digest, []).append(layout)
        found: dict[tuple[str, str], tuple[HeldTensor, int]] = {}
        for members in by_frame.values():
            rank = self.ranks[members[0]][0]
            for tensor in self.layouts[members[0]].frame.tensors:
                if tensor.item not in per_rank:
                    first, holder = found.setdefault((tensor.item, tensor.name), (tensor, rank))
                    _check_alike(tensor, first, rank, holder)
        ordered = sorted((tensor for tensor, _ in found.values()), key=lambda tensor: len(tensor.global_shape))
        numbers = {(tensor.item, tensor.name): number for number, tensor in enumerate(ordered)}
        for members in by_frame.values():
            frame = self.layouts[members[0]].frame
            tensors = numpy.array([numbers.get((one.item, one.name), -1) for one in frame.tensors], numpy.int64)
            lengths = numpy.array([len(one.global_shape) for one in frame.tensors], numpy.int64)
            places = numpy.array(frame.ends, numpy.int64) - lengths
            own = [number for number, tensor in enumerate(frame.tensors) if tensor.item in per_rank]
            self._own[frame.digest] = own
            table = _joined([self.layouts[member].table for member in members])
            self._groups.append(_Group(frame, numpy.array(members, numpy.int64), table, tensors, places))
        return tuple(ordered)

    def _of_boxes(self, by_group: Sequence[Flags | Column], keys: Column) -> Column:
        """Return what is known of boxes by their places in the frames of their layouts."""
        if not len(keys):
            return numpy.zeros(0, numpy.int64)
        layouts = numpy.searchsorted(self.bases, keys, "right") - 1
        begins = numpy.cumsum([0, *(len(one) for one in by_group)])
        group_of = numpy.empty(len(self.layouts), numpy.int64)
        for number, group in enumerate(self._groups):
            group_of[group.layouts] = number
        found: Column = numpy.concatenate(by_group)[begins[group_of[layouts]] + keys - self.bases[layouts]]
        return found

    def _block(self, first: int, last: int, axes: int) -> Block:
        parts = [self._of_group(group, first, last, axes) for group in self._groups]
        tensors, layouts, keys, offsets, shapes = (
            column[0] if len(column) == 1 else numpy.concatenate(column, axis=-1) for column in zip(*parts, strict=True)
        )
        return Block(first, last, axes, tensors, layouts, keys, offsets, shapes)

    def _of_group(self, group: _Group, first: int, last: int, axes: int) -> tuple[Column, ...]:
        numbers = numpy.flatnonzero((group.tensors >= first) & (group.tensors < last))
        numbers = numbers[numpy.argsort(group.tensors[numbers], kind="stable")]
        places = group.places[numbers] + numpy.arange(axes)[:, None]
        # By axis, then by tensor, as they will be sorted.
        box_count = len(numbers) * len(group.layouts)
        offsets, shapes = (rows[places].astype(numpy.int64).reshape(axes, box_count) for rows in group.table)
        tensors = numpy.repeat(group.tensors[numbers], len(group.layouts))
        layouts = numpy.tile(group.layouts, len(numbers))
        keys = self.bases[layouts] + numpy.repeat(numbers, len(group.layouts))
        return tensors, layouts, keys, offsets, shapes


def _joined(tables: Sequence[Table]) -> Table:
    """Return the tables of layouts as one, its last axis the layouts; some at a time, as they then fit into a cache."""
    dtype = numpy.result_type(*{table.dtype for table in tables})
    joined = numpy.empty((*tables[0].shape, len(tables)), dtype)
    for begin in range(0, len(tables), _AT_ONCE):
        joined[:, :, begin : begin + _AT_ONCE] = numpy.stack(tables[begin : begin + _AT_ONCE], axis=-1)
    return joined


def _check_alike(tensor: HeldTensor, first: HeldTensor, rank: int, holder: int) -> None:
    found, expected = ((one.dtype, one.global_shape) for one in (tensor, first))
    if found != expected:
        raise CorruptionError(
            "ranks hold different tensors under one name",
            where=f"{tensor.item}/{tensor.name}",
            expected=f"{expected[0]} of shape {expected[1]}, as on rank {holder}",
            found=f"{found[0]} of shape {found[1]} on rank {rank}",
        )
    if tensor.is_leaders != first.is_leaders:
        leaders, other = (rank, holder) if tensor.is_leaders else (holder, rank)
        raise CorruptionError(
            "ranks do not agree whether a buffer is the leader's, as one that a data-parallel wrapper hands out is",
            where=f"{tensor.item}/{tensor.name}",
            expected=f"the leader's, as on rank {leaders}",
            found=f"each rank's on rank {other}",
        )
