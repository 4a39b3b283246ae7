"""When a save is due: on multiples of the update, after a time, whichever comes first, and at the end."""

from __future__ import annotations

from pathlib import Path

import pytest

import safepoint as sp
from safepoint.ambient import SystemAmbient
from tests.manager.jobs import build, die, train


class Clock(SystemAmbient):
    """A system whose clock stands still until it is moved."""

    seconds = 0.0

    def monotonic(self) -> float:
        return self.seconds


def steps(job: object) -> list[int]:
    return [one.step for one in job.manager.checkpoints()]  # type: ignore[attr-defined]


def test_a_resumed_run_saves_at_the_steps_of_the_uninterrupted_one(tmp_path: Path) -> None:
    job = build(tmp_path, save=sp.every(updates=5))
    train(job, 7)
    job.manager.save()
    die(job)
    job = build(tmp_path, seed=1, save=sp.every(updates=5))
    job.manager.restore()
    train(job, 11)
    assert steps(job) == [10, 7, 5]
    job.manager.close()


def test_minutes_count_from_the_last_save_or_restore(tmp_path: Path) -> None:
    clock = Clock()
    job = build(tmp_path, save=sp.every(minutes=20), ambient=clock)
    job.manager.restore()
    for moved_s, expected in [(1199, []), (1, [2]), (1, [2]), (1199, [4, 2])]:
        clock.seconds += moved_s
        train(job, job.manager.progress.step + 1)
        assert steps(job) == expected
    job.manager.close()


def test_both_sides_of_a_schedule_hold(tmp_path: Path) -> None:
    clock = Clock()
    job = build(tmp_path, save=sp.every(updates=4, minutes=1), ambient=clock)
    job.manager.restore()
    train(job, 2)
    clock.seconds += 60
    train(job, 5)
    assert steps(job) == [4, 3]
    job.manager.close()


def test_without_a_schedule_only_what_is_asked_for_is_saved(tmp_path: Path) -> None:
    job = build(tmp_path)
    train(job, 5)
    job.manager.close()
    assert steps(job) == []


@pytest.mark.parametrize("wrong", [{}, {"updates": 0}, {"updates": 1.5}, {"minutes": 0}, {"minutes": -1.0}])
def test_a_schedule_that_says_nothing_or_nonsense_is_a_wrong_call(wrong: dict[str, float]) -> None:
    with pytest.raises(sp.RequestError):
        sp.every(**wrong)  # type: ignore[arg-type]


def test_a_second_save_of_one_boundary_takes_no_second_place_among_the_last(tmp_path: Path) -> None:
    """Spec: C12.10"""
    state = {"value": 0}
    options = {"save": sp.every(updates=2), "keep": sp.keep(last=2)}
    with sp.CheckpointManager(tmp_path / "run", {"state": state}, **options) as manager:
        manager.restore()
        for _ in range(6):
            manager.after_update()
        state["value"] = 7
        manager.save()
    assert [checkpoint.step for checkpoint in sp.open_run(tmp_path / "run").checkpoints()] == [6, 4]
    state["value"] = 0
    with sp.CheckpointManager(tmp_path / "run", {"state": state}, **options) as manager:
        assert manager.restore().step == 6
    assert state == {"value": 7}, "what was saved last"
