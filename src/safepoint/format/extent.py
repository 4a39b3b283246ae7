"""Boxes and byte ranges: how a tensor is cut, and the proof that the pieces make it whole.

A box is (offset, shape) in a tensor's global shape. Within a rank's box, chunks are ranges of rows of the first axis.

Spec: F3.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Protocol

import msgspec

from safepoint.errors import CorruptionError

CHUNK_LIMIT_BYTES = 64 << 20
MAX_AXES = 64
MAX_BYTES = 1 << 60

Shape = tuple[int, ...]


class Box(msgspec.Struct, frozen=True, gc=False):
    """Name a rectangular part of a tensor: where it begins and how large it is, per axis, in elements."""

    offset: Shape
    shape: Shape


class BoxLike(Protocol):
    """Be a box of a tensor by name."""

    @property
    def item(self) -> str: ...
    @property
    def name(self) -> str: ...
    @property
    def dtype(self) -> str: ...
    @property
    def global_shape(self) -> Shape: ...
    @property
    def offset(self) -> Shape: ...
    @property
    def shape(self) -> Shape: ...


class ChunkLike(Protocol):
    """Be a range of rows of a box that lies in a file."""

    @property
    def rows(self) -> tuple[int, int]: ...
    @property
    def offset_bytes(self) -> int: ...
    @property
    def size_bytes(self) -> int: ...


def element_count(shape: Sequence[int]) -> int:
    """Return the number of elements of a shape; 1 for a 0-dim tensor."""
    return math.prod(shape)


def split_rows(shape: Shape, element_bytes: int, *, limit_bytes: int = CHUNK_LIMIT_BYTES) -> list[tuple[int, int]]:
    """Return the half-open row ranges of a box's chunks, each of at most `limit_bytes` or of one row.

    A box without elements has no chunk.
    """
    size_bytes = element_count(shape) * element_bytes
    if size_bytes == 0:
        return []
    row_count = shape[0] if shape else 1
    if size_bytes <= limit_bytes:
        return [(0, row_count)]
    row_bytes = element_count(shape[1:]) * element_bytes
    rows = max(1, limit_bytes // row_bytes)
    return [(start, min(start + rows, row_count)) for start in range(0, row_count, rows)]


def check_shape(shape: Shape, element_bytes: int, *, where: str) -> int:
    """Return a box's size in bytes, or raise `CorruptionError` when it is beyond any limit."""
    # The number of axes first: the product of a million long axes would itself take minutes. An axis of no length does
    # not excuse the others, since the strides of such a tensor are computed all the same.
    is_bounded, size_bytes = len(shape) <= MAX_AXES, element_bytes
    for length in shape[:MAX_AXES]:
        is_bounded = is_bounded and 0 <= length <= MAX_BYTES
        size_bytes *= length or 1
    if not is_bounded or size_bytes > MAX_BYTES:
        raise CorruptionError("a tensor's shape is out of bounds", where=where, found=_shown(shape))
    return element_count(shape) * element_bytes


def check_tiling(global_shape: Shape, boxes: Sequence[Box], *, where: str) -> None:
    """Prove that boxes cover a tensor exactly: inside, without overlap, without a gap.

    Boxes without elements take part in nothing.

    Raises:
        CorruptionError: They do not; names the first box at fault.

    Spec: C5.
    """
    filled = [box for box in boxes if element_count(box.shape)]
    for box in filled:
        has_axes = len(box.offset) == len(box.shape) == len(global_shape)
        if not has_axes or any(
            start < 0 or length < 0 or start + length > whole
            for start, length, whole in zip(box.offset, box.shape, global_shape, strict=True)
        ):
            raise CorruptionError("a box lies outside its tensor", where=where, expected=global_shape, found=box)
    filled.sort(key=lambda box: box.offset)
    for index, box in enumerate(filled):
        for other in filled[index + 1 :]:
            if box.offset and other.offset[0] >= box.offset[0] + box.shape[0]:
                break
            if _overlap(box, other):
                raise CorruptionError("two boxes of a tensor overlap", where=where, found=f"{box} and {other}")
    covered, whole = sum(element_count(box.shape) for box in filled), element_count(global_shape)
    if covered != whole:
        raise CorruptionError(
            "the boxes leave a gap in a tensor", where=where, expected=f"{whole} elements", found=covered
        )


def _overlap(one: Box, other: Box) -> bool:
    return all(
        start < other_start + other_length and other_start < start + length
        for start, length, other_start, other_length in zip(
            one.offset, one.shape, other.offset, other.shape, strict=True
        )
    )


def _shown(shape: Shape) -> str:
    # Only the first axes: a shape of a million of them would make a message of many megabytes first.
    return f"{len(shape)} axes, {shape[:8]}"
