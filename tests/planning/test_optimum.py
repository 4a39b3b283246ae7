"""The best interval: by the formulas of the literature where they apply, and with a warning where they do not."""

from __future__ import annotations

import math

import pytest

from safepoint.planning.costs import Costs
from safepoint.planning.forecast import divide
from safepoint.planning.optimum import best_work, daly, find_optimum, young

HOUR = 3600.0
# A save as a part of the time between failures.
EVERY_SIZE = (1e-6, 1e-4, 1e-3, 0.01, 0.05, 0.25, 0.5, 2.0)


@pytest.mark.parametrize("size", EVERY_SIZE)
@pytest.mark.parametrize("restore_s", [0.0, HOUR])
def test_no_other_interval_leaves_more_time_for_work(size: float, restore_s: float) -> None:
    costs = Costs(size * HOUR, size * HOUR, restore_s, HOUR)
    best_s = best_work(costs, HOUR)
    best = divide(costs, best_s, HOUR).effective
    assert all(divide(costs, best_s * factor, HOUR).effective < best for factor in (0.3, 0.9, 0.99, 1.01, 1.1, 3.0))


def test_young_and_daly_give_the_values_of_their_formulas() -> None:
    assert young(120.0, 60_000.0) == math.sqrt(14_400_000.0)
    # With a save of 2 and a time between failures of 100: 20 * (1 + 1/30 + 1/900) - 2.
    assert daly(2.0, 100.0) == pytest.approx(18.0 + 20 / 30 + 20 / 900)
    assert daly(200.0, 100.0) == daly(500.0, 100.0) == 100.0


@pytest.mark.parametrize("size", [size for size in EVERY_SIZE if size <= 0.01])
def test_young_is_within_5_percent_where_a_save_takes_at_most_a_hundredth(size: float) -> None:
    best_s = best_work(Costs(size, size, 0.0, 1.0), 1.0)
    assert best_s <= young(size, 1.0) <= 1.05 * best_s


@pytest.mark.parametrize("size", [size for size in EVERY_SIZE if size <= 0.5])
def test_daly_is_within_1_percent_where_a_save_takes_at_most_half(size: float) -> None:
    assert daly(size, 1.0) == pytest.approx(best_work(Costs(size, size, 0.0, 1.0), 1.0), rel=0.01)


def test_where_theory_holds_nothing_is_doubted() -> None:
    assert find_optimum(Costs(60.0, 60.0, 240.0, 24 * HOUR), 24 * HOUR).doubts == ()


def test_near_the_time_between_failures_young_is_doubted() -> None:
    doubts = " ".join(find_optimum(Costs(HOUR, HOUR, 0.0, 3 * HOUR), 3 * HOUR).doubts)
    assert "Young does not apply" in doubts
    assert "Daly does not apply" not in doubts
    assert "of the time between failures" in doubts


def test_saves_in_the_background_are_beyond_the_formulas() -> None:
    optimum = find_optimum(Costs(300.0, 1.0, 600.0, 3 * HOUR), 3 * HOUR)
    assert "in the background" in optimum.doubts[0]
    assert "Daly does not apply" in " ".join(optimum.doubts)
    # The formulas would begin a save before the one before it is durable.
    assert optimum.daly_s < optimum.exact_s == 299.0


def test_a_longer_save_in_the_background_moves_no_optimum_until_it_fills_the_interval() -> None:
    short = best_work(Costs(10.0, 10.0, 0.0, 24 * HOUR), 24 * HOUR)
    assert best_work(Costs(1000.0, 10.0, 0.0, 24 * HOUR), 24 * HOUR) == short
    assert best_work(Costs(2010.0, 10.0, 0.0, 24 * HOUR), 24 * HOUR) == 2000.0
