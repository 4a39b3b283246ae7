"""Layouts: which boxes of which tensors a rank holds, without any content.

A layout is exchanged by its digest, and in full only where the other side does not know it.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from dataclasses import dataclass

import msgspec

from safepoint.errors import AbortedError
from safepoint.format.digest import digest_bytes
from safepoint.format.dtypes import DTYPES
from safepoint.format.extent import Shape, element_count
from safepoint.state.item import CapturedTensor
from safepoint.state.snapshot import SnapshotItem

LAYOUT_LIMIT_BYTES = 1 << 30


class LayoutBox(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
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
        return self.row_count * self.row_bytes

    @property
    def is_part(self) -> bool:
        """Return whether the box is less than its tensor."""
        return self.shape != self.global_shape


@dataclass(frozen=True, slots=True)
class Layout:
    """Hold the boxes of one rank, sorted by item, name and offset, and their digest."""

    boxes: tuple[LayoutBox, ...]
    digest: str


def layout_of(items: Sequence[SnapshotItem]) -> tuple[Layout, tuple[CapturedTensor, ...]]:
    """Return the layout of a snapshot, and its tensors in the same order."""
    pairs = []
    for item in items:
        for tensor in item.tensors:
            spec = tensor.spec
            box = LayoutBox(
                item.name, spec.name, spec.dtype, spec.global_shape, spec.offset, spec.shape, tensor.is_leaders
            )
            pairs.append((box, tensor))
    pairs.sort(key=lambda pair: (pair[0].item, pair[0].name, pair[0].offset))
    boxes = tuple(box for box, _ in pairs)
    return Layout(boxes, digest_bytes(msgspec.msgpack.encode(boxes))), tuple(tensor for _, tensor in pairs)


def encode_layout(layout: Layout) -> bytes:
    """Return a layout as bytes to be sent to the leader."""
    return zlib.compress(msgspec.msgpack.encode(layout.boxes), 1)


def decode_layout(message: bytes, *, digest: str, where: str) -> Layout:
    """Return the layout that `encode_layout` was given, if it is the one of this digest.

    Raises:
        AbortedError: It is not.
    """
    try:
        inflated = zlib.decompressobj().decompress(message, LAYOUT_LIMIT_BYTES)
        boxes = msgspec.msgpack.decode(inflated, type=tuple[LayoutBox, ...])
    except (zlib.error, msgspec.DecodeError) as exc:
        raise AbortedError("a layout cannot be decoded", where=where, found=str(exc)) from exc
    found = digest_bytes(inflated)
    if found != digest:
        raise AbortedError("a layout is not the one that was announced", where=where, expected=digest, found=found)
    return Layout(boxes, found)
