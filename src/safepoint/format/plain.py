"""Plain values: the closed set of Python types that a checkpoint stores, and their form as JSON.

A value is a tree of the builtin types below and of the leaves defined here. Anything else is refused, by its path. The
JSON form is exact: what is decoded has the same types, the same order of keys, the same bits, the same aliasing.

JSON scalars stand for themselves: null, true, false, integers of at most 63 bits, strings of valid Unicode. An array is
a list. An object is a dict whose keys are all strings that do not begin with ``$``. Every other value is an object with
one key, its tag::

    $float "0x1.8p+0"    $int "-0x1f…"      $str hex of UTF-8 with surrogates     $bytes base64
    $complex [re, im]    $tuple [...]       $set [...]    $frozenset [...]        $dict [[key, value], ...]
    $ordered [[key, value], ...]            $datetime / $date / $time ISO 8601    $timedelta [days, s, µs]
    $path [flavour, text]                   $size [...]   $dtype name             $numpy [dtype, hex]
    $tensor [name, container, device, requires_grad]      $scalar [dtype, hex, container, device, requires_grad]
    $view [name, offset, shape, stride, container, device, requires_grad]
    $shared [number, value]                 $same number

Spec: F4.
"""

from __future__ import annotations

import base64
import datetime
import math
import pathlib
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from safepoint.errors import CorruptionError, RequestError

MAX_DEPTH = 64
_INT_LIMIT = 1 << 63
_LONGEST_INT_DIGITS = 1 << 16

# A plain value is typed as object: the set is closed by the code below, not by the type checker.
Plain = object


@dataclass(frozen=True, slots=True)
class TensorLeaf:
    """Stand for a tensor whose bytes lie in the data file under `name` (within the item).

    `container` says what holds it in Python: ``tensor``, ``parameter``, ``buffer`` or ``ndarray``; `device` is the kind of
    device it was on (``cpu``, ``cuda``) and is a hint only.
    """

    name: str
    container: str = "tensor"
    device: str = "cpu"
    requires_grad: bool = False


@dataclass(frozen=True, slots=True)
class ScalarLeaf:
    """Stand for a 0-dim tensor; `data` are its bytes, little-endian."""

    dtype: str
    data: bytes
    container: str = "tensor"
    device: str = "cpu"
    requires_grad: bool = False


@dataclass(frozen=True, slots=True)
class ViewLeaf:
    """Stand for a view of the one-dimensional tensor stored under `name`; offset and strides count elements."""

    name: str
    offset: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    container: str = "tensor"
    device: str = "cpu"
    requires_grad: bool = False


@dataclass(frozen=True, slots=True)
class SizeLeaf:
    """Stand for a `torch.Size`."""

    sizes: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class DtypeLeaf:
    """Stand for a `torch.dtype` by its name, such as ``bfloat16``."""

    name: str


@dataclass(frozen=True, slots=True)
class NumpyScalarLeaf:
    """Stand for a numpy scalar; `dtype` is numpy's own string with byte order, such as ``<f8``."""

    dtype: str
    data: bytes


@dataclass(frozen=True, slots=True)
class Shared:
    """Mark the first place of a value that other places of the tree refer to."""

    number: int
    value: object


@dataclass(frozen=True, slots=True)
class Same:
    """Refer to the `Shared` value of that number; it stands earlier in the tree."""

    number: int


def encode_plain(value: object, *, path: str = "") -> Any:
    """Return the JSON form of a plain value.

    Args:
        value: A tree of plain types and leaves.
        path: Where the value stands in the state, for messages.

    Raises:
        RequestError: A value is outside the closed set, or nests deeper than `MAX_DEPTH`; names its path and type.

    Spec: F4.
    """
    return _encode(value, path, 0)


def decode_plain(form: object, *, where: str = "") -> object:
    """Return the plain value that a JSON form stands for.

    Raises:
        CorruptionError: The form is not one that `encode_plain` writes; names the place.

    Spec: F4.
    """
    return _Decoder(where).decode(form, 0)


def _encode(value: object, path: str, depth: int) -> Any:
    if depth > MAX_DEPTH:
        raise RequestError(
            "the state nests too deeply to be stored", where=path, expected=f"at most {MAX_DEPTH} levels", found="more"
        )
    if value is None or value is True or value is False:
        return value
    encoder = _ENCODERS.get(type(value))
    if encoder is None:
        raise RequestError(
            "a value of the state cannot be stored",
            where=path or "the state",
            expected="None, bool, int, float, complex, str, bytes, list, tuple, dict, OrderedDict, set, frozenset, datetime, "
            "a path, a tensor, a numpy scalar or array, torch.Size or torch.dtype",
            found=f"{type(value).__module__}.{type(value).__qualname__}",
            remedy="Store plain values that rebuild it, for example in the object's state_dict().",
        )
    return encoder(value, path, depth)


def _encode_int(value: Any, path: str, depth: int) -> Any:
    return value if -_INT_LIMIT <= value < _INT_LIMIT else {"$int": hex(value)}


def _encode_str(value: Any, path: str, depth: int) -> Any:
    try:
        value.encode("utf-8")
    except UnicodeEncodeError:
        return {"$str": value.encode("utf-8", "surrogatepass").hex()}
    return value


def _float_text(value: float) -> str:
    if math.isnan(value):
        # float.hex() drops sign and payload of a NaN; Python itself makes only this one unless it is asked to.
        return "nan"
    return value.hex()


def _encode_items(value: Any, path: str, depth: int) -> list[Any]:
    return [_encode(element, f"{path}[{index}]", depth + 1) for index, element in enumerate(value)]


def _encode_pairs(value: Any, path: str, depth: int) -> list[Any]:
    return [
        [_encode(key, f"{path} (a key)", depth + 1), _encode(element, _join(path, key), depth + 1)]
        for key, element in value.items()
    ]


def _encode_dict(value: Any, path: str, depth: int) -> Any:
    if all(type(key) is str and not key.startswith("$") and key.isascii() for key in value):
        return {key: _encode(element, _join(path, key), depth + 1) for key, element in value.items()}
    return {"$dict": _encode_pairs(value, path, depth)}


def _encode_set(value: Any, path: str, depth: int) -> list[Any]:
    # Sorted by their own text, so that equal sets have equal bytes whatever the hash seed of the process.
    return sorted(_encode_items(value, path, depth), key=repr)


def _join(path: str, key: object) -> str:
    return f"{path}.{key}" if isinstance(key, str) and path else f"{path}[{key!r}]" if path else str(key)


_ENCODERS: dict[type, Callable[[Any, str, int], Any]] = {
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
    datetime.datetime: lambda v, p, d: {"$datetime": _naive_or_fixed(v, p).isoformat()},
    datetime.date: lambda v, p, d: {"$date": v.isoformat()},
    datetime.time: lambda v, p, d: {"$time": _naive_or_fixed(v, p).isoformat()},
    datetime.timedelta: lambda v, p, d: {"$timedelta": [v.days, v.seconds, v.microseconds]},
    pathlib.PurePosixPath: lambda v, p, d: {"$path": ["pure_posix", str(v)]},
    pathlib.PureWindowsPath: lambda v, p, d: {"$path": ["pure_windows", str(v)]},
    pathlib.PosixPath: lambda v, p, d: {"$path": ["posix", str(v)]},
    pathlib.WindowsPath: lambda v, p, d: {"$path": ["windows", str(v)]},
    SizeLeaf: lambda v, p, d: {"$size": list(v.sizes)},
    DtypeLeaf: lambda v, p, d: {"$dtype": v.name},
    NumpyScalarLeaf: lambda v, p, d: {"$numpy": [v.dtype, v.data.hex()]},
    TensorLeaf: lambda v, p, d: {"$tensor": [v.name, v.container, v.device, v.requires_grad]},
    ScalarLeaf: lambda v, p, d: {"$scalar": [v.dtype, v.data.hex(), v.container, v.device, v.requires_grad]},
    ViewLeaf: lambda v, p, d: {
        "$view": [v.name, v.offset, list(v.shape), list(v.stride), v.container, v.device, v.requires_grad]
    },
    Shared: lambda v, p, d: {"$shared": [v.number, _encode(v.value, p, d + 1)]},
    Same: lambda v, p, d: {"$same": v.number},
}


def _naive_or_fixed(value: Any, path: str) -> Any:
    if value.tzinfo is not None and not isinstance(value.tzinfo, datetime.timezone):
        raise RequestError(
            "a time with a named time zone cannot be stored exactly",
            where=path,
            expected="a naive time or one with a fixed offset (datetime.timezone)",
            found=repr(value.tzinfo),
        )
    return value


class _Decoder:
    """Decode one tree; collects the values that later places refer to."""

    def __init__(self, where: str) -> None:
        self._where = where
        self._seen: set[int] = set()

    def decode(self, form: object, depth: int) -> object:
        if depth > MAX_DEPTH + 1:
            raise self._bad("a tree of at most 64 levels", "more")
        if form is None or isinstance(form, bool | str):
            return form
        if isinstance(form, int):
            if not -_INT_LIMIT <= form < _INT_LIMIT:
                raise self._bad("an integer of at most 63 bits", "a longer one")
            return form
        if isinstance(form, list):
            return [self.decode(element, depth + 1) for element in form]
        if not isinstance(form, dict):
            raise self._bad("a value of the closed set", type(form).__name__)
        tag = next(iter(form), "")
        if not tag.startswith("$"):
            if any(key.startswith("$") for key in form):
                raise self._bad("an object without tags", sorted(form)[0])
            return {key: self.decode(element, depth + 1) for key, element in form.items()}
        if len(form) != 1:
            raise self._bad("an object with one tag", f"{len(form)} keys beside {tag!r}")
        return self._tagged(tag, form[tag], depth)

    def _tagged(self, tag: str, payload: Any, depth: int) -> object:
        decoder = _DECODERS.get(tag)
        try:
            if decoder is not None:
                return decoder(payload)
            if tag == "$tuple":
                return tuple(self._elements(payload, depth))
            if tag == "$set":
                return self._unique(payload, depth, set)
            if tag == "$frozenset":
                return self._unique(payload, depth, frozenset)
            if tag in ("$dict", "$ordered"):
                return self._pairs(payload, depth, dict if tag == "$dict" else OrderedDict)
            if tag == "$shared":
                return self._shared(payload, depth)
            if tag == "$same":
                if _whole(payload) not in self._seen:
                    raise self._bad("a reference to an earlier value", str(payload))
                return Same(payload)
        except (ValueError, TypeError, KeyError, OverflowError, IndexError, AttributeError) as exc:
            raise self._bad(f"a well-formed {tag}", f"{str(payload)[:60]!r} ({exc})") from exc
        raise self._bad("a tag of this format", repr(tag[:40]))

    def _elements(self, payload: Any, depth: int) -> list[object]:
        if not isinstance(payload, list):
            raise TypeError("not an array")
        return [self.decode(element, depth + 1) for element in payload]

    def _unique(self, payload: Any, depth: int, kind: Callable[[list[object]], Any]) -> object:
        elements = self._elements(payload, depth)
        values = kind(elements)
        if len(values) != len(elements):
            raise self._bad("a set without repetition", "a repeated element")
        return values

    def _pairs(self, payload: Any, depth: int, kind: Callable[[], Any]) -> object:
        result = kind()
        for key, element in payload:
            decoded = self.decode(key, depth + 1)
            if decoded in result:
                raise self._bad("a mapping without repetition", f"the key {decoded!r} twice")
            result[decoded] = self.decode(element, depth + 1)
        return result

    def _shared(self, payload: Any, depth: int) -> Shared:
        number, inner = payload
        if _whole(number) in self._seen:
            raise self._bad("numbers of shared values without repetition", str(number))
        # Added before its value is decoded: a list may contain itself.
        self._seen.add(number)
        return Shared(number, self.decode(inner, depth + 1))

    def _bad(self, expected: str, found: str) -> CorruptionError:
        return CorruptionError("a stored value cannot be decoded", where=self._where, expected=expected, found=found)


def _whole(value: object) -> int:
    if type(value) is not int or not 0 <= value < _INT_LIMIT:
        raise ValueError(f"not a count: {value!r}")
    return value


def _wholes(value: object) -> tuple[int, ...]:
    if not isinstance(value, list):
        raise TypeError("not an array")
    return tuple(_whole(element) for element in value)


def _text(value: object) -> str:
    if not isinstance(value, str):
        raise TypeError(f"not a string: {value!r}")
    return value


def _flag(value: object) -> bool:
    if not isinstance(value, bool):
        raise TypeError(f"not a boolean: {value!r}")
    return value


def _decode_float(value: object) -> float:
    text = _text(value)
    if text in ("nan", "inf", "-inf"):
        return float(text)
    number = float.fromhex(text)
    if number.hex() != text:
        raise ValueError(f"not the canonical form of {number!r}")
    return number


def _decode_int(value: object) -> int:
    text = _text(value)
    if len(text) > _LONGEST_INT_DIGITS:
        raise ValueError("too many digits")
    number = int(text, 16)
    if hex(number) != text:
        raise ValueError("not in canonical form")
    return number


_PATHS: dict[str, type[pathlib.PurePath]] = {
    "pure_posix": pathlib.PurePosixPath,
    "pure_windows": pathlib.PureWindowsPath,
    # A concrete path exists on its own system only; elsewhere its pure form is the closest there is.
    "posix": pathlib.PosixPath if pathlib.Path is not pathlib.WindowsPath else pathlib.PurePosixPath,
    "windows": pathlib.PureWindowsPath,
}

_DECODERS: dict[str, Callable[[Any], object]] = {
    "$float": _decode_float,
    "$int": _decode_int,
    "$str": lambda p: bytes.fromhex(_text(p)).decode("utf-8", "surrogatepass"),
    "$complex": lambda p: complex(_decode_float(p[0]), _decode_float(p[1])),
    "$bytes": lambda p: base64.b64decode(_text(p), validate=True),
    "$datetime": lambda p: datetime.datetime.fromisoformat(_text(p)),
    "$date": lambda p: datetime.date.fromisoformat(_text(p)),
    "$time": lambda p: datetime.time.fromisoformat(_text(p)),
    "$timedelta": lambda p: datetime.timedelta(*(int(part) for part in p)),
    "$path": lambda p: _PATHS[p[0]](_text(p[1])),
    "$size": lambda p: SizeLeaf(_wholes(p)),
    "$dtype": lambda p: DtypeLeaf(_text(p)),
    "$numpy": lambda p: NumpyScalarLeaf(_text(p[0]), bytes.fromhex(p[1])),
    "$tensor": lambda p: TensorLeaf(_text(p[0]), _text(p[1]), _text(p[2]), _flag(p[3])),
    "$scalar": lambda p: ScalarLeaf(_text(p[0]), bytes.fromhex(p[1]), _text(p[2]), _text(p[3]), _flag(p[4])),
    "$view": lambda p: ViewLeaf(
        _text(p[0]), _whole(p[1]), _wholes(p[2]), _wholes(p[3]), _text(p[4]), _text(p[5]), _flag(p[6])
    ),
}
