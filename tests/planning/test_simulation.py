"""The simulation plays what the formulas say, and what a walk on paper gives."""

from __future__ import annotations

import math
import statistics

import pytest

from safepoint.planning.costs import Costs
from safepoint.planning.forecast import divide, forecast
from safepoint.planning.optimum import best_work
from safepoint.planning.simulation import draw_gaps, search, simulate
from tests.planning.walk import walk

HOUR = 3600.0
CASES = {
    "theory holds": Costs(60.0, 60.0, 240.0, 6 * HOUR),
    "near the time between failures": Costs(HOUR, HOUR, 600.0, 3 * HOUR),
    "in the background": Costs(300.0, 1.0, 600.0, 3 * HOUR),
}
each_case = pytest.mark.parametrize("costs", CASES.values(), ids=CASES)


def mtbf(costs: Costs) -> float:
    assert costs.mtbf_s is not None
    return costs.mtbf_s


def test_gaps_are_exponential() -> None:
    """Mean and spread are alike, and of those longer than the mean, a third are longer by the mean once more."""
    gaps = draw_gaps(100.0, seed=1, count=20_000)
    assert statistics.fmean(gaps) == pytest.approx(100, rel=0.03)
    assert statistics.stdev(gaps) == pytest.approx(100, rel=0.03)
    longer = [gap for gap in gaps if gap > 100]
    assert len(longer) / len(gaps) == pytest.approx(1 / math.e, abs=0.01)
    assert sum(gap > 200 for gap in longer) / len(longer) == pytest.approx(1 / math.e, abs=0.02)


def test_the_same_seed_plays_the_same_failures() -> None:
    assert draw_gaps(100.0, seed=1, count=50) == draw_gaps(100.0, seed=1, count=50)
    assert draw_gaps(100.0, seed=1, count=50) != draw_gaps(100.0, seed=2, count=50)


@each_case
def test_what_is_simulated_is_what_a_walk_gives(costs: Costs) -> None:
    gaps = draw_gaps(mtbf(costs), seed=3, count=2000)
    for work_s in (costs.behind_s + 1, 1000.0, HOUR):
        found = simulate(costs, work_s, gaps)
        sums, losses = walk(
            gaps, work_s=work_s, blocked_s=costs.blocked_s, behind_s=costs.behind_s, restore_s=costs.restore_s
        )
        assert found.effective == pytest.approx(sums.kept / sums.total)
        assert found.lost_s == pytest.approx(statistics.fmean(losses))


@each_case
@pytest.mark.parametrize("seed", range(4))
def test_the_simulation_agrees_with_the_closed_form_within_its_error(costs: Costs, seed: int) -> None:
    """Its error is two standard errors, which a seed in twenty exceeds; twice as much none of these does."""
    gaps = draw_gaps(mtbf(costs), seed=seed)
    for work_s in (costs.behind_s + 60, best_work(costs, mtbf(costs)), HOUR):
        found = simulate(costs, work_s, gaps)
        assert abs(found.effective - divide(costs, work_s, mtbf(costs)).effective) < 2 * found.error
        assert found.error < 0.02
        assert found.lost_s == pytest.approx(forecast(costs, work_s).lost_s, rel=0.1)


@each_case
@pytest.mark.parametrize("seed", range(2))
def test_the_exact_optimum_is_among_the_best_intervals_simulated(costs: Costs, seed: int) -> None:
    best_s = best_work(costs, mtbf(costs))
    found = search(costs, mtbf(costs), draw_gaps(mtbf(costs), seed=seed))
    # The intervals tried are this far apart.
    assert found.shortest_s / 1.1 <= best_s <= found.longest_s * 1.1
    loss = divide(costs, best_s, mtbf(costs)).effective - divide(costs, found.best_s, mtbf(costs)).effective
    assert 0 <= loss < found.within
