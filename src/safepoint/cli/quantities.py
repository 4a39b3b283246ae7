"""Read durations, sizes and rates as people type them, and print them."""

from __future__ import annotations

import re

from safepoint.errors import RequestError

_SPANS_S = {"ms": 0.001, "s": 1.0, "m": 60.0, "min": 60.0, "h": 3600.0, "d": 86400.0}
_SIZES = {"B": 1, "kB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}
_SIZES |= {"KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30, "TiB": 1 << 40}
_NUMBER = r"(\d+(?:\.\d+)?)"
_DURATION = re.compile(rf"{_NUMBER}\s*({'|'.join(sorted(_SPANS_S, key=len, reverse=True))})\s*")
_SIZE = re.compile(rf"{_NUMBER}\s*({'|'.join(_SIZES)})")
_DAY_S, _HOUR_S, _MINUTE_S = 86400.0, 3600.0, 60.0


def duration_s(text: str, *, option: str) -> float:
    """Return the seconds of a duration such as ``90s``, ``1m`` or ``1h30m``.

    Raises:
        RequestError: It is none, or has no unit.
    """
    parts = _DURATION.findall(text.strip())
    if not parts or _DURATION.sub("", text.strip()):
        raise RequestError(
            "a duration cannot be read", where=option, expected="such as 90s, 1m, 6h or 1h30m", found=repr(text)
        )
    return sum(float(number) * _SPANS_S[unit] for number, unit in parts)


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


def duration_text(seconds: float) -> str:
    """Return a duration for people, with three digits."""
    if seconds >= 2 * _DAY_S:
        return f"{seconds / _DAY_S:.3g} d"
    if seconds >= 2 * _HOUR_S:
        return f"{seconds / _HOUR_S:.3g} h"
    if seconds >= _MINUTE_S:
        return f"{seconds / _MINUTE_S:.3g} min"
    return f"{seconds:.3g} s"
