"""Bytes to typed records and back, strictly and within bounds.

Invariants:

1. A record's text begins with ``{"digest":"`` and 32 hexadecimal digits; the digest is that of every byte after them.
2. What is decoded has no unknown field, no duplicate key, no number out of range, no nesting beyond the limit;
   otherwise a `CorruptionError` names the file. Foreign decoding errors never leave this file.
3. Nothing is allocated by a size that the text names.
4. A record of a newer format is known by its version before its unknown fields are met.

Spec: F2.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable, Sequence
from typing import Any, TypeVar

import msgspec

from safepoint.errors import CorruptionError, RequestError
from safepoint.format.digest import HEX_LENGTH, digest_bytes, is_digest
from safepoint.format.version import check_version

MAX_NESTING = 256
RECORD_LIMIT_BYTES = 1 << 20
MANIFEST_LIMIT_BYTES = 1 << 26
INDEX_LIMIT_BYTES = 1 << 30

# A text of JSON holds this character only behind a backslash and as digits.
PLACE = "\0"

_PREFIX = b'{"digest":"'
_HEAD = len(_PREFIX) + HEX_LENGTH
# A string that does not end is taken up to the text's end, so that the scan stays linear in hostile texts as well.
_BRACKETS = re.compile(rb'"[^"\\]*(?:\\.[^"\\]*)*"?|[\[\]{}]', re.DOTALL)
_DEEP = b"\n" + b" " * MAX_NESTING
_SURROGATE = re.compile(rb"(?<!\\)(?:\\\\)*\\u[dD][89a-fA-F]")

Record = TypeVar("Record", bound=msgspec.Struct)


def seal(record: msgspec.Struct) -> bytes:
    """Return a record as text that carries its own digest, one field per line.

    Raises:
        RequestError: A text in the record is not Unicode.

    Spec: F2.
    """
    return bytes(seal_text([encode_sealed(record)]))


def encode_sealed(record: msgspec.Struct) -> bytes:
    """Return the text of a record as it is sealed, without its digest.

    Raises:
        RequestError: As `seal` does.
    """
    try:
        return msgspec.json.format(msgspec.json.encode(record), indent=1)
    except UnicodeEncodeError as exc:
        raise _no_unicode(type(record).__name__, exc) from exc


def encode_each(texts: Sequence[str]) -> list[str]:
    """Return each text as a record has it.

    Raises:
        RequestError: As `seal` does.
    """
    try:
        lines = msgspec.json.Encoder().encode_lines(texts)
    except UnicodeEncodeError as exc:
        raise _no_unicode("text", exc) from exc
    # Within a text of JSON the end of a line is written with a backslash.
    return lines.decode("utf-8").split("\n")[:-1]


class TextWithPlaces:
    """Hold a part of a JSON text in which `PLACE` stands for what is put there later."""

    __slots__ = ("_pieces",)

    def __init__(self, text: str) -> None:
        self._pieces = text.encode("utf-8").split(PLACE.encode("ascii"))

    def fill(self, texts: Iterable[bytes]) -> list[bytes]:
        """Return the parts of the text, given those for its places; to be joined, for it may be long."""
        parts = [b""] * (2 * len(self._pieces) - 1)
        parts[::2] = self._pieces
        parts[1::2] = texts
        return parts


def seal_text(pieces: Sequence[bytes]) -> bytearray:
    """Return the text of a record, as `encode_sealed` makes it, with its digest; in one copy, for it may be long.

    Spec: F2.
    """
    first, *others = pieces
    text = bytearray().join([_PREFIX, bytes(HEX_LENGTH), b'",', memoryview(first)[1:], *others, b"\n"])
    text[len(_PREFIX) : _HEAD] = digest_bytes(memoryview(text)[_HEAD:]).encode("ascii")
    return text


def check_length(size_bytes: int, *, limit_bytes: int, where: str) -> None:
    """Raise `RequestError` for a record that is longer than a reader takes.

    Spec: F2.5.
    """
    if size_bytes > limit_bytes:
        raise RequestError(
            "plain values are longer in all than their file may be",
            where=where,
            expected=f"at most {limit_bytes} bytes",
            found=f"{size_bytes} bytes",
            remedy="Keep what is large in tensors of an item's state: not in lists and texts, nor among the options "
            "of an optimizer or in config=, which are kept as text.",
        )


def unseal(data: bytes, kind: type[Record], *, where: str) -> Record:
    """Return the record that a text holds, having checked its digest and its form.

    Args:
        data: The whole file.
        kind: The record type.
        where: The file's path, for messages.

    Raises:
        CorruptionError: The text is not a record of this kind, or its digest does not match.
        FormatVersionError: A newer format wrote it.

    Spec: F1, F2.
    """
    check_seal(data, where=where)
    record = _as_sealed(data, kind)
    if record is not None:
        _check_age({"format": getattr(record, "format", None), "flags": list(getattr(record, "flags", ()))}, where)
        return record
    tree = parse_json(data, where=where)
    if not isinstance(tree, dict):
        raise _corrupt(where, "a JSON object", type(tree).__name__)
    del tree["digest"]
    _check_age(tree, where)
    try:
        return msgspec.convert(tree, kind, strict=True)
    except msgspec.ValidationError as exc:
        raise _corrupt(where, f"a {kind.__name__}", str(exc)[:200]) from exc


def check_seal(data: bytes, *, where: str) -> str:
    """Return a record's digest, having recomputed it.

    Raises:
        CorruptionError: The prefix or the digest is not right.

    Spec: F2.
    """
    stated = data[len(_PREFIX) : _HEAD].decode("ascii", "replace")
    if data[: len(_PREFIX)] != _PREFIX or not is_digest(stated) or data[_HEAD : _HEAD + 2] != b'",':
        found = "an empty file" if not data else repr(data[:24])
        raise _corrupt(where, "a record that begins with its digest", found)
    actual = digest_bytes(memoryview(data)[_HEAD:])
    if stated != actual:
        raise _corrupt(where, f"digest {stated}", actual)
    return actual


def parse_json(data: bytes, *, where: str) -> Any:
    """Return the tree that a JSON text holds: unique keys, finite numbers, bounded nesting, valid Unicode.

    Raises:
        CorruptionError: Something else.

    Spec: F2.
    """
    _check_nesting(data, where)
    if _SURROGATE.search(data):
        raise _corrupt(where, "strict JSON", "an escaped surrogate")
    try:
        return json.loads(
            data.decode("utf-8"),
            object_pairs_hook=_unique_pairs,
            parse_constant=_refuse_constant,
            parse_float=_finite,
        )
    except (ValueError, RecursionError) as exc:
        raise _corrupt(where, "strict JSON", str(exc)[:200]) from exc


def _as_sealed(data: bytes, kind: type[Record]) -> Record | None:
    """Return the record of a text that is to the byte what `seal` makes of it, and None for any other text.

    That is proof of all that `parse_json` looks for: a repeated key, a number or a letter in another form, would
    not have come back. Only the nesting tells nothing of itself; each level indents its lines by a space.
    """
    if _DEEP in data:
        return None
    try:
        # The text is copied once and compared where it lies: new memory costs the system more than the look at it.
        record = msgspec.json.decode(data.replace(data[: _HEAD + 2], b"{", 1), type=kind)
        again = msgspec.json.format(msgspec.json.encode(record), indent=1)
    except (msgspec.MsgspecError, UnicodeError, RecursionError):
        return None
    is_same = len(data) == _HEAD + 2 + len(again) and data.endswith(b"\n")
    return record if is_same and data.startswith(memoryview(again)[1:], _HEAD + 2) else None


def _check_age(tree: dict[str, Any], where: str) -> None:
    version, flags = tree.get("format"), tree.get("flags", [])
    if type(version) is int and isinstance(flags, list):
        check_version(version, (flag for flag in flags if isinstance(flag, str)), where=where)


def _check_nesting(data: bytes, where: str) -> None:
    depth = 0
    for match in _BRACKETS.finditer(data):
        first = match[0]
        if first in (b"[", b"{"):
            depth += 1
            if depth > MAX_NESTING:
                raise _corrupt(where, f"at most {MAX_NESTING} levels", "more")
        elif first in (b"]", b"}"):
            depth -= 1


def _unique_pairs(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result = dict(pairs)
    if len(result) != len(pairs):
        keys = [key for key, _ in pairs]
        twice = next(key for key in keys if keys.count(key) > 1)
        raise ValueError(f"the key {twice[:80]!r} stands twice")
    return result


def _refuse_constant(text: str) -> float:
    raise ValueError(f"{text} is not JSON")


def _finite(text: str) -> float:
    number = float(text)
    if not math.isfinite(number):
        raise ValueError(f"{text[:40]} is out of range")
    return number


def _no_unicode(what: str, exc: UnicodeEncodeError) -> RequestError:
    return RequestError(f"a {what} cannot be written", expected="Unicode text", found=ascii(exc.object[:80]))


def _corrupt(where: str, expected: str, found: str) -> CorruptionError:
    return CorruptionError("a record cannot be decoded", where=where, expected=expected, found=found)
