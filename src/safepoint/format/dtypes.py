"""The closed table of element types.

Names are torch's without the prefix. `safetensors` is the code in a data file's header; a type that the safetensors
layout lacks is stored as bytes (``U8``, with a last axis of the item size) and keeps its true name in the index.

Spec: F3.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Dtype:
    """Describe one element type."""

    name: str
    size_bytes: int
    safetensors: str | None


_TABLE = (
    Dtype("bool", 1, "BOOL"),
    Dtype("uint8", 1, "U8"),
    Dtype("int8", 1, "I8"),
    Dtype("int16", 2, "I16"),
    Dtype("uint16", 2, "U16"),
    Dtype("int32", 4, "I32"),
    Dtype("uint32", 4, "U32"),
    Dtype("int64", 8, "I64"),
    Dtype("uint64", 8, "U64"),
    Dtype("float16", 2, "F16"),
    Dtype("bfloat16", 2, "BF16"),
    Dtype("float32", 4, "F32"),
    Dtype("float64", 8, "F64"),
    Dtype("complex64", 8, None),
    Dtype("complex128", 16, None),
    Dtype("float8_e4m3fn", 1, "F8_E4M3"),
    Dtype("float8_e5m2", 1, "F8_E5M2"),
    Dtype("float8_e4m3fnuz", 1, None),
    Dtype("float8_e5m2fnuz", 1, None),
    Dtype("float8_e8m0fnu", 1, None),
    Dtype("float4_e2m1fn_x2", 1, None),
)

DTYPES: dict[str, Dtype] = {dtype.name: dtype for dtype in _TABLE}
