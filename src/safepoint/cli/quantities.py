"""Read sizes and rates as people type them."""

from __future__ import annotations

import re

from safepoint.errors import RequestError

_SIZES = {"B": 1, "kB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}
_SIZES |= {"KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30, "TiB": 1 << 40}
_NUMBER = r"(\d+(?:\.\d+)?)"
_SIZE = re.compile(rf"{_NUMBER}\s*({'|'.join(_SIZES)})")


def size_bytes(text: str, *, option: str) -> float:
    """Return the bytes of a size such as ``80GB`` or ``64GiB``.

    Raises:
        RequestError: It is none, has no unit, or is nothing.
    """
    match = _SIZE.fullmatch(text.strip())
    if match is None or float(match[1]) == 0:
        raise RequestError("a size cannot be read", where=option, expected="such as 80GB or 64GiB", found=repr(text))
    return float(match[1]) * _SIZES[match[2]]


def rate(text: str, *, option: str) -> float:
    """Return the bytes a second of a rate such as ``2GB/s``.

    Raises:
        RequestError: It is none.
    """
    amount, sign, second = text.strip().partition("/")
    if not sign or second.strip() != "s":
        raise RequestError("a rate cannot be read", where=option, expected="such as 2GB/s", found=repr(text))
    return size_bytes(amount, option=option)
