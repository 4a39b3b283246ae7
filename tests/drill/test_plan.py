"""Plan kills from a seed, and find their places among the events of a start."""

from __future__ import annotations

import pytest

from safepoint.drill.events import Committed, Event, Phase, Restored, Update
from safepoint.drill.plan import PHASES, Kill, Trigger, check_kills, plan_kills
from safepoint.errors import RequestError

EVENTS: tuple[Event, ...] = (
    Restored(3, "step-3"),
    Update(4),
    Update(5),
    Phase("stage"),
    Phase("write"),
    Committed(5, "step-5"),
    Update(6),
    Phase("stage"),
    Phase("write"),
)


def place(kill: Kill) -> int | None:
    trigger = Trigger(kill)
    return next((index for index, event in enumerate(EVENTS) if trigger.meets(event)), None)


@pytest.mark.parametrize(
    ("kill", "index"),
    [
        (Kill(0), 0),
        (Kill(3), 0),
        (Kill(4), 1),
        (Kill(6), 6),
        (Kill(7), None),
        (Kill(0, "write"), 4),
        (Kill(5, "stage"), 3),
        (Kill(6, "write"), 8),
        (Kill(6, "publish"), None),
    ],
)
def test_a_kill_has_exactly_one_place(kill: Kill, index: int | None) -> None:
    assert place(kill) == index


def test_the_same_seed_gives_the_same_kills_and_another_seed_others(seed: int) -> None:
    assert plan_kills(20, seed=seed, updates=60) == plan_kills(20, seed=seed, updates=60)
    assert plan_kills(20, seed=seed, updates=60) != plan_kills(20, seed=seed + 1, updates=60)


def test_planned_kills_lie_within_the_run_and_never_behind_one_another(seed: int) -> None:
    kills = plan_kills(500, seed=seed, updates=7)
    assert [kill.update for kill in kills] == sorted(kill.update for kill in kills)
    assert {kill.update for kill in kills} == set(range(8))
    assert {kill.phase for kill in kills} == {None, *PHASES}
    assert all(0 <= kill.delay < 2 for kill in kills)
    check_kills(kills, updates=7)


def test_the_last_kill_comes_when_there_is_something_to_resume_and_the_others_stay(seed: int) -> None:
    for offset in range(50):
        free = plan_kills(2, seed=seed + offset, updates=12)
        bound = plan_kills(2, seed=seed + offset, updates=12, resumable_from=9)
        assert bound[-1].update == max(free[-1].update, 9)
        assert bound[:-1] == free[:-1]
    assert plan_kills(1, seed=seed, updates=12, resumable_from=13)[-1].update == 12


@pytest.mark.parametrize("kill", [Kill(8), Kill(-1), Kill(3, "wriet")])
def test_a_kill_that_no_run_reaches_is_refused(kill: Kill) -> None:
    with pytest.raises(RequestError):
        check_kills((kill,), updates=7)
