"""When to save: every n updates, every t minutes, or both, whichever comes first."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import msgspec

from safepoint.ambient import Ambient
from safepoint.errors import RequestError
from safepoint.group.base import Group
from safepoint.stop import Order, Stop

# Asking the leader may cost this part of the time of the steps between, and may be late by that part of the period.
_COST_SHARE = 0.001
_LATE_SHARE = 0.1
# The leader's board answers some 20,000 ranks in a second.
_ASKED_S_PER_RANK = 1 / 20_000
# At every so manieth question the ranks meet, so that the words before are known to have been read.
_MEET_EVERY = 100


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


class Word(msgspec.Struct, frozen=True, array_like=True):
    """Tell all ranks at a boundary whether a save is due, whether the run stops here, and at which step to ask next."""

    is_due: bool
    order: Order | None = None
    next_step: int = 0


class DueClock:
    """Tell all ranks alike whether a save is due: by count each rank knows, by time the leader's clock counts.

    So it is with signals, of which the leader hears. It is asked at some boundaries only, the next of which it names
    each time.

    Args:
        schedule: When a save is due.
        stop: The stop that signals ask for.
        group: The ranks.
        ambient: The clock.
        deadline_s: How long to wait for the leader's word.
    """

    def __init__(
        self,
        schedule: Schedule,
        stop: Stop,
        group: Group,
        ambient: Ambient,
        *,
        deadline_s: float,
    ) -> None:
        self._schedule = schedule
        self._stop = stop
        self._group = group
        self._ambient = ambient
        self._deadline_s = deadline_s
        self._incarnation = 0
        self._next_step = 0
        self._cost_s = 0.0
        self._asked_at: tuple[int, float] | None = None
        self._unsettled: list[str] = []

    def ask(
        self,
        incarnation: Callable[[], int],
        *,
        step: int,
        last_step: int,
        last_time: float,
        needs_s: float,
        is_end: bool = False,
    ) -> Word:
        """Return what all ranks do at a boundary.

        Args:
            incarnation: Returns the number of this start, which goes into topics.
            step: The boundary's step.
            last_step: The step of the last save or restore.
            last_time: When that was, on this rank's clock.
            needs_s: How long a save is expected to take; 0 where none has been made.
            is_end: Whether the training has ended by itself: no rank asks another one about signals any more.

        Raises:
            LeaderLostError: The leader did not say.
        """
        seconds = self._ambient.monotonic() - last_time
        if self._group.world_size == 1:
            is_due = self._schedule.is_due(step=step, last_step=last_step, seconds=seconds)
            return Word(is_due, self._stop.decide(needs_s=needs_s))
        is_due = self._schedule.is_due(step=step, last_step=last_step, seconds=0.0)
        if not self._periods_s or (is_end and self._schedule.minutes is None):
            return Word(is_due)
        number = incarnation()
        if number != self._incarnation:
            self._incarnation, self._next_step, self._asked_at, self._unsettled = number, 0, None, []
        if step < self._next_step:
            return Word(is_due)
        is_late = self._schedule.is_due(step=step, last_step=last_step, seconds=seconds)
        word = self._exchange(f"due/{number}/{step}", lambda: self._word(is_late, step=step, needs_s=needs_s))
        self._next_step = word.next_step
        return msgspec.structs.replace(word, is_due=is_due or word.is_due)

    @property
    def _periods_s(self) -> list[float]:
        """Return the periods of which a part may pass before all ranks know; none where there is nothing to ask."""
        minutes, grace_s = self._schedule.minutes, self._stop.grace_s
        return [one for one in (None if minutes is None else minutes * 60, grace_s) if one is not None]

    def _word(self, is_due: bool, *, step: int, needs_s: float) -> bytes:
        return msgspec.json.encode(Word(is_due, self._stop.decide(needs_s=needs_s), self._following(step)))

    def _exchange(self, topic: str, word: Callable[[], bytes]) -> Word:
        if len(self._unsettled) >= _MEET_EVERY:
            self._group.gather(f"{topic}/met", b"", deadline_s=self._deadline_s)
            for earlier in self._unsettled:
                self._group.settle(earlier)
            self._unsettled = []
        began_s = self._ambient.monotonic()
        message = self._group.spread(topic, word() if self._group.rank == 0 else None, deadline_s=self._deadline_s)
        self._cost_s = self._ambient.monotonic() - began_s + self._group.world_size * _ASKED_S_PER_RANK
        self._unsettled.append(topic)
        return msgspec.json.decode(message, type=Word)

    def _following(self, step: int) -> int:
        """Return the step at which to ask next, by what asking costs and how long a step takes."""
        now = self._ambient.monotonic()
        before, self._asked_at = self._asked_at, (step, now)
        if before is None or step <= before[0] or now <= before[1]:
            return step + 1
        step_s = (now - before[1]) / (step - before[0])
        latest = int(_LATE_SHARE * min(self._periods_s) / step_s)
        return step + max(1, min(math.ceil(self._cost_s / (_COST_SHARE * step_s)), latest))


def every(*, updates: int | None = None, minutes: float | None = None) -> Schedule:
    """Return a schedule that saves every `updates` updates and every `minutes` minutes, whichever comes first.

    Raises:
        RequestError: Neither is given, or one is not positive.
    """
    if updates is None and minutes is None:
        raise RequestError("a schedule says when to save", expected="every(updates=...) or every(minutes=...)")
    return Schedule(updates, minutes)
