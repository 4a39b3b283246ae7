"""Read durations as people type them, and print them."""

from __future__ import annotations

import datetime
import math
import re

from safepoint.errors import RequestError

_SPANS_S = {"ms": 0.001, "s": 1.0, "m": 60.0, "min": 60.0, "h": 3600.0, "d": 86400.0}
_DURATION = re.compile(rf"(\d+(?:\.\d+)?)\s*({'|'.join(sorted(_SPANS_S, key=len, reverse=True))})\s*")
_DAY_S, _HOUR_S, _MINUTE_S = 86400.0, 3600.0, 60.0


def duration_s(text: str, *, option: str) -> float:
    """Return the seconds of a duration such as ``90s``, ``1m`` or ``1h30m``.

    Args:
        text: What was typed.
        option: Where it stands, for the error.

    Raises:
        RequestError: It is none, or has no unit.
    """
    parts = _DURATION.findall(text.strip())
    if not parts or _DURATION.sub("", text.strip()):
        raise RequestError(
            "a duration cannot be read", where=option, expected="such as 90s, 1m, 6h or 1h30m", found=repr(text)
        )
    return sum(float(number) * _SPANS_S[unit] for number, unit in parts)


def seconds_of(value: str | float | datetime.timedelta, *, option: str) -> float:
    """Return the seconds of a duration that is text, a `timedelta`, or a number of seconds; more than nothing.

    Raises:
        RequestError: It is none of these, or not positive.
    """
    if isinstance(value, str):
        seconds = duration_s(value, option=option)
    elif isinstance(value, datetime.timedelta):
        seconds = value.total_seconds()
    elif isinstance(value, int | float) and not isinstance(value, bool):
        seconds = float(value)
    else:
        seconds = math.nan
    if not (math.isfinite(seconds) and seconds > 0):
        raise RequestError(
            "a duration is not usable",
            where=option,
            expected="text such as 36h, a timedelta, or seconds, and more than nothing",
            found=repr(value),
        )
    return seconds


def duration_text(seconds: float) -> str:
    """Return a duration for people, with three digits."""
    if seconds >= 2 * _DAY_S:
        return f"{seconds / _DAY_S:.3g} d"
    if seconds >= 2 * _HOUR_S:
        return f"{seconds / _HOUR_S:.3g} h"
    if seconds >= _MINUTE_S:
        return f"{seconds / _MINUTE_S:.3g} min"
    return f"{seconds:.3g} s"
