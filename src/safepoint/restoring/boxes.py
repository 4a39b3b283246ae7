"""Boxes of one tensor against each other: what they have in common, and how its bytes get from one into the other.

A box's bytes are dense and in C order. Nothing here reads a file. numpy is imported when it is first needed.

Spec: F3.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate

import msgspec

from safepoint.errors import CorruptionError
from safepoint.format.dtypes import DTYPES
from safepoint.format.extent import Box, check_tiling
from safepoint.format.index import Chunk, Index, Tensor
from safepoint.format.manifest import Manifest
from safepoint.format.names import generation_path

# So few boxes are compared with each other, and numpy is not needed.
_FEW = 16
_WORDS = {1: "u1", 2: "<u2", 4: "<u4", 8: "<u8", 16: "<c16"}


@dataclass(frozen=True, slots=True)
class TensorKey:
    """Name a stored tensor: `rank` is whose it is where each rank has its own, else None."""

    item: str
    name: str
    rank: int | None = None

    def __str__(self) -> str:
        owner = "" if self.rank is None else f" of rank {self.rank}"
        return f"{self.item}/{self.name}{owner}"


class StoredBox(msgspec.Struct, frozen=True, gc=False):
    """Hold one stored box of a tensor, the paths that its chunks are numbered by, and the rank whose index names it."""

    tensor: Tensor
    paths: tuple[str, ...]
    rank: int = 0

    @property
    def box(self) -> Box:
        """Return where the box lies in its tensor."""
        return Box(self.tensor.offset, self.tensor.shape)

    def box_of(self, chunk: Chunk) -> Box:
        """Return where one chunk lies in the tensor."""
        offset, shape = self.tensor.offset, self.tensor.shape
        if not shape:
            return self.box
        start, stop = chunk.rows
        return Box((offset[0] + start, *offset[1:]), (stop - start, *shape[1:]))


def boxes_by_tensor(manifest: Manifest, indexes: Iterable[Index]) -> dict[TensorKey, tuple[StoredBox, ...]]:
    """Return the boxes that all ranks stored of each tensor, in the order of ranks.

    Raises:
        CorruptionError: A tensor belongs to an item that the manifest does not name.
    """
    found: dict[TensorKey, list[StoredBox]] = {}
    for index in indexes:
        paths = tuple(generation_path(entry.generation, entry.name) for entry in index.objects)
        for tensor in index.tensors:
            summary = manifest.items.get(tensor.item)
            if summary is None:
                where = f"{manifest.generation}: {tensor.item}/{tensor.name}"
                raise CorruptionError("a stored tensor belongs to no item of the manifest", where=where)
            key = TensorKey(tensor.item, tensor.name, index.rank if summary.kind == "per_rank" else None)
            found.setdefault(key, []).append(StoredBox(tensor, paths, index.rank))
    return {key: tuple(boxes) for key, boxes in found.items()}


def check_boxes(boxes: Sequence[StoredBox], *, where: str) -> None:
    """Raise `CorruptionError` unless boxes are of one tensor and make it whole, without overlap or gap.

    Spec: C5.
    """
    first = boxes[0].tensor
    for other in boxes[1:]:
        if (other.tensor.dtype, other.tensor.global_shape) != (first.dtype, first.global_shape):
            raise CorruptionError(
                "the boxes of a tensor contradict each other",
                where=where,
                expected=f"{first.dtype} {list(first.global_shape)}",
                found=f"{other.tensor.dtype} {list(other.tensor.global_shape)}",
            )
    if len(boxes) < _FEW:
        check_tiling(first.global_shape, [one.box for one in boxes], where=where)
        return
    import numpy

    from safepoint.format.tiling import check_tilings

    offsets, shapes = (
        numpy.array(column, numpy.int64).reshape(len(boxes), len(first.global_shape)).T
        for column in zip(*((one.tensor.offset, one.tensor.shape) for one in boxes), strict=True)
    )
    check_tilings([(where, first.global_shape)], numpy.zeros(len(boxes), numpy.int64), offsets, shapes)


def element_bytes_of(tensor: Tensor) -> int:
    """Return the size of one element."""
    return DTYPES[tensor.dtype].size_bytes


def overlap(one: Box, other: Box) -> Box | None:
    """Return what two boxes of one tensor have in common; None for nothing."""
    offset, shape = [], []
    for start, length, other_start, other_length in zip(one.offset, one.shape, other.offset, other.shape, strict=True):
        begin = max(start, other_start)
        end = min(start + length, other_start + other_length)
        if end <= begin:
            return None
        offset.append(begin)
        shape.append(end - begin)
    return Box(tuple(offset), tuple(shape))


def run_in(inner: Box, outer: Box) -> int | None:
    """Return where a box's elements begin in those of a box around it; None where they lie there in pieces.

    Args:
        inner: A box with elements.
        outer: A box that holds all of it.
    """
    has_begun = False
    for length, whole in zip(inner.shape, outer.shape, strict=True):
        # Before the first axis that is longer than 1 there is nothing to skip; behind it every axis has to be whole.
        if has_begun and length != whole:
            return None
        has_begun = has_begun or length > 1
    return sum(start * step for start, step in zip(_within(inner, outer), _steps(outer.shape), strict=True))


def copy_overlap(source: memoryview, source_box: Box, target: memoryview, target_box: Box, element_bytes: int) -> None:
    """Copy the bytes that two boxes of one tensor have in common.

    Args:
        source: All bytes of `source_box`.
        target: All bytes of `target_box`; what lies outside of `source_box` stays as it is.
    """
    common = overlap(source_box, target_box)
    if common is None:
        return
    import numpy

    strides = [_steps(box.shape) for box in (source_box, target_box)]
    axes = _merged(list(zip(common.shape, *strides, strict=True)))
    shape = [length for length, _, _ in axes]
    views = []
    for side, (memory, box) in enumerate(((source, source_box), (target, target_box))):
        begin = sum(start * step for start, step in zip(_within(common, box), strides[side], strict=True))
        views.append(
            numpy.ndarray(
                shape,
                dtype=_WORDS[element_bytes],
                buffer=memory,
                offset=begin * element_bytes,
                strides=[axis[1 + side] * element_bytes for axis in axes],
            )
        )
    views[1][...] = views[0]


def _within(inner: Box, outer: Box) -> list[int]:
    return [start - begin for start, begin in zip(inner.offset, outer.offset, strict=True)]


def _steps(shape: Sequence[int]) -> list[int]:
    """Return how many elements apart neighbours along each axis are."""
    return list(accumulate([1, *reversed(shape[1:])], lambda step, length: step * length))[::-1] if shape else []


def _merged(axes: list[tuple[int, int, int]]) -> list[tuple[int, int, int]]:
    """Return (length, step, step) with fewer axes: those of length 1 go, and those that follow each other join.

    Arrays have a limited number of axes, and one long inner loop is faster than many short ones.
    """
    merged: list[tuple[int, int, int]] = []
    for length, step, other in axes:
        if length == 1:
            continue
        if merged and merged[-1][1:] == (length * step, length * other):
            merged[-1] = (merged[-1][0] * length, step, other)
        else:
            merged.append((length, step, other))
    return merged
