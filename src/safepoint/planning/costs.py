"""What a job's saves and failures cost, as numbers that fit together."""

from __future__ import annotations

import math
from dataclasses import dataclass

from safepoint.errors import RequestError


@dataclass(frozen=True, slots=True)
class Costs:
    """State what saving and failing cost; all in seconds.

    Args:
        save_s: From the beginning of a save until it is durable.
        blocked_s: How long training stands still for it: all of `save_s` where it is synchronous.
        restore_s: From a failure until training goes on.
        mtbf_s: Mean time between failures of the whole job; None where nothing is known of it.

    Raises:
        RequestError: A number is negative or not finite, or training waits longer than the save lasts.
    """

    save_s: float
    blocked_s: float
    restore_s: float
    mtbf_s: float | None = None

    def __post_init__(self) -> None:
        _check("the time of a save", self.save_s)
        _check("the time for which a save blocks training", self.blocked_s, is_zero_allowed=True)
        _check("the time of a restore", self.restore_s, is_zero_allowed=True)
        if self.mtbf_s is not None:
            _check("the mean time between failures", self.mtbf_s)
        if self.blocked_s > self.save_s:
            raise RequestError(
                "a save cannot block training for longer than it lasts",
                expected=f"at most {self.save_s:g} s",
                found=f"{self.blocked_s:g} s",
            )

    @property
    def is_background(self) -> bool:
        """Return whether training goes on before the save is durable."""
        return self.blocked_s < self.save_s

    @property
    def behind_s(self) -> float:
        """Return for how long training goes on while the save becomes durable."""
        return self.save_s - self.blocked_s

    def check_work(self, work_s: float) -> None:
        """Raise `RequestError` where so much work between saves cannot be."""
        _check("the work between two saves", work_s)
        if work_s < self.behind_s:
            raise RequestError(
                "a save would begin before the one before it is durable",
                expected=f"at least {self.behind_s:g} s of work between two saves",
                found=f"{work_s:g} s",
            )


def _check(subject: str, seconds: float, *, is_zero_allowed: bool = False) -> None:
    if not math.isfinite(seconds) or seconds < 0 or (seconds == 0 and not is_zero_allowed):
        expected = "0 s or more" if is_zero_allowed else "more than 0 s"
        raise RequestError(f"{subject} makes no sense", expected=expected, found=f"{seconds:g} s")
