"""When to save: every n updates, every t minutes, or both, whichever comes first."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import msgspec

from safepoint.ambient import Ambient
from safepoint.errors import RequestError
from safepoint.group.base import Group

# Asking the leader may cost this part of the time of the steps between, and may be late by that part of the period.
_COST_SHARE = 0.001
_LATE_SHARE = 0.1


@dataclass(frozen=True, slots=True)
class Schedule:
    """State when a save is due. None leaves that side out.

    Raises:
        RequestError: A number is not positive.
    """

    updates: int | None = None
    minutes: float | None = None

    def __post_init__(self) -> None:
        updates, minutes = self.updates, self.minutes
        if updates is not None and (type(updates) is not int or updates < 1):
            raise RequestError(
                "a schedule counts whole updates", where="updates", expected="1 or more", found=repr(updates)
            )
        is_time = isinstance(minutes, int | float) and not isinstance(minutes, bool)
        if minutes is not None and not (is_time and minutes > 0):
            raise RequestError(
                "a schedule's time is positive", where="minutes", expected="more than 0", found=repr(minutes)
            )

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


class DueClock:
    """Tell all ranks alike whether a save is due: by count each rank knows, by time the leader's clock counts.

    The leader is asked at some boundaries only, the next of which it names each time.

    Args:
        schedule: When a save is due.
        group: The ranks.
        ambient: The clock.
        deadline_s: How long to wait for the leader's word.
        on_asked: Told the topic of each exchange.
    """

    def __init__(
        self,
        schedule: Schedule,
        group: Group,
        ambient: Ambient,
        *,
        deadline_s: float,
        on_asked: Callable[[str], None],
    ) -> None:
        self._schedule = schedule
        self._group = group
        self._ambient = ambient
        self._deadline_s = deadline_s
        self._on_asked = on_asked
        self._incarnation = 0
        self._next_step = 0
        self._cost_s = 0.0
        self._asked_at: tuple[int, float] | None = None

    def is_due(self, incarnation: Callable[[], int], *, step: int, last_step: int, last_time: float) -> bool:
        """Return whether a save is due at a boundary.

        Args:
            incarnation: Returns the number of this start, which goes into topics.
            step: The boundary's step.
            last_step: The step of the last save or restore.
            last_time: When that was, on this rank's clock.

        Raises:
            LeaderLostError: The leader did not say.
        """
        seconds = self._ambient.monotonic() - last_time
        if self._group.world_size == 1 or self._schedule.minutes is None:
            return self._schedule.is_due(step=step, last_step=last_step, seconds=seconds)
        number = incarnation()
        if number != self._incarnation:
            self._incarnation, self._next_step, self._asked_at = number, 0, None
        if self._schedule.is_due(step=step, last_step=last_step, seconds=0.0):
            return True
        if step < self._next_step:
            return False
        topic, word = f"due/{number}/{step}", b""
        if self._group.rank == 0:
            is_due = self._schedule.is_due(step=step, last_step=last_step, seconds=seconds)
            word = msgspec.json.encode((is_due, self._following(step)))
        began = self._ambient.monotonic()
        word = self._group.spread(topic, word or None, deadline_s=self._deadline_s)
        self._cost_s = self._ambient.monotonic() - began
        self._on_asked(topic)
        is_due, self._next_step = msgspec.json.decode(word, type=tuple[bool, int])
        return is_due

    def _following(self, step: int) -> int:
        """Return the step at which to ask next, by what asking costs and how long a step takes."""
        now = self._ambient.monotonic()
        before, self._asked_at = self._asked_at, (step, now)
        if before is None or step <= before[0] or now <= before[1] or self._schedule.minutes is None:
            return step + 1
        step_s = (now - before[1]) / (step - before[0])
        latest = int(_LATE_SHARE * self._schedule.minutes * 60 / step_s)
        return step + max(1, min(math.ceil(self._cost_s / (_COST_SHARE * step_s)), latest))


def every(*, updates: int | None = None, minutes: float | None = None) -> Schedule:
    """Return a schedule that saves every `updates` updates and every `minutes` minutes, whichever comes first.

    Raises:
        RequestError: Neither is given, or one is not positive.
    """
    if updates is None and minutes is None:
        raise RequestError("a schedule says when to save", expected="every(updates=...) or every(minutes=...)")
    return Schedule(updates, minutes)
