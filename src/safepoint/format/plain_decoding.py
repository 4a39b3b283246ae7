"""The JSON form of plain values back into values, strictly: only what the encoder writes is accepted.

Spec: F4.
"""

from __future__ import annotations

import base64
import datetime
import pathlib
from collections import OrderedDict
from collections.abc import Callable, Iterable
from operator import methodcaller
from typing import Any

from safepoint.errors import CorruptionError
from safepoint.format.leaves import (
    DtypeLeaf,
    NumpyScalarLeaf,
    Same,
    ScalarLeaf,
    Shared,
    SizeLeaf,
    TensorLeaf,
    ViewLeaf,
)

MAX_DEPTH = 64
INT_LIMIT = 1 << 63
INT_LIMIT_BITS = 1 << 18
# So many elements are looked at as one: a call for each takes longer than all else that is done with a leaf.
_MANY = 8
_PAYLOAD: Callable[[dict[str, Any]], Any] = methodcaller("get", "$tensor")
_BARE: frozenset[type] = frozenset({type(None), bool, str})


def decode_plain(form: object, *, where: str = "") -> object:
    """Return the plain value that a JSON form stands for.

    Raises:
        CorruptionError: The form is not one that `encode_plain` writes; names the place.

    Spec: F4.
    """
    return _Decoder(where).decode(form, 0)


def is_plain_object(value: Iterable[object]) -> bool:
    """Return whether a dict with these keys is an object of its own, and not a list of pairs."""
    keys: list[Any] = list(value)
    if len(keys) >= _MANY and set(map(type, keys)) == {str}:
        whole = "".join(keys)
        if whole.isascii() and "$" not in whole:
            return True
    for key in keys:  # noqa: SIM110  # a generator for each small dict takes longer than the look
        if type(key) is not str or key[:1] == "$" or not key.isascii():
            return False
    return True


class _Decoder:
    """Decode one tree; collects the values that later places refer to."""

    def __init__(self, where: str) -> None:
        self._where = where
        self._seen: set[int] = set()

    def decode(self, form: object, depth: int) -> object:
        if depth > MAX_DEPTH:
            raise self._bad("a tree of at most 64 levels", "more")
        # Most of a large tree are leaves of tensors, which are dicts.
        if type(form) is not dict:
            if form is None or isinstance(form, bool | str):
                return form
            if isinstance(form, int):
                if not -INT_LIMIT <= form < INT_LIMIT:
                    raise self._bad("an integer of at most 63 bits", "a longer one")
                return form
        # Most values are parts of a list or an object, and stand for themselves: they are worth no call each.
        below = depth + 1
        bare = _BARE if below <= MAX_DEPTH else frozenset()
        if isinstance(form, list):
            return [element if type(element) in bare else self.decode(element, below) for element in form]
        if not isinstance(form, dict):
            raise self._bad("a value of the closed set", type(form).__name__)
        tag = next(iter(form), "")
        if not tag.startswith("$"):
            if not is_plain_object(form):
                raise self._bad("an object of ASCII keys without tags", ascii(sorted(form)[0][:40]))
            leaves = _tensors(list(form.values())) if len(form) >= _MANY and below <= MAX_DEPTH else None
            if leaves is not None:
                return dict(zip(form, leaves, strict=True))
            return {
                key: element if type(element) in bare else self.decode(element, below) for key, element in form.items()
            }
        if len(form) != 1:
            raise self._bad("an object with one tag", f"{len(form)} keys beside {tag[:40]!r}")
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
            if tag == "$ordered":
                return self._pairs(payload, depth, OrderedDict)
            if tag == "$dict":
                return self._other_dict(payload, depth)
            if tag == "$shared":
                return self._shared(payload, depth)
            if tag == "$same":
                if _whole(payload) not in self._seen:
                    raise self._bad("a reference to an earlier value", str(payload))
                return Same(payload)
        except (ValueError, TypeError, KeyError, OverflowError, IndexError, AttributeError) as exc:
            raise self._bad(f"a well-formed {tag}", f"{_shown(payload)} ({str(exc)[:80]})") from exc
        raise self._bad("a tag of this format", repr(tag[:40]))

    def _elements(self, payload: Any, depth: int) -> list[object]:
        if not isinstance(payload, list):
            raise TypeError("not an array")
        return [self.decode(element, depth + 1) for element in payload]

    def _unique(self, payload: Any, depth: int, kind: Callable[[list[object]], Any]) -> object:
        elements = self._elements(payload, depth)
        if payload != sorted(payload, key=repr):
            raise self._bad("a set sorted by the forms of its elements", "another order")
        values = kind(elements)
        if len(values) != len(elements):
            raise self._bad("a set without repetition", "a repeated element")
        return values

    def _other_dict(self, payload: Any, depth: int) -> object:
        result = self._pairs(payload, depth, dict)
        if is_plain_object(result):
            raise self._bad("an object where all keys are ASCII text", "pairs")
        return result

    def _pairs(self, payload: Any, depth: int, kind: Callable[[], Any]) -> Any:
        result = kind()
        if not isinstance(payload, list):
            raise TypeError("not an array")
        for pair in payload:
            if not isinstance(pair, list):
                raise TypeError("not an array of pairs")
            key, element = pair
            decoded = self.decode(key, depth + 1)
            if decoded in result:
                raise self._bad("a mapping without repetition", "a key twice")
            result[decoded] = self.decode(element, depth + 1)
        return result

    def _shared(self, payload: Any, depth: int) -> Shared:
        if not isinstance(payload, list):
            raise TypeError("not an array")
        number, inner = payload
        if _whole(number) in self._seen:
            raise self._bad("numbers of shared values without repetition", str(number))
        # Added before its value is decoded: a list may contain itself.
        self._seen.add(number)
        return Shared(number, self.decode(inner, depth + 1))

    def _bad(self, expected: str, found: str) -> CorruptionError:
        return CorruptionError("a stored value cannot be decoded", where=self._where, expected=expected, found=found)


def _shown(payload: object) -> str:
    return repr(payload[:60]) if isinstance(payload, str) else type(payload).__name__


def _whole(value: object) -> int:
    if type(value) is not int or not 0 <= value < INT_LIMIT:
        raise ValueError("not a count")
    return value


def _wholes(value: object) -> tuple[int, ...]:
    if not isinstance(value, list):
        raise TypeError("not an array")
    return tuple(_whole(element) for element in value)


def _text(value: object) -> str:
    if not isinstance(value, str):
        raise TypeError("not a string")
    return value


def _flag(value: object) -> bool:
    if not isinstance(value, bool):
        raise TypeError("not a boolean")
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
    if len(text) > INT_LIMIT_BITS // 4 + len("-0x"):
        raise ValueError("too many digits")
    number = int(text, 16)
    if hex(number) != text or -INT_LIMIT <= number < INT_LIMIT:
        raise ValueError("not in canonical form")
    return number


def _hex(value: object) -> bytes:
    text = _text(value)
    data = bytes.fromhex(text)
    if data.hex() != text:
        raise ValueError("not in canonical form")
    return data


def _base64(value: object) -> bytes:
    text = _text(value)
    data = base64.b64decode(text, validate=True)
    if base64.b64encode(data).decode("ascii") != text:
        raise ValueError("not in canonical form")
    return data


def _surrogate_text(value: object) -> str:
    text = _hex(value).decode("utf-8", "surrogatepass")
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        return text
    raise ValueError("not in canonical form")


def _iso(kind: Any) -> Callable[[Any], object]:
    def decode(value: object) -> object:
        text = _text(value)
        result = kind.fromisoformat(text)
        if result.isoformat() != text:
            raise ValueError("not in canonical form")
        return result

    return decode


def _folded(kind: Any) -> Callable[[Any], object]:
    """Return a decoder of a text, or of a text and the number 1: the second of two times that read the same."""
    plain = _iso(kind)

    def decode(value: object) -> object:
        if type(value) is not list:
            return plain(value)
        text, fold = value
        if type(fold) is not int or fold != 1:
            raise ValueError("not in canonical form")
        result: Any = plain(text)
        return result.replace(fold=1)

    return decode


def _fields(count: int, build: Callable[[list[Any]], object]) -> Callable[[Any], object]:
    """Return a decoder of an array of exactly so many elements."""

    def decode(value: object) -> object:
        if not isinstance(value, list) or len(value) != count:
            raise ValueError(f"not an array of {count}")
        return build(value)

    return decode


def _timedelta(parts: list[Any]) -> datetime.timedelta:
    if any(type(part) is not int for part in parts):
        raise TypeError("not whole numbers")
    result = datetime.timedelta(*parts)
    if [result.days, result.seconds, result.microseconds] != parts:
        raise ValueError("not in canonical form")
    return result


def _tensor(parts: list[Any]) -> TensorLeaf:
    name, container, device, requires_grad = parts
    return TensorLeaf(_text(name), _text(container), _text(device), _flag(requires_grad))


def _tensors(forms: list[Any]) -> list[TensorLeaf] | None:
    """Return the leaves that forms stand for, if all are well-formed ones of tensors; else None."""
    if set(map(type, forms)) != {dict} or set(map(len, forms)) != {1}:
        return None
    payloads = list(map(_PAYLOAD, forms))
    if set(map(type, payloads)) != {list} or set(map(len, payloads)) != {4}:
        return None
    columns = list(zip(*payloads, strict=True))
    if [set(map(type, column)) for column in columns] != [{str}, {str}, {str}, {bool}]:
        return None
    return list(map(TensorLeaf, *columns))


def _path(parts: list[Any]) -> pathlib.PurePath:
    flavour, form = parts
    if isinstance(form, dict) and list(form) == ["$str"]:
        form = _surrogate_text(form["$str"])
    path = _PATHS[_text(flavour)](_text(form))
    if str(path) != form:
        raise ValueError("not in canonical form")
    return path


_HERE = type(pathlib.Path())
_PATHS: dict[str, type[pathlib.PurePath]] = {
    "pure_posix": pathlib.PurePosixPath,
    "pure_windows": pathlib.PureWindowsPath,
    # A concrete path exists on its own system only; elsewhere its pure form is the closest there is.
    "posix": _HERE if _HERE is pathlib.PosixPath else pathlib.PurePosixPath,
    "windows": _HERE if _HERE is pathlib.WindowsPath else pathlib.PureWindowsPath,
}

_DECODERS: dict[str, Callable[[Any], object]] = {
    "$float": _decode_float,
    "$int": _decode_int,
    "$str": _surrogate_text,
    "$complex": _fields(2, lambda p: complex(_decode_float(p[0]), _decode_float(p[1]))),
    "$bytes": _base64,
    "$datetime": _folded(datetime.datetime),
    "$date": _iso(datetime.date),
    "$time": _folded(datetime.time),
    "$timedelta": _fields(3, _timedelta),
    "$path": _fields(2, _path),
    "$size": lambda p: SizeLeaf(_wholes(p)),
    "$dtype": lambda p: DtypeLeaf(_text(p)),
    "$numpy": _fields(2, lambda p: NumpyScalarLeaf(_text(p[0]), _hex(p[1]))),
    "$tensor": _fields(4, _tensor),
    "$scalar": _fields(5, lambda p: ScalarLeaf(_text(p[0]), _hex(p[1]), _text(p[2]), _text(p[3]), _flag(p[4]))),
    "$view": _fields(
        7,
        lambda p: ViewLeaf(
            _text(p[0]), _whole(p[1]), _wholes(p[2]), _wholes(p[3]), _text(p[4]), _text(p[5]), _flag(p[6])
        ),
    ),
}
