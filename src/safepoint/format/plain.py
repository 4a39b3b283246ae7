"""Plain values: the closed set of Python types that a checkpoint stores, and their form as JSON.

A value is a tree of the builtin types below and of the leaves defined here. Anything else is refused, by its path. The
JSON form is exact: what is decoded has the same types, the same order of keys, the same bits, the same aliasing.

JSON scalars stand for themselves: null, true, false, integers of at most 63 bits, strings of valid Unicode. An array is
a list. An object is a dict whose keys are all strings that do not begin with ``$``. Every other value is an object with
one key, its tag::

    $float "0x1.8p+0"    $int "-0x1f…"      $str hex of UTF-8 with surrogates     $bytes base64
    $complex [re, im]    $tuple [...]       $set [...]    $frozenset [...]        $dict [[key, value], ...]
    $ordered [[key, value], ...]            $date / $datetime / $time ISO 8601    $timedelta [days, s, µs]
    $datetime / $time [ISO 8601, 1] where an hour comes twice and the second is meant (fold)
    $path [flavour, text]                   $size [...]   $dtype name             $numpy [dtype, hex]
    $tensor [name, container, device, requires_grad]      $scalar [dtype, hex, container, device, requires_grad]
    $view [name, offset, shape, stride, container, device, requires_grad]
    $shared [number, value]                 $same number

Not kept: sign and payload of a NaN, the name of a fixed time zone.

Spec: F4.
"""

from __future__ import annotations

import base64
import datetime
import math
import pathlib
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

from msgspec.structs import astuple

from safepoint.errors import RequestError
from safepoint.format.leaves import (
    DtypeLeaf,
    NumpyScalarLeaf,
    Open,
    OpenScalar,
    Same,
    ScalarLeaf,
    Shared,
    SizeLeaf,
    TensorLeaf,
    ViewLeaf,
)
from safepoint.format.plain_decoding import INT_LIMIT, INT_LIMIT_BITS, MAX_DEPTH, decode_plain, is_plain_object

__all__ = [
    "DtypeLeaf",
    "MAX_DEPTH",
    "NumpyScalarLeaf",
    "OpenPlace",
    "Path",
    "Plain",
    "Same",
    "ScalarLeaf",
    "Shared",
    "SizeLeaf",
    "TensorLeaf",
    "ViewLeaf",
    "decode_plain",
    "encode_plain",
]

# So many elements are looked at as one.
_MANY = 8
# Values that stand for themselves, whatever they are.
_BARE: frozenset[type] = frozenset({type(None), bool})

# A plain value is typed as object: the set is closed by the code below, not by the type checker.
Plain = object
# Where a value stands: a text, or the place of what holds it and its key there. Only messages show it.
Path = str | tuple[Any, object]


class OpenPlace:
    """Stand in a JSON form for an `Open` leaf; `path` is where."""

    __slots__ = ("number", "path")

    def __init__(self, number: int, path: Path) -> None:
        self.number, self.path = number, path


def encode_plain(value: object, *, path: Path = "") -> Any:
    """Return the JSON form of a plain value.

    Args:
        value: A tree of plain types and leaves.
        path: Where the value stands in the state, for messages.

    Raises:
        RequestError: A value is outside the closed set, or nests deeper than `MAX_DEPTH`; names its path and type.

    Spec: F4.
    """
    return _ENCODERS.get(type(value), _refuse)(value, path, 0)


def _refuse(value: Any, path: Path, depth: int) -> Any:
    raise RequestError(
        "a value of the state cannot be stored",
        where=_shown(path) or "the state",
        expected="None, bool, int, float, complex, str, bytes, list, tuple, dict, OrderedDict, set, frozenset, "
        "datetime, a path, a tensor, a numpy scalar or array, torch.Size or torch.dtype",
        found=f"{type(value).__module__}.{type(value).__qualname__}",
        remedy="Store plain values that rebuild it, for example in the object's state_dict().",
    )


def _below(path: Path, depth: int) -> int:
    """Return the depth of what a value holds."""
    if depth == MAX_DEPTH:
        raise RequestError(
            "the state nests too deeply to be stored",
            where=_shown(path),
            expected=f"at most {MAX_DEPTH} levels",
            found="more",
        )
    return depth + 1


def _encode_int(value: Any, path: Path, depth: int) -> Any:
    if -INT_LIMIT <= value < INT_LIMIT:
        return value
    if value.bit_length() > INT_LIMIT_BITS:
        raise RequestError(
            "an integer of the state is too long to be stored",
            where=_shown(path),
            expected=f"at most {INT_LIMIT_BITS} bits",
            found=f"{value.bit_length()} bits",
        )
    return {"$int": hex(value)}


def _encode_str(value: Any, path: Path, depth: int) -> Any:
    if value.isascii():
        return value
    try:
        value.encode("utf-8")
    except UnicodeEncodeError:
        return {"$str": value.encode("utf-8", "surrogatepass").hex()}
    return value


def _float_text(value: float) -> str:
    if math.isnan(value):
        # float.hex() drops sign and payload of a NaN: no calculation in Python depends on them.
        return "nan"
    return value.hex()


def _encode_items(value: Any, path: Path, depth: int) -> list[Any]:
    below = _below(path, depth) if value else depth
    return [_ENCODERS.get(type(element), _refuse)(element, (path, index), below) for index, element in enumerate(value)]


def _encode_pairs(value: Any, path: Path, depth: int) -> list[Any]:
    below = _below(path, depth) if value else depth
    return [
        [
            _ENCODERS.get(type(key), _refuse)(key, (path, _KEY), below),
            _ENCODERS.get(type(element), _refuse)(element, (path, key), below),
        ]
        for key, element in value.items()
    ]


def _encode_dict(value: Any, path: Path, depth: int) -> Any:
    if not is_plain_object(value):
        return {"$dict": _encode_pairs(value, path, depth)}
    below = _below(path, depth) if value else depth
    if len(value) >= _MANY and set(map(type, value.values())) == {TensorLeaf}:
        # A call for each leaf takes longer than all else that is done with it.
        return {
            key: {"$tensor": form} for key, form in zip(value, map(list, map(astuple, value.values())), strict=True)
        }
    return {
        key: element if type(element) in _BARE else _ENCODERS.get(type(element), _refuse)(element, (path, key), below)
        for key, element in value.items()
    }


def _encode_set(value: Any, path: Path, depth: int) -> list[Any]:
    # Sorted by their own text, so that equal sets have equal bytes whatever the hash seed of the process.
    return sorted(_encode_items(value, path, depth), key=repr)


def _encode_shared(value: Any, path: Path, depth: int) -> Any:
    below = _below(path, depth)
    return {"$shared": [value.number, _ENCODERS.get(type(value.value), _refuse)(value.value, path, below)]}


# Stands in a path for whatever a dict's key is.
_KEY = object()


def _shown(path: Path) -> str:
    """Return a path as messages show it."""
    if isinstance(path, str):
        return path
    above, key = path
    whole = _shown(above)
    if key is _KEY:
        return f"{whole} (a key)"
    return f"{whole}.{key}" if isinstance(key, str) and whole else f"{whole}[{key!r}]" if whole else str(key)


_ENCODERS: dict[type, Callable[[Any, Path, int], Any]] = {
    type(None): lambda v, p, d: v,
    bool: lambda v, p, d: v,
    int: _encode_int,
    str: _encode_str,
    float: lambda v, p, d: {"$float": _float_text(v)},
    complex: lambda v, p, d: {"$complex": [_float_text(v.real), _float_text(v.imag)]},
    bytes: lambda v, p, d: {"$bytes": base64.b64encode(v).decode("ascii")},
    list: _encode_items,
    tuple: lambda v, p, d: {"$tuple": _encode_items(v, p, d)},
    set: lambda v, p, d: {"$set": _encode_set(v, p, d)},
    frozenset: lambda v, p, d: {"$frozenset": _encode_set(v, p, d)},
    dict: _encode_dict,
    OrderedDict: lambda v, p, d: {"$ordered": _encode_pairs(v, p, d)},
    datetime.datetime: lambda v, p, d: {"$datetime": _time_form(v, p)},
    datetime.date: lambda v, p, d: {"$date": v.isoformat()},
    datetime.time: lambda v, p, d: {"$time": _time_form(v, p)},
    datetime.timedelta: lambda v, p, d: {"$timedelta": [v.days, v.seconds, v.microseconds]},
    pathlib.PurePosixPath: lambda v, p, d: {"$path": ["pure_posix", _encode_str(str(v), p, d)]},
    pathlib.PureWindowsPath: lambda v, p, d: {"$path": ["pure_windows", _encode_str(str(v), p, d)]},
    pathlib.PosixPath: lambda v, p, d: {"$path": ["posix", _encode_str(str(v), p, d)]},
    pathlib.WindowsPath: lambda v, p, d: {"$path": ["windows", _encode_str(str(v), p, d)]},
    SizeLeaf: lambda v, p, d: {"$size": list(v.sizes)},
    DtypeLeaf: lambda v, p, d: {"$dtype": v.name},
    NumpyScalarLeaf: lambda v, p, d: {"$numpy": [v.dtype, v.data.hex()]},
    TensorLeaf: lambda v, p, d: {"$tensor": [v.name, v.container, v.device, v.requires_grad]},
    ScalarLeaf: lambda v, p, d: {"$scalar": [v.dtype, v.data.hex(), v.container, v.device, v.requires_grad]},
    ViewLeaf: lambda v, p, d: {
        "$view": [v.name, v.offset, list(v.shape), list(v.stride), v.container, v.device, v.requires_grad]
    },
    Shared: _encode_shared,
    Same: lambda v, p, d: {"$same": v.number},
    Open: lambda v, p, d: OpenPlace(v.number, p),
    OpenScalar: lambda v, p, d: {"$scalar": [v.dtype, OpenPlace(v.number, p), v.container, v.device, v.requires_grad]},
}


def _time_form(value: Any, path: Path) -> Any:
    text = _naive_or_fixed(value, path).isoformat()
    return [text, value.fold] if value.fold else text


def _naive_or_fixed(value: Any, path: Path) -> Any:
    if value.tzinfo is not None and not isinstance(value.tzinfo, datetime.timezone):
        raise RequestError(
            "a time with a named time zone cannot be stored exactly",
            where=_shown(path),
            expected="a naive time or one with a fixed offset (datetime.timezone)",
            found=repr(value.tzinfo),
        )
    offset = value.utcoffset()
    if offset is not None and offset.microseconds:
        # Python itself does not read back what isoformat writes for some of these.
        raise RequestError(
            "a time's offset cannot be stored exactly", where=_shown(path), expected="whole seconds", found=repr(offset)
        )
    return value
