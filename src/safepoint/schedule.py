"""When to save: every n updates, every t minutes, or both, whichever comes first."""

from __future__ import annotations

from dataclasses import dataclass

from safepoint.errors import RequestError


@dataclass(frozen=True, slots=True)
class Schedule:
    """State when a save is due. None leaves that side out."""

    updates: int | None = None
    minutes: float | None = None

    def is_due(self, *, step: int, last_step: int, seconds: float) -> bool:
        """Return whether a save is due at a boundary.

        Args:
            step: The boundary's step. Saves fall on multiples of `updates`, so that a resumed run saves at the same
                steps as an uninterrupted one.
            last_step: The step of the last save or restore.
            seconds: Time since then.
        """
        by_count = self.updates is not None and step // self.updates > last_step // self.updates
        by_time = self.minutes is not None and seconds >= self.minutes * 60 and step > last_step
        return by_count or by_time


def every(*, updates: int | None = None, minutes: float | None = None) -> Schedule:
    """Return a schedule that saves every `updates` updates and every `minutes` minutes, whichever comes first.

    Raises:
        RequestError: Neither is given, or one is not positive.
    """
    if updates is None and minutes is None:
        raise RequestError("a schedule says when to save", expected="every(updates=...) or every(minutes=...)")
    if updates is not None and (type(updates) is not int or updates < 1):
        raise RequestError(
            "a schedule counts whole updates", where="updates", expected="1 or more", found=repr(updates)
        )
    if minutes is not None and not minutes > 0:
        raise RequestError(
            "a schedule's time is positive", where="minutes", expected="more than 0", found=repr(minutes)
        )
    return Schedule(updates, minutes)
