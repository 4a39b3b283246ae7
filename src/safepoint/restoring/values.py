"""How far apart the values of two tensors are, computed from their bytes. numpy is imported when it is first needed.

1. Elements are compared by their bits first: zeros of two signs differ, equal NaNs do not.
2. Floating-point values are widened to float64 before they are subtracted; integers are subtracted exactly.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import numpy
    import numpy.typing

    Floats = numpy.typing.NDArray[numpy.float64]
    Integers = numpy.typing.NDArray[numpy.uint64]

_FLOATS = {"float16": "<f2", "float32": "<f4", "float64": "<f8"}
_COMPLEX = {"complex64": "<c8", "complex128": "<c16"}
_INTEGERS = {
    "bool": "u1",
    "uint8": "u1",
    "int8": "i1",
    "int16": "<i2",
    "uint16": "<u2",
    "int32": "<i4",
    "uint32": "<u4",
    "int64": "<i8",
    "uint64": "<u8",
}
# Bits of exponent and mantissa, bias, and where infinities and NaNs are.
_FLOAT8 = {
    "float8_e4m3fn": (4, 3, 7, "fn"),
    "float8_e5m2": (5, 2, 15, "ieee"),
    "float8_e4m3fnuz": (4, 3, 8, "fnuz"),
    "float8_e5m2fnuz": (5, 2, 16, "fnuz"),
}
_FLOAT4 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
_STRUCT = {
    "bool": "?",
    "uint8": "B",
    "int8": "b",
    "int16": "h",
    "uint16": "H",
    "int32": "i",
    "uint32": "I",
    "int64": "q",
    "uint64": "Q",
    "float16": "e",
    "float32": "f",
    "float64": "d",
}


@dataclass(frozen=True, slots=True)
class Distance:
    """Say in how many elements two tensors differ, and by how much at most.

    `greatest` is the greatest absolute difference, an int for integers; None when no two finite values differ.
    `not_finite` counts differing elements of which one is NaN or infinite.
    """

    differing: int = 0
    greatest: float | int | None = None
    not_finite: int = 0

    def joined(self, other: Distance) -> Distance:
        """Return the distance over two parts of a tensor."""
        known = [value for value in (self.greatest, other.greatest) if value is not None]
        return Distance(
            self.differing + other.differing, max(known) if known else None, self.not_finite + other.not_finite
        )


def measure(dtype: str, size_bytes: int, one: memoryview, other: memoryview) -> Distance:
    """Return the distance between two runs of elements of one type.

    Args:
        dtype: The true type, by torch's name.
        size_bytes: The size of one element.
        one: The elements, dense and little-endian.
        other: As many elements.
    """
    if one == other:
        return Distance()
    import numpy

    words = [numpy.frombuffer(side, dtype=numpy.uint8).reshape(-1, size_bytes) for side in (one, other)]
    differs = (words[0] != words[1]).any(axis=1)
    first, second = (side[differs].reshape(-1) for side in words)
    count = int(differs.sum())
    if dtype in _INTEGERS:
        return Distance(count, _greatest_of_integers(dtype, first, second))
    # Casting a signalling NaN and subtracting the greatest numbers are no errors here.
    with numpy.errstate(over="ignore", invalid="ignore"):
        wide = [_widened(dtype, side) for side in (first, second)]
        is_finite = numpy.isfinite(wide[0]) & numpy.isfinite(wide[1])
        pairs = [side[is_finite] for side in wide]
        gaps = numpy.abs(pairs[0] - pairs[1])
    greatest = float(gaps.max()) if gaps.size else None
    return Distance(count, greatest, count - int(is_finite.reshape(count, -1).all(axis=1).sum()))


def scalar_text(dtype: str, data: bytes) -> str:
    """Return a 0-dim tensor's value for people."""
    if dtype in _STRUCT and len(data) == struct.calcsize(_STRUCT[dtype]):
        return repr(struct.unpack("<" + _STRUCT[dtype], data)[0])
    if dtype == "bfloat16" and len(data) == 2:
        return repr(struct.unpack("<f", b"\0\0" + data)[0])
    return data.hex()


def _greatest_of_integers(
    dtype: str, first: numpy.typing.NDArray[numpy.uint8], second: numpy.typing.NDArray[numpy.uint8]
) -> int:
    import numpy

    one, other = first.view(_INTEGERS[dtype]), second.view(_INTEGERS[dtype])
    is_larger = one > other
    kind = numpy.uint64 if one.dtype.kind == "u" else numpy.int64
    wide: list[Integers] = [side.astype(kind).view(numpy.uint64) for side in (one, other)]
    # The difference of two 64-bit numbers fits into 64 bits without a sign, and wraps around to it.
    gaps = numpy.where(is_larger, wide[0] - wide[1], wide[1] - wide[0])
    return int(gaps.max())


def _widened(dtype: str, data: numpy.typing.NDArray[numpy.uint8]) -> Floats | numpy.typing.NDArray[numpy.complex128]:
    import numpy

    if dtype in _FLOATS:
        return data.view(_FLOATS[dtype]).astype(numpy.float64)
    if dtype in _COMPLEX:
        return data.view(_COMPLEX[dtype]).astype(numpy.complex128)
    if dtype == "bfloat16":
        bits = data.view("<u2").astype(numpy.uint32) << numpy.uint32(16)
        return bits.view(numpy.float32).astype(numpy.float64)
    if dtype == "float4_e2m1fn_x2":
        table = numpy.array([*_FLOAT4, *(-value for value in _FLOAT4)])
        return numpy.stack([table[data & 15], table[data >> 4]], axis=1)
    return numpy.array([_float8(dtype, byte) for byte in range(256)])[data]


def _float8(dtype: str, byte: int) -> float:
    if dtype == "float8_e8m0fnu":
        return float("nan") if byte == 255 else 2.0 ** (byte - 127)
    exponent_bits, mantissa_bits, bias, kind = _FLOAT8[dtype]
    sign = -1.0 if byte & 128 else 1.0
    exponent = (byte >> mantissa_bits) & ((1 << exponent_bits) - 1)
    mantissa = byte & ((1 << mantissa_bits) - 1)
    if kind == "fnuz" and byte == 128:
        return float("nan")
    if kind == "fn" and byte & 127 == 127:
        return float("nan")
    if kind == "ieee" and exponent == (1 << exponent_bits) - 1:
        return float("nan") if mantissa else sign * float("inf")
    fraction = mantissa / (1 << mantissa_bits)
    if exponent == 0:
        return float(sign * fraction * 2.0 ** (1 - bias))
    return float(sign * (1 + fraction) * 2.0 ** (exponent - bias))
