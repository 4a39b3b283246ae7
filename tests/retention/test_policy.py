"""What the policy keeps, decided on plain records."""

from __future__ import annotations

import datetime
import math
import random
from dataclasses import replace

import pytest

from safepoint.errors import RequestError
from safepoint.retention.policy import Candidate, Decision, Keep, Standing, decide, find_unmet, keep

WRONG_TIMES: list[dict[str, object]] = [
    {"within": within} for within in ("36", "", 0, -1, math.nan, math.inf, True, datetime.timedelta(0), [])
]


def candidate(
    step: int,
    standing: Standing = "good",
    *,
    loss: float | None = None,
    is_verified: bool = False,
    shares: str | None = None,
    hour: float | None = None,
    is_refused: bool = False,
) -> Candidate:
    name = f"g{step}"
    objects = {(name, "data")} | ({(shares, "data")} if shares else set())
    metrics = {} if loss is None else {"loss": loss}
    saved_s = None if hour is None else hour * 3600
    return Candidate(name, step, standing, is_verified, metrics, frozenset(objects), saved_s, is_refused)


def kept(candidates: list[Candidate], policy: Keep, **protected: str) -> list[int]:
    decisions = decide(sorted(candidates, key=lambda entry: -entry.step), policy, protected=protected)
    return sorted(decision.step for decision in decisions if decision.is_kept)


def test_the_last_ones_are_kept_and_older_ones_go() -> None:
    assert kept([candidate(step) for step in range(1, 8)], keep(last=3)) == [5, 6, 7]


def test_a_limit_of_one_leaves_two_that_share_nothing() -> None:
    """A limit of one with and without a best one once removed every checkpoint."""
    assert kept([candidate(step) for step in (1, 2, 3)], keep(last=1)) == [2, 3]
    assert kept(
        [candidate(1, loss=0.1), candidate(2, loss=0.5), candidate(3, loss=0.9)], keep(1, best=("loss", "min"))
    ) == [
        1,
        3,
    ]
    assert kept([candidate(1)], keep(last=1)) == [1]


def test_the_newest_one_that_the_contract_does_not_refuse_stays_until_there_is_a_newer_one() -> None:
    """Spec: C12.9"""
    found = [candidate(1), candidate(2), *(candidate(step, is_refused=True) for step in (3, 4, 5))]
    assert kept(found, keep(last=2)) == [2, 4, 5]
    assert kept([*found, candidate(6)], keep(last=2)) == [5, 6]
    assert kept([candidate(step, is_refused=True) for step in (1, 2, 3)], keep(last=2)) == [2, 3]
    assert kept([candidate(1), candidate(2, "damaged"), *found[2:]], keep(last=2)) == [1, 4, 5]


def test_of_two_of_one_step_the_newer_takes_the_only_place() -> None:
    """Spec: C12.10"""
    first, second = candidate(96, loss=0.1), replace(candidate(96, loss=0.1), generation="g96-again")
    second = replace(second, objects=frozenset({("g96-again", "data")}))
    found = [second, first, candidate(80), candidate(64), candidate(48, "damaged")]
    decided = {entry.generation: entry.is_kept for entry in decide(found, keep(last=2), protected={})}
    assert decided == {"g96-again": True, "g96": False, "g80": True, "g64": False, "g48": False}
    for policy, protected in ((keep(last=2, best=("loss", "min")), {}), (keep(last=2), {"g96": "pinned"})):
        kept_ones = {entry.generation for entry in decide(found, policy, protected=protected) if entry.is_kept}
        assert kept_ones == {"g96-again", "g96", "g80"}, "of equal ones the older stays as the best"
    damaged = [candidate(100, "damaged"), second, first, candidate(90, "damaged")]
    assert all(entry.is_kept for entry in decide(damaged, keep(last=2), protected={})), "of one newer step only"


def test_a_doubtful_one_stays_beside_what_is_kept_without_it_and_takes_no_place() -> None:
    """Spec: C12.5"""
    four = [candidate(1), candidate(2), candidate(3, "doubtful"), candidate(4)]
    assert kept(four, keep(last=2)) == [2, 3, 4]
    assert kept(four, keep(last=1)) == [2, 4]
    losses = [candidate(1, loss=0.2), candidate(2, "doubtful", loss=0.1), *(candidate(step, loss=1) for step in (3, 4))]
    assert kept(losses, keep(last=1, best=("loss", "min"))) == [1, 2, 4]
    assert kept([candidate(1, "doubtful"), candidate(2)], keep(last=1)) == [1, 2], "there are no two good ones"
    assert find_unmet([candidate(2), candidate(1, "doubtful", loss=1.0)], keep(best=("loss", "min"))) == ""


def test_the_best_one_never_displaces_the_newest() -> None:
    """With the best at step 2 of 10, the newest three and the best stay."""
    candidates = [candidate(step, loss=0.1 if step == 2 else 1.0) for step in range(1, 11)]
    assert kept(candidates, keep(last=3, best=("loss", "min"))) == [2, 8, 9, 10]


def test_the_best_is_the_least_or_the_greatest_as_asked_for() -> None:
    candidates = [candidate(1, loss=3.0), candidate(2, loss=1.0), candidate(3, loss=2.0), candidate(4), candidate(5)]
    assert kept(candidates, keep(last=2, best=("loss", "min"))) == [2, 4, 5]
    assert kept(candidates, keep(last=2, best=("loss", "max"))) == [1, 4, 5]


def test_a_rule_that_keeps_nothing_is_told_with_the_metrics_that_there_are() -> None:
    candidates = [candidate(1, loss=3.0), candidate(2)]
    assert find_unmet(candidates, keep(best=("loss", "min"))) == find_unmet(candidates, keep()) == ""
    assert find_unmet([], keep(best=("lss", "min"))) == ""
    assert "'lss'" in (told := find_unmet(candidates, keep(best=("lss", "min")))) and "they have loss" in told
    assert "no metrics" in find_unmet(candidates[1:], keep(best=("loss", "min")))
    assert "'loss'" in find_unmet([candidate(1, loss=math.nan)], keep(best=("loss", "min")))


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("mode", ["min", "max"])
def test_a_value_that_is_not_finite_is_never_the_best(value: float, mode: str) -> None:
    candidates = [candidate(1, loss=value), candidate(2, loss=5.0), candidate(3), candidate(4)]
    assert kept(candidates, Keep(2, None, ("loss", mode))) == [2, 3, 4]  # type: ignore[arg-type]  # mode is one of two


def test_the_choice_of_the_best_of_equals_does_not_change_as_others_come() -> None:
    candidates = [candidate(step, loss=1.0) for step in range(1, 9)]
    for count in range(3, 9):
        assert 1 in kept(candidates[:count], keep(last=2, best=("loss", "min")))


def test_a_regular_one_is_the_first_at_or_after_each_multiple() -> None:
    """Saves at multiples of 30 never meet one of 100, yet each hundred is represented."""
    candidates = [candidate(step) for step in range(30, 400, 30)]
    assert kept(candidates, keep(last=2, every=100)) == [120, 210, 300, 360, 390]


def test_a_damaged_one_does_not_stand_for_its_multiple() -> None:
    candidates = [candidate(100, "damaged"), candidate(130), *(candidate(step) for step in (210, 240, 270))]
    assert 130 in kept(candidates, keep(last=2, every=100))


def test_damaged_ones_do_not_count_towards_the_last() -> None:
    """A damaged newest one and sparse older ones once cost 8,000 steps."""
    candidates = [candidate(1), candidate(2), candidate(3, "damaged"), candidate(4, "damaged"), candidate(5)]
    assert {1, 2, 5} - set(kept(candidates, keep(last=2))) == {1}
    assert {2, 5} <= set(kept(candidates, keep(last=2)))


def test_an_old_damaged_one_goes_once_enough_newer_ones_are_good() -> None:
    candidates = [candidate(1, "damaged"), *(candidate(step) for step in (2, 3, 4))]
    assert kept(candidates, keep(last=3)) == [2, 3, 4]
    assert kept(candidates[:3], keep(last=3)) == [1, 2, 3]


def test_one_of_unknown_outcome_is_neither_counted_nor_deleted() -> None:
    candidates = [candidate(1), candidate(2), candidate(3, "unknown"), candidate(4), candidate(5)]
    assert kept(candidates, keep(last=2)) == [3, 4, 5]
    assert kept([candidate(1), candidate(2), candidate(3, "unknown")], keep(last=2)) == [1, 2, 3]


def test_a_superseded_branch_goes_only_after_the_live_one_is_past_it() -> None:
    """A restarted run in an old folder loses neither its own first checkpoint nor the old branch."""
    old = [candidate(step, "superseded") for step in (500, 600, 700)]
    assert kept([*old, candidate(100)], keep(last=3)) == [100, 500, 600, 700]
    live = [candidate(step) for step in (100, 550, 560)]
    assert kept([*old, *live], keep(last=3)) == [100, 550, 560, 600, 700]


def test_nothing_is_deleted_while_no_two_share_nothing() -> None:
    chain = [candidate(step, shares="g1") for step in (2, 3, 4)]
    assert kept([candidate(1), *chain], keep(last=1)) == [1, 2, 3, 4]


def test_ones_that_share_an_object_count_as_one_copy() -> None:
    candidates = [candidate(1), candidate(2), candidate(3, shares="g2"), candidate(4, shares="g2")]
    assert kept(candidates, keep(last=2)) == [1, 3, 4]
    assert kept([*candidates, candidate(5)], keep(last=2)) == [4, 5]


def test_the_newest_that_was_read_back_stays() -> None:
    candidates = [candidate(1, is_verified=True), candidate(2, is_verified=True), *map(candidate, (3, 4, 5))]
    assert kept(candidates, keep(last=2)) == [2, 4, 5]


def test_a_protected_one_stays() -> None:
    assert kept([candidate(step) for step in range(1, 6)], keep(last=2), g1="resumed from it") == [1, 4, 5]


def at_hours(*hours: float | None) -> list[Candidate]:
    """Return checkpoints of the steps 1, 2, 3 … that say that they were saved at these hours."""
    return [candidate(step, hour=hour) for step, hour in enumerate(hours, start=1)]


@pytest.mark.parametrize("within", ["3h", 3 * 3600, datetime.timedelta(hours=3)])
def test_what_was_saved_within_a_time_before_the_newest_two_stays(within: str | float | datetime.timedelta) -> None:
    assert kept(at_hours(0, 1, 2, 3, 4, 5, 6), keep(last=1, within=within)) == [3, 4, 5, 6, 7]


def test_a_clock_that_was_set_back_lets_nothing_go_that_is_not_older_by_it() -> None:
    """A day back after the third: by its own times the third will be old in more than a day."""
    assert kept(at_hours(0, 1, 2, -22, -21, -20), keep(last=1, within="3h")) == [1, 2, 3, 4, 5, 6]
    assert kept(at_hours(0, 1, 2, -22, -21, *range(-20, 9)), keep(last=1, within="3h"))[:2] == [30, 31]


def test_one_that_lies_before_an_older_one_is_as_young_as_that() -> None:
    """For the fourth save alone the clock was a day behind."""
    assert kept(at_hours(0, 1, 2, -21, 4, 5), keep(last=1, within="3h")) == [2, 3, 4, 5, 6]


@pytest.mark.parametrize("newest", [(6.0, 9000.0), (9000.0, 6.0), (9000.0, None), (6.0, -9000.0)])
def test_a_clock_that_is_ahead_for_one_save_ages_no_other(newest: tuple[float, float | None]) -> None:
    assert set(range(4, 8)) <= set(kept(at_hours(0, 1, 2, 3, 4, 5, *newest), keep(last=1, within="3h")))


def test_one_far_ahead_stays_and_keeps_no_other() -> None:
    """Else everything since would stay until that time has come."""
    assert kept(at_hours(0, 9000, 2, 3, 4, 5, 6, 7), keep(last=1, within="3h")) == [2, 4, 5, 6, 7, 8]


def test_one_whose_time_cannot_be_read_stays() -> None:
    assert kept(at_hours(0, None, 2, 9, 10), keep(last=1, within="3h")) == [2, 4, 5]
    assert kept(at_hours(None, None, None, None), keep(last=1, within="3h")) == [1, 2, 3, 4]


def test_a_single_wrong_time_never_lets_another_one_go(chance: random.Random) -> None:
    """What is within the time by the right clock stays, whatever one save says of itself."""
    for _ in range(300):
        hours: list[float | None] = []
        hour = 0.0
        for _ in range(chance.randint(3, 12)):
            hour += chance.uniform(0.1, 2.0)
            hours.append(hour)
        wrong = chance.randrange(len(hours))
        young = {step for step, at in enumerate(hours, start=1) if at is not None and hour - at <= 5.0} - {wrong + 1}
        hours[wrong] = chance.choice([None, chance.uniform(-1e5, 1e5), chance.uniform(0, hour)])
        assert young <= set(kept(at_hours(*hours), keep(last=1, within="5h"))), (hours, wrong)


def test_a_clock_that_only_goes_back_lets_nothing_go_that_is_young(chance: random.Random) -> None:
    for _ in range(300):
        hour, behind = 0.0, 0.0
        right, told = [], []
        for _ in range(chance.randint(3, 12)):
            hour += chance.uniform(0.1, 2.0)
            behind += chance.choice([0.0, 0.0, chance.uniform(0, 48)])
            right.append(hour)
            told.append(hour - behind)
        young = {step for step, at in enumerate(right, start=1) if hour - at <= 5.0}
        assert young <= set(kept(at_hours(*told), keep(last=1, within="5h"))), told


def test_every_decision_gives_its_reasons() -> None:
    candidates = [candidate(step, loss=float(step)) for step in (5, 4, 3, 2, 1)]
    decisions = decide(candidates, keep(last=2, best=("loss", "min"), every=3), protected={"g2": "pinned"})
    assert decisions == [
        Decision("g5", 5, True, ("the newest",)),
        Decision("g4", 4, True, ("among the last 2",)),
        Decision("g3", 3, True, ("the first at or after step 3 (every 3)",)),
        Decision("g2", 2, True, ("pinned",)),
        Decision("g1", 1, True, ("the best by loss (min 1)",)),
    ]


@pytest.mark.parametrize(
    "arguments",
    [
        {"last": 0},
        {"last": True},
        {"every": 0},
        {"every": 1.5},
        {"best": "loss"},
        {"best": ("loss", "least")},
        *WRONG_TIMES,
    ],
)
def test_an_unusable_policy_is_refused_at_once(arguments: dict[str, object]) -> None:
    with pytest.raises(RequestError, match=r"retention policy|duration"):
        keep(**arguments)  # type: ignore[arg-type]  # wrong on purpose
