"""Play failures at random moments, and count what is kept."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from safepoint.faults.chance import Chance
from safepoint.planning.costs import Costs

FAILURES = 4000
# An interval counts as good as the best where less than this share of all time lies between them.
PLATEAU = 0.002
_BATCHES = 20
_RESOLUTION = 1 << 53
_COARSE, _FINE = 28, 13
_SHORTEST, _LONGEST = 1e-6, 3.0


@dataclass(frozen=True, slots=True)
class Simulated:
    """Hold what came of the failures played: the effective share of the time, twice its standard error, and what a
    failure of the training lost on average.
    """

    effective: float
    error: float
    lost_s: float


@dataclass(frozen=True, slots=True)
class Search:
    """Hold the best work between saves, and the shortest and longest that are as good; in seconds.

    As good means: within this share of all time, which is `PLATEAU` and the error of the simulation.
    """

    within: float
    best_s: float
    shortest_s: float
    longest_s: float


def draw_gaps(mtbf_s: float, *, seed: int, count: int = FAILURES) -> list[float]:
    """Return times between failures at a constant rate; the same seed gives the same ones."""
    chance = Chance("plan", seed)
    return [-mtbf_s * math.log((chance.below(_RESOLUTION) + 1) / _RESOLUTION) for _ in range(count)]


def simulate(costs: Costs, work_s: float, gaps: Sequence[float]) -> Simulated:
    """Return what is kept of a job that fails after each of these gaps; a restore may fail, and begins again."""
    size = max(1, len(gaps) // _BATCHES)
    batches = [gaps[start : start + size] for start in range(0, size * _BATCHES, size)]
    kept = [_checkpoints(costs, work_s, batch) * work_s for batch in batches]
    shares = [work / sum(batch) for work, batch in zip(kept, batches, strict=True)]
    error = 2 * statistics.stdev(shares) / math.sqrt(len(shares))
    trained = [gap - costs.restore_s for gap in gaps if gap >= costs.restore_s]
    lost_s = sum(trained) - _checkpoints(costs, work_s, gaps) * (work_s + costs.blocked_s)
    total_s = sum(sum(batch) for batch in batches)
    return Simulated(sum(kept) / total_s, error, lost_s / len(trained) if trained else math.nan)


def search(costs: Costs, mtbf_s: float, gaps: Sequence[float]) -> Search:
    """Return the interval that keeps most under these failures, by trying many from short to long."""
    low = max(costs.behind_s, mtbf_s * _SHORTEST)
    tried = _try(costs, gaps, low, max(mtbf_s * _LONGEST, 2 * low), _COARSE)
    near = sorted(tried)
    place = near.index(max(near, key=tried.__getitem__))
    tried |= _try(costs, gaps, near[max(place - 1, 0)], near[min(place + 1, len(near) - 1)], _FINE)
    best_s = max(tried, key=tried.__getitem__)
    within = PLATEAU + simulate(costs, best_s, gaps).error
    good = [work_s for work_s, effective in tried.items() if effective >= tried[best_s] - within]
    return Search(within, best_s, min(good), max(good))


def _try(costs: Costs, gaps: Sequence[float], low: float, high: float, count: int) -> dict[float, float]:
    steps = [low * (high / low) ** (number / (count - 1)) for number in range(count)]
    total_s = sum(gaps)
    return {work_s: _checkpoints(costs, work_s, gaps) * work_s / total_s for work_s in steps}


def _checkpoints(costs: Costs, work_s: float, gaps: Sequence[float]) -> int:
    """Return how many checkpoints become durable between the failures: one for each period after a restore."""
    before_s = costs.restore_s + costs.behind_s
    period_s = work_s + costs.blocked_s
    return int(sum(max(0.0, gap - before_s) // period_s for gap in gaps))
