"""What an interval costs on average: closed forms, exact for failures at a constant rate.

With M the mean time between failures, T the work and P = T + b the period, b the time blocked, d the time of a save and
R that of a restore: after a restore, the first checkpoint stands if nothing fails for T + d, and each one after it if
nothing fails for P more. So between two failures there are exp(-(T + d) / M) / (1 - exp(-P / M)) checkpoints on
average, each with its T of work. A restore may fail too and begins again, so a failure takes M exp(R / M) with the time
of training after it.

Source: J. T. Daly, "A higher order estimate of the optimum checkpoint interval for restart dumps", Future Generation
Computer Systems 22 (2006), for synchronous saves, where d = b.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from safepoint.planning.costs import Costs


@dataclass(frozen=True, slots=True)
class Shares:
    """Divide all time of a job; the four parts make 1. `effective` is spent on work that is kept."""

    effective: float
    saving: float
    lost: float
    restoring: float


@dataclass(frozen=True, slots=True)
class Forecast:
    """Tell what an interval costs.

    Args:
        work_s: Work between two saves.
        period_s: From save to save.
        overhead: Share of the time without failures in which training stands still for saves.
        half_interval_s: What a failure loses on average by the rule of half the interval: half the period, and what
            training did behind a save in the background until it was durable.
        lost_s: What a failure loses on average, exactly: less than half, as a failure cuts long periods short; None
            where the rate of failures is unknown.
        delay_s: From a failure until training goes on.
        shares: Where the time goes; None where the rate of failures is unknown.
    """

    work_s: float
    period_s: float
    overhead: float
    half_interval_s: float
    lost_s: float | None
    delay_s: float
    shares: Shares | None


@dataclass(frozen=True, slots=True)
class Incident:
    """Tell what one failure costs: work lost, the delay until training goes on, and both."""

    lost_s: float
    delay_s: float
    behind_s: float


def forecast(costs: Costs, work_s: float) -> Forecast:
    """Return what so much work between saves costs.

    Raises:
        RequestError: So little work between saves cannot be.
    """
    costs.check_work(work_s)
    period_s = work_s + costs.blocked_s
    return Forecast(
        work_s=work_s,
        period_s=period_s,
        overhead=costs.blocked_s / period_s,
        half_interval_s=period_s / 2 + costs.behind_s,
        lost_s=None if costs.mtbf_s is None else costs.mtbf_s - period_s * _kept(costs, work_s, costs.mtbf_s),
        delay_s=costs.restore_s,
        shares=None if costs.mtbf_s is None else divide(costs, work_s, costs.mtbf_s),
    )


def divide(costs: Costs, work_s: float, mtbf_s: float) -> Shares:
    """Return where the time of a job goes."""
    period_s = work_s + costs.blocked_s
    # The training between two failures takes this share of the time between them; restores take the rest.
    training = math.exp(-costs.restore_s / mtbf_s)
    kept = _kept(costs, work_s, mtbf_s) / mtbf_s * training
    return Shares(
        effective=work_s * kept,
        saving=costs.blocked_s * kept,
        lost=training - period_s * kept,
        restoring=1 - training,
    )


def incident(costs: Costs, since_save_s: float) -> Incident:
    """Return what a failure costs that comes so long after the last save was completed."""
    lost_s = since_save_s + costs.behind_s
    return Incident(lost_s, costs.restore_s, lost_s + costs.restore_s)


def _kept(costs: Costs, work_s: float, mtbf_s: float) -> float:
    """Return how many checkpoints are made between two failures on average."""
    return math.exp(-(work_s + costs.save_s) / mtbf_s) / -math.expm1(-(work_s + costs.blocked_s) / mtbf_s)
