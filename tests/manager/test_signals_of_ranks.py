"""A signal to one rank of several: all of them save and stop at the same boundary, and learn of it in time."""

from __future__ import annotations

import signal
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

import pytest

import safepoint as sp
from safepoint.ambient import Ambient
from safepoint.group.base import Group
from safepoint.schedule import DueClock, Schedule
from safepoint.stop import Stop
from safepoint.testing.ranks import RankThread, RankThreads
from tests.manager.signalled import train_rank, training

STOPPED = 75


@pytest.mark.parametrize("rank", [pytest.param(0, marks=pytest.mark.soak), 1])
def test_a_signal_to_one_rank_stops_all_at_the_same_boundary(tmp_path: Path, rank: int) -> None:
    root = tmp_path / "run"
    with ExitStack() as stack:
        ranks = [stack.enter_context(training(train_rank, root, number, "stop")) for number in range(2)]
        for one in ranks:
            one.until("update", 5)
        ranks[rank].signal(signal.SIGTERM)
        for one in ranks:
            one.go()
        # The leader waits for the farewell of the other.
        assert [one.end() for one in reversed(ranks)] == [STOPPED] * 2
    stopped = [one.said("stopped") for one in ranks]
    assert stopped[0] == stopped[1]
    assert [(one.step,) for one in sp.open_run(root).checkpoints()] == stopped[0]


def clock_of(group: Group, ambient: Ambient, *, grace_s: float) -> tuple[DueClock, Stop]:
    stop = Stop(sp.on_signals("TERM", grace_s=grace_s), group, ambient)
    return DueClock(Schedule(), stop, group, ambient, deadline_s=10.0), stop


def asked(
    world_size: int, steps: int, act: Callable[[RankThread, Stop, int], None], *, step_s: float = 0.1
) -> tuple[list[list[int]], list[str]]:
    """Return the steps at which each rank was ordered to stop, and the messages that are left on the board."""
    threads = RankThreads(world_size)

    def body(rank: RankThread) -> list[int]:
        clock, stop = clock_of(rank.group, rank.ambient, grace_s=30.0)
        ordered = []
        for step in range(1, steps):
            rank.ambient.sleep(step_s)
            act(rank, stop, step)
            word = clock.ask(lambda: 1, step=step, last_step=0, last_time=0.0, needs_s=0.0)
            if word.order is not None:
                stop.follow(word.order, step=step, needs_s=0.0)
                ordered.append(step)
        return ordered

    outcomes = threads.run(body)
    return [outcome.returned() for outcome in outcomes], list(threads.messages.held)


@pytest.mark.parametrize("asking", range(3))
def test_every_rank_is_ordered_once_and_at_the_same_boundary(asking: int) -> None:
    def act(rank: RankThread, stop: Stop, step: int) -> None:
        if rank.rank == asking and step == 50:
            stop.receive(signal.SIGTERM)
            stop.spread()

    ordered, _ = asked(3, 100, act)
    assert ordered == [ordered[0]] * 3
    # A tenth of the grace period is the longest that the others may not know.
    assert len(ordered[0]) == 1 and 50 <= ordered[0][0] <= 50 + 30


def test_words_that_nobody_reads_any_more_do_not_stay_on_the_board() -> None:
    _, held = asked(2, 1000, lambda rank, stop, step: None, step_s=10.0)
    assert len(held) < 250
