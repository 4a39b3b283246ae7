"""Walk through a job second by event, as a person would with pencil and paper: the judge of formulas and simulation."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass


@dataclass
class Walked:
    """Add up where the time went, in seconds."""

    kept: float = 0.0
    blocked: float = 0.0
    lost: float = 0.0
    restoring: float = 0.0

    @property
    def total(self) -> float:
        return self.kept + self.blocked + self.lost + self.restoring


def walk(
    gaps: Iterable[float], *, work_s: float, blocked_s: float, behind_s: float, restore_s: float
) -> tuple[Walked, list[float]]:
    """Return where the time went between failures, and what each failure of the training lost.

    A start restores, then works and saves in turn. A save counts when it is durable, `behind_s` after training has gone
    on; what was done since the boundary of the last one that counts is lost.
    """
    sums, losses = Walked(), []
    for gap in gaps:
        if gap < restore_s:
            sums.restoring += gap
            continue
        sums.restoring += restore_s
        now, due, counted = restore_s, list[float](), 0
        while now < gap:
            now += work_s + blocked_s
            due.append(now + behind_s)
        counted = sum(moment <= gap for moment in due)
        sums.kept += counted * work_s
        sums.blocked += counted * blocked_s
        losses.append(gap - restore_s - counted * (work_s + blocked_s))
        sums.lost += losses[-1]
    return sums, losses
