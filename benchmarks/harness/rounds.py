"""Interleave candidates: A B C, B C A, C A B, so that a slow minute of the machine falls on all of them alike."""

from __future__ import annotations

import gc
import math
import statistics
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

# One more than is kept: the first round fills caches, buffers and plans, which a long run pays for once.
WARM_UPS = 1


def nothing() -> None:
    """Stand for what a candidate does not need."""


@dataclass(frozen=True, slots=True)
class Candidate:
    """Name what is measured; `measure` returns quantities by name, `before` and `after` are not measured."""

    name: str
    measure: Callable[[], Mapping[str, float]]
    before: Callable[[], object] = nothing
    after: Callable[[], object] = nothing


class Series:
    """Hold what each candidate gave for each quantity, by round."""

    def __init__(self) -> None:
        self._values: dict[str, dict[str, list[float]]] = {}

    def add(self, candidate: str, quantities: Mapping[str, float]) -> None:
        """Add one round of one candidate."""
        for quantity, value in quantities.items():
            self._values.setdefault(quantity, {}).setdefault(candidate, []).append(value)

    def take(self, other: Series, names: Mapping[str, str]) -> None:
        """Add another series, its quantities under other names."""
        for quantity, by_name in other._values.items():
            self._values.setdefault(names.get(quantity, quantity), {}).update(by_name)

    def of(self, quantity: str, candidate: str) -> list[float]:
        """Return the rounds of one quantity of one candidate."""
        return self._values[quantity][candidate]

    def has(self, quantity: str, candidate: str) -> bool:
        """Return whether this was measured."""
        return candidate in self._values.get(quantity, {})

    def best(self, quantity: str, candidates: Iterable[str]) -> str:
        """Return the candidate with the smallest median."""
        measured = [name for name in candidates if self.has(quantity, name)]
        return min(measured, key=lambda name: statistics.median(self.of(quantity, name)))

    def quotient(self, quantity: str, above: str, below: str) -> list[float]:
        """Return, round by round, one candidate's value divided by another's of the same round."""
        pairs = zip(self.of(quantity, above), self.of(quantity, below), strict=True)
        return [over / under if under else float("inf") for over, under in pairs]

    @property
    def rounds(self) -> int:
        """Return how many rounds were kept."""
        return max((len(values) for by_name in self._values.values() for values in by_name.values()), default=0)

    def document(self, digits: int = 6) -> dict[str, dict[str, dict[str, object]]]:
        """Return the whole, with median, least and greatest, as it is printed."""
        return {
            quantity: {
                name: {**spread(values, digits), "rounds": rounded(values, digits)} for name, values in by.items()
            }
            for quantity, by in self._values.items()
        }


def spread(values: Sequence[float], digits: int = 6) -> dict[str, float]:
    """Return median, least and greatest."""
    found = (statistics.median(values), min(values), max(values))
    return dict(zip(("median", "min", "max"), rounded(found, digits), strict=True))


def rounded(values: Iterable[float], digits: int) -> list[float]:
    """Return the values with so many digits behind the point."""
    return [round(value, digits) for value in values]


def interleave(
    candidates: Sequence[Candidate],
    *,
    rounds: int,
    seconds: float = math.inf,
    warm_ups: int = WARM_UPS,
    between: Callable[[], object] = nothing,
) -> Series:
    """Measure every candidate once in each round, and begin each round with the next one.

    Args:
        candidates: What is measured.
        rounds: How many rounds are kept.
        seconds: No further round is begun that would end later than this, going by the longest one; one is always kept.
        warm_ups: Rounds before these, which are not kept.
        between: Called before each candidate, unmeasured; lets the disk come to rest.
    """
    series = Series()
    # What was imported stays; without this each collection walks all of torch.
    gc.collect()
    gc.freeze()
    clock = RoundClock(seconds)
    for turn in range(-warm_ups, rounds):
        if turn > 0 and not clock.has_time:
            break
        start = turn % len(candidates)
        for candidate in [*candidates[start:], *candidates[:start]]:
            candidate.before()
            between()
            gc.collect()
            found = candidate.measure()
            candidate.after()
            if turn >= 0:
                series.add(candidate.name, found)
        clock.end_round()
    return series


class RoundClock:
    """Tell whether there is time for one more round, going by the longest so far."""

    def __init__(self, seconds: float) -> None:
        self._end = time.perf_counter() + seconds
        self._began, self._longest = time.perf_counter(), 0.0

    @property
    def has_time(self) -> bool:
        """Return whether one more round would end in time."""
        return time.perf_counter() + self._longest <= self._end

    def end_round(self) -> None:
        """Mark the end of a round, with which the next one begins."""
        ended = time.perf_counter()
        self._longest, self._began = max(self._longest, ended - self._began), ended


def timed(action: Callable[[], object]) -> dict[str, float]:
    """Return the seconds that an action takes."""
    started = time.perf_counter()
    action()
    return {"seconds": time.perf_counter() - started}
