"""Where two plain trees differ, with paths, for people to read."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import msgspec

from safepoint.format.plain import ScalarLeaf, Shared, TensorLeaf, ViewLeaf
from safepoint.restoring.values import scalar_text

_LONGEST_TEXT = 120
_SHOWN_BYTES = 8


@dataclass(frozen=True, slots=True)
class LeafDifference:
    """Name one place at which two trees differ, and what stands there on either side."""

    path: str
    first: str
    second: str


def differing_values(first: object, second: object, path: str = "") -> Iterator[LeafDifference]:
    """Yield each place at which two decoded plain trees differ, by type or by value, in the first's order.

    Floats are compared as they are written: NaN is the same as NaN, and zeros of two signs differ.
    """
    first, second = _bare(first), _bare(second)
    if type(first) is not type(second):
        yield LeafDifference(path, _text(first), _text(second))
    elif isinstance(first, dict) and isinstance(second, dict):
        yield from _differing_entries(first, second, path)
    elif isinstance(first, list | tuple) and isinstance(second, list | tuple):
        for number, (one, other) in enumerate(zip(first, second, strict=False)):
            yield from differing_values(one, other, f"{path}[{number}]")
        if len(first) != len(second):
            yield LeafDifference(path, f"{len(first)} elements", f"{len(second)} elements")
    elif isinstance(first, bytes) and isinstance(second, bytes) and first != second:
        pairs = enumerate(zip(first, second, strict=False))
        start = next((number for number, (one, other) in pairs if one != other), min(len(first), len(second)))
        yield LeafDifference(path, _bytes_text(first, start), _bytes_text(second, start))
    elif not _is_same_leaf(first, second):
        yield LeafDifference(path, _text(first), _text(second))


def _differing_entries(
    first: dict[object, object], second: dict[object, object], path: str
) -> Iterator[LeafDifference]:
    for key in [*first, *(key for key in second if key not in first)]:
        place = (f"{path}.{key}" if path else key) if isinstance(key, str) else f"{path}[{_text(key)}]"
        if key not in second:
            yield LeafDifference(place, _text(_bare(first[key])), "absent")
        elif key not in first:
            yield LeafDifference(place, "absent", _text(_bare(second[key])))
        else:
            yield from differing_values(first[key], second[key], place)
    if first.keys() == second.keys() and list(first) != list(second):
        yield LeafDifference(
            path, f"keys in the order {_text(list(first))}", f"keys in the order {_text(list(second))}"
        )


def _bare(value: object) -> object:
    """Return a value without the marks that belong to its storing: that others refer to it, and where it lay."""
    if isinstance(value, Shared):
        return _bare(value.value)
    if isinstance(value, TensorLeaf | ScalarLeaf | ViewLeaf):
        return msgspec.structs.replace(value, device="")
    return value


def _is_same_leaf(first: object, second: object) -> bool:
    # The text of a float tells NaNs and zeros of two signs apart as their bits do; sets have no order of their own.
    if isinstance(first, set | frozenset | msgspec.Struct):
        return first == second
    return repr(first) == repr(second)


def _bytes_text(value: bytes, start: int) -> str:
    return f"{len(value)} bytes, from byte {start} {value[start : start + _SHOWN_BYTES].hex() or 'none'}"


def _text(value: object) -> str:
    if isinstance(value, ScalarLeaf):
        text = f"{scalar_text(value.dtype, value.data)} ({value.dtype})"
    elif isinstance(value, TensorLeaf):
        text = f"the {value.container} {value.name!r}"
    elif isinstance(value, dict):
        text = f"a mapping of {len(value)} entries"
    else:
        text = repr(value)
    return text if len(text) <= _LONGEST_TEXT else text[: _LONGEST_TEXT - 1] + "…"
