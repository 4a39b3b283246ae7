"""What an interval costs, by values worked out by hand and by a walk through many failures."""

from __future__ import annotations

import math
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from safepoint.errors import RequestError
from safepoint.planning.costs import Costs
from safepoint.planning.forecast import divide, forecast, incident
from tests.planning.walk import walk

MINUTE, HOUR = 60.0, 3600.0
SYNCHRONOUS = Costs(save_s=60.0, blocked_s=60.0, restore_s=240.0)


def test_a_save_every_20_minutes_that_takes_one_of_them() -> None:
    """The interval includes the save: 19 minutes of work and 1 of saving."""
    found = forecast(SYNCHRONOUS, 19 * MINUTE)
    assert found.period_s == 20 * MINUTE
    assert found.overhead == 1 / 20
    assert found.half_interval_s == 10 * MINUTE
    assert found.delay_s == 4 * MINUTE
    assert (found.lost_s, found.shares) == (None, None)


def test_a_save_after_every_20_minutes_of_work() -> None:
    """The interval excludes the save, so that a save is made every 21 minutes."""
    found = forecast(SYNCHRONOUS, 20 * MINUTE)
    assert found.period_s == 21 * MINUTE
    assert found.overhead == 1 / 21
    assert found.half_interval_s == 10.5 * MINUTE


def test_a_failure_17_minutes_after_the_last_save() -> None:
    told = incident(SYNCHRONOUS, 17 * MINUTE)
    assert (told.lost_s, told.delay_s, told.behind_s) == (17 * MINUTE, 4 * MINUTE, 21 * MINUTE)


def test_what_training_did_behind_a_save_is_lost_too() -> None:
    """The save was begun 5 minutes before it was complete, and held training up for 1 of them."""
    background = Costs(save_s=5 * MINUTE, blocked_s=MINUTE, restore_s=4 * MINUTE)
    assert incident(background, 17 * MINUTE).lost_s == 21 * MINUTE
    assert forecast(background, 19 * MINUTE).half_interval_s == 14 * MINUTE


def test_a_failure_loses_the_mean_of_an_exponential_that_is_cut_at_the_period() -> None:
    """The mean of t over (0, P) with density exp(-t / M) / M, summed up in small steps."""
    mean_s, period_s, steps = 3 * HOUR, 2 * HOUR, 100_000
    moments = [(number + 0.5) * period_s / steps for number in range(steps)]
    weights = [math.exp(-moment / mean_s) for moment in moments]
    expected = sum(moment * weight for moment, weight in zip(moments, weights, strict=True)) / sum(weights)
    found = forecast(Costs(60.0, 60.0, 0.0, mean_s), period_s - 60.0)
    assert found.lost_s == pytest.approx(expected, rel=1e-6)
    assert expected < period_s / 2


@pytest.mark.parametrize(
    "costs, work_s",
    [
        (Costs(60.0, 60.0, 240.0, 2 * HOUR), 20 * MINUTE),
        (Costs(600.0, 600.0, 900.0, HOUR), HOUR),
        (Costs(300.0, 5.0, 600.0, 3 * HOUR), 10 * MINUTE),
        (Costs(1200.0, 0.0, 0.0, HOUR), 20 * MINUTE),
    ],
    ids=["short save", "near the time between failures", "in the background", "free save as long as the interval"],
)
def test_the_shares_are_those_of_a_walk_through_many_failures(
    costs: Costs, work_s: float, chance: random.Random
) -> None:
    mtbf_s = costs.mtbf_s
    assert mtbf_s is not None
    gaps = [chance.expovariate(1 / mtbf_s) for _ in range(20_000)]
    sums, losses = walk(
        gaps, work_s=work_s, blocked_s=costs.blocked_s, behind_s=costs.behind_s, restore_s=costs.restore_s
    )
    found = forecast(costs, work_s)
    assert found.shares is not None and found.lost_s is not None
    assert found.shares.effective == pytest.approx(sums.kept / sums.total, abs=0.01)
    assert found.shares.saving == pytest.approx(sums.blocked / sums.total, abs=0.005)
    assert found.shares.lost == pytest.approx(sums.lost / sums.total, abs=0.01)
    assert found.shares.restoring == pytest.approx(sums.restoring / sums.total, abs=0.01)
    assert found.lost_s == pytest.approx(sum(losses) / len(losses), rel=0.03)


@given(
    save_s=st.floats(0.01, 1e4),
    part=st.floats(0, 1),
    restore_s=st.floats(0, 1e4),
    mtbf_s=st.floats(1, 1e8),
    extra_s=st.floats(0.01, 1e6),
)
def test_the_shares_make_one_whatever_the_costs(
    save_s: float, part: float, restore_s: float, mtbf_s: float, extra_s: float
) -> None:
    costs = Costs(save_s, save_s * part, restore_s, mtbf_s)
    shares = divide(costs, costs.behind_s + extra_s, mtbf_s)
    parts = [shares.effective, shares.saving, shares.lost, shares.restoring]
    assert math.fsum(parts) == pytest.approx(1, abs=1e-9)
    assert all(part >= -1e-9 for part in parts)


@pytest.mark.parametrize(
    "numbers",
    [
        (0.0, 0.0, 0.0, None),
        (60.0, 61.0, 0.0, None),
        (60.0, 60.0, -1.0, None),
        (60.0, 60.0, 0.0, 0.0),
        (math.inf, 1.0, 0.0, None),
    ],
)
def test_costs_that_cannot_be_are_refused(numbers: tuple[float, float, float, float | None]) -> None:
    with pytest.raises(RequestError):
        Costs(*numbers)


def test_an_interval_that_is_shorter_than_a_save_in_the_background_is_refused() -> None:
    with pytest.raises(RequestError, match="before the one before it is durable"):
        forecast(Costs(300.0, 5.0, 0.0, HOUR), 294.0)
