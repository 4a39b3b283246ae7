"""Boxes in columns: what names them, and two rows of numbers, the offsets of all boxes and their lengths.

What names the boxes of one rank, ranks that hold parts of the same tensors have in common; it is decoded once for all.
"""

from __future__ import annotations

import zlib
from dataclasses import dataclass
from itertools import accumulate

import msgspec
import numpy
import numpy.typing

from safepoint.errors import AbortedError
from safepoint.format.digest import digest_bytes
from safepoint.format.extent import Shape

COLUMNS_LIMIT_BYTES = 1 << 30

WIDE = "<i8"
_NARROW_LIMIT = 1 << 31

Table = numpy.typing.NDArray[numpy.integer]


class HeldTensor(msgspec.Struct, frozen=True, gc=False, array_like=True, forbid_unknown_fields=True):
    """Name the tensor of a box."""

    item: str
    name: str
    dtype: str
    global_shape: Shape
    is_leaders: bool = False


@dataclass(frozen=True, slots=True)
class Frame:
    """Hold of each box of a layout its tensor, and the digest of all: what layouts of different ranks may share.

    `ends` are the places in the table of numbers at which the axes of each box end.
    """

    tensors: tuple[HeldTensor, ...]
    ends: tuple[int, ...]
    digest: str

    @classmethod
    def of(cls, tensors: tuple[HeldTensor, ...], digest: str) -> Frame:
        """Return the frame of these tensors."""
        return cls(tensors, tuple(accumulate(len(tensor.global_shape) for tensor in tensors)), digest)


@dataclass(frozen=True, slots=True)
class Columns:
    """Hold a layout in columns: two rows of numbers, the offsets of all boxes and their lengths, axis after axis."""

    frame: Frame
    table: Table
    digest: str


def columns_from(frame: Frame, table: Table) -> Columns:
    """Return columns of a frame and a table of numbers, which is kept as narrow as it can be."""
    return Columns(frame, narrowed(table), table_digest(frame.digest, table))


def narrowed(table: Table) -> Table:
    """Return numbers in half as many bytes where they fit."""
    is_narrow = not table.size or (table.min() >= 0 and table.max() < _NARROW_LIMIT)
    return table.astype(numpy.int32 if is_narrow else numpy.int64)


def table_digest(frame_digest: str, table: Table) -> str:
    """Return the digest of columns."""
    return digest_bytes(frame_digest.encode("ascii") + table.astype(WIDE, copy=False).tobytes())


def encode_columns(columns: Columns) -> bytes:
    """Return columns as bytes to be sent to another rank."""
    names = zlib.compress(msgspec.msgpack.encode(columns.frame.tensors), 1)
    return msgspec.msgpack.encode((names, zlib.compress(columns.table.astype(WIDE, copy=False).tobytes(), 1)))


class ColumnsReader:
    """Decode columns, and what names their boxes only once for all ranks that name them alike."""

    def __init__(self) -> None:
        self._frames: dict[str, Frame] = {}

    def decode(self, message: bytes, *, digest: str, where: str) -> Columns:
        """Return the layout that `encode_columns` was given, if it is the one of this digest.

        Raises:
            AbortedError: It is not.
        """
        try:
            names, numbers = msgspec.msgpack.decode(message, type=tuple[bytes, bytes])
            frame = self._frame(names)
            inflated = zlib.decompressobj().decompress(numbers, COLUMNS_LIMIT_BYTES)
        except (zlib.error, msgspec.DecodeError) as exc:
            raise AbortedError("a layout cannot be decoded", where=where, found=str(exc)) from exc
        axis_count = frame.ends[-1] if frame.ends else 0
        if len(inflated) != 2 * axis_count * numpy.dtype(WIDE).itemsize:
            raise AbortedError("a layout has other numbers than its tensors have axes", where=where, found=axis_count)
        columns = columns_from(frame, numpy.frombuffer(inflated, WIDE).reshape(2, axis_count))
        if columns.digest != digest:
            raise AbortedError(
                "a layout is not the one that was announced", where=where, expected=digest, found=columns.digest
            )
        return columns

    def _frame(self, names: bytes) -> Frame:
        key = digest_bytes(names)
        if key not in self._frames:
            inflated = zlib.decompressobj().decompress(names, COLUMNS_LIMIT_BYTES)
            tensors = msgspec.msgpack.decode(inflated, type=tuple[HeldTensor, ...])
            self._frames[key] = Frame.of(tensors, digest_bytes(inflated))
        return self._frames[key]
