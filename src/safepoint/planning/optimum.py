"""The interval that costs least: by Young, by Daly, and exactly.

All three are amounts of work between two saves; they exclude the time of the save.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from safepoint.planning.costs import Costs

# Within this part of the exact optimum an estimate counts as right: the effective time is flat there.
AGREES_WITHIN = 0.1
_HALVINGS = 100


@dataclass(frozen=True, slots=True)
class Optimum:
    """Hold the work between saves that costs least, in seconds: two estimates, and what is exact for a constant rate.

    `doubts` says where the estimates do not apply.
    """

    young_s: float
    daly_s: float
    exact_s: float
    doubts: tuple[str, ...]


def find_optimum(costs: Costs, mtbf_s: float) -> Optimum:
    """Return the work between saves that costs least."""
    young_s, daly_s = young(costs.blocked_s, mtbf_s), daly(costs.blocked_s, mtbf_s)
    exact_s = best_work(costs, mtbf_s)
    return Optimum(young_s, daly_s, exact_s, tuple(_doubts(costs, mtbf_s, young_s, daly_s, exact_s)))


def young(blocked_s: float, mtbf_s: float) -> float:
    """Return Young's estimate, right where a save is short beside the time between failures.

    Source: J. W. Young, "A first order approximation to the optimum checkpoint interval", CACM 17 (1974).
    """
    return math.sqrt(2 * blocked_s * mtbf_s)


def daly(blocked_s: float, mtbf_s: float) -> float:
    """Return Daly's estimate of higher order.

    Source: J. T. Daly, as in `safepoint.planning.forecast`, equation 37.
    """
    if blocked_s >= 2 * mtbf_s:
        return mtbf_s
    part = blocked_s / (2 * mtbf_s)
    return math.sqrt(2 * blocked_s * mtbf_s) * (1 + math.sqrt(part) / 3 + part / 9) - blocked_s


def best_work(costs: Costs, mtbf_s: float) -> float:
    """Return the work between saves at which the most of the time is effective.

    The derivative of the effective share is zero where T / M = 1 - exp(-(T + b) / M). It does not depend on how long
    a save in the background takes to become durable, but no interval can be shorter than that.
    """
    low, high = 0.0, 1.0
    for _ in range(_HALVINGS):
        middle = (low + high) / 2
        if middle < -math.expm1(-middle - costs.blocked_s / mtbf_s):
            low = middle
        else:
            high = middle
    return max(high * mtbf_s, costs.behind_s)


def _doubts(costs: Costs, mtbf_s: float, young_s: float, daly_s: float, exact_s: float) -> list[str]:
    doubts = []
    if costs.is_background:
        doubts.append(
            "Young and Daly know no saves in the background: they are given the time that training stands still, and "
            f"nothing of the {costs.save_s:g} s until a save counts, which is lost at each failure and below which no "
            "interval can go"
        )
    for name, estimate_s in (("Young", young_s), ("Daly", daly_s)):
        deviation = estimate_s / exact_s - 1
        if abs(deviation) > AGREES_WITHIN:
            doubts.append(f"{name} does not apply: its interval is off the exact optimum by {deviation:+.0%}")
    if exact_s > AGREES_WITHIN * mtbf_s * 3:
        doubts.append(
            f"the best interval is {exact_s / mtbf_s:.0%} of the time between failures: a failure loses less than half "
            "of it on average, and a run makes little headway between two failures"
        )
    return doubts
