"""What several ranks tell, put together: held until all have told it, compared one by one, and across their number."""

from __future__ import annotations

import math
import threading
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path

import pytest

from safepoint.ambient import SystemAmbient
from safepoint.drill.compare import compare
from safepoint.drill.events import Apart, Closed, Committed, Event, Phase, Restored, State, Update
from safepoint.drill.pipes import JointPipes
from safepoint.drill.plan import AIMS, Kill, aim_kills
from safepoint.drill.play import Stage
from safepoint.drill.ranks import join_events, means, samples_together
from safepoint.drill.report import as_plain, columns, compared, rows
from safepoint.drill.scenario import check_sizes
from safepoint.drill.trace import Start
from safepoint.drill.verdict import Verdict, judge_rehearsal
from safepoint.errors import RequestError
from safepoint.evidence import PIPES_VARIABLE, RANK_VARIABLE, Evidence
from tests.drill.rehearsals import killed, rehearsal, resumed, update, whole

BATCH = 12


class Variables(SystemAmbient):
    """Give some variables."""

    def __init__(self, **variables: str) -> None:
        self.variables = variables

    def variable(self, name: str) -> str | None:
        return self.variables.get(name)


def own(step: int, rank: int, ranks: int, *, loss: float | None = None) -> Update:
    """Return what one of several ranks tells of an update: its part of the batch, and a loss that all of them have."""
    first = step * BATCH
    ids = tuple(range(first + BATCH * rank // ranks, first + BATCH * (rank + 1) // ranks))
    return Update(step, {"loss": (loss or 1 / step).hex()}, {"data": ids}, f"s{rank}-{step}")


def joint(step: int, ranks: int, **values: float) -> Update:
    event = join_events({rank: own(step, rank, ranks, **values) for rank in range(ranks)})
    assert isinstance(event, Update)
    return event


def of_ranks(start: Start, ranks: int, **losses: float) -> Start:
    """Return a start of several ranks in place of one by itself; `losses` are those of updates, as ``at_5=0.3``."""
    updates = tuple(
        joint(one.step, ranks, **({"loss": losses[f"at_{one.step}"]} if f"at_{one.step}" in losses else {}))
        for one in start.updates
    )
    state = {f"model of rank {rank}": "aa" for rank in range(ranks)}
    return replace(start, ranks=ranks, updates=updates, state=state)


def test_an_update_of_all_ranks_keeps_the_values_of_each() -> None:
    event = joint(5, 2)
    assert event.step == 5
    assert event.metrics == {"loss of rank 0": (0.2).hex(), "loss of rank 1": (0.2).hex()}
    assert event.ids == {"data of rank 0": tuple(range(60, 66)), "data of rank 1": tuple(range(66, 72))}
    assert event.streams == "s0-5 s1-5"
    assert join_events({0: State({"a": "x"}), 1: State({"a": "y"})}) == State({"a of rank 0": "x", "a of rank 1": "y"})
    assert join_events({1: Closed(), 0: Closed()}) == Closed()


@pytest.mark.parametrize(
    ("other", "place"),
    [
        (Update(6), "rank 1 after update 6"),
        (Closed(), "rank 1 at its end"),
        (Restored(5, "step-5"), "rank 1 after restoring step-5"),
    ],
)
def test_ranks_that_do_not_tell_the_same_are_apart(other: Event, place: str) -> None:
    assert join_events({1: other, 0: Update(5)}) == Apart(f"rank 0 after update 5, {place}")
    different = {0: Restored(5, "step-5"), 1: Restored(5, "step-5-again")}
    assert isinstance(join_events(different), Apart)


def test_the_samples_of_all_ranks_are_the_global_batch_for_every_number_of_ranks() -> None:
    for ranks in (1, 2, 3, 4):
        assert samples_together(joint(2, ranks)) == {"data": tuple(range(24, 36))}
    assert means(Update(1, {"a of rank 0": (1.0).hex(), "a of rank 1": (4.0).hex(), "b": (3.0).hex()})) == {
        "a": 2.5,
        "b": 3.0,
    }


def test_one_bit_on_one_rank_is_a_difference_that_names_the_rank() -> None:
    baseline = of_ranks(whole(), 2)
    wrong = join_events({0: own(5, 0, 2), 1: own(5, 1, 2, loss=0.2 + 2**-55)})
    assert isinstance(wrong, Update)
    last = of_ranks(resumed(3, update(4), update(5), update(6)), 2)
    last = replace(last, updates=(last.updates[0], wrong, last.updates[2]))
    comparison = compare(rehearsal(of_ranks(killed(4), 2), last, baseline=baseline))
    assert comparison.divergence is not None and comparison.apart is None
    assert [value.subject for value in comparison.divergence.values] == ["metric loss of rank 1"]


def test_another_number_of_ranks_is_compared_by_samples_exactly_and_by_metrics_within_the_tolerance() -> None:
    baseline, first = of_ranks(whole(), 4), of_ranks(killed(4), 4)
    last = of_ranks(resumed(3, update(4), update(5), update(6), promise="same_data"), 2, at_5=0.2 * (1 + 1e-4))
    both = rehearsal(first, last, baseline=baseline)
    judgement = judge_rehearsal(both)
    assert judgement.verdict is Verdict.PASS
    apart = judgement.comparison.apart
    assert apart is not None and (apart.updates, apart.place) == (3, "metric loss of update 5")
    assert math.isclose(apart.largest, 1e-4, rel_tol=1e-3)
    # What came before the change is compared bit for bit, though a later restore promised less.
    assert judgement.comparison.level == "exact"
    said = compared(judgement)
    assert said.startswith(
        "compared 7 updates, 1 of them made more than once: the first 4: every metric, sample id and"
    )
    assert "largest relative difference 0.0001 (metric loss of update 5)" in said
    assert as_plain(both, judgement)["compared"]["other_ranks"]["updates"] == 3
    assert columns(both)[1] == "ranks" and [row[1] for row in rows(both)] == ["4", "4", "2"]

    beyond = judge_rehearsal(replace(both, tolerance=1e-5))
    assert beyond.verdict is Verdict.SILENT_DIVERGENCE and "metric loss" in beyond.findings[0]


def test_a_sample_left_out_with_another_number_of_ranks_is_a_difference() -> None:
    last = of_ranks(resumed(3, update(4), update(5), update(6), promise="same_data"), 2)
    fifth = last.updates[1]
    ids = {**fifth.ids, "data of rank 1": fifth.ids["data of rank 1"][:-1]}
    last = replace(last, updates=(last.updates[0], Update(5, fifth.metrics, ids, fifth.streams), last.updates[2]))
    found = compare(rehearsal(of_ranks(killed(4), 4), last, baseline=of_ranks(whole(), 4))).divergence
    assert found is not None and found.step == 5
    assert [value.subject for value in found.values] == ["ids of data"]
    short = of_ranks(resumed(3, update(4), update(5), promise="same_data"), 2)
    found = compare(rehearsal(of_ranks(killed(4), 4), short, baseline=of_ranks(whole(), 4))).divergence
    assert found is not None and [value.subject for value in found.values] == ["last update"]


@pytest.fixture
def pipes(tmp_path: Path) -> Iterator[JointPipes]:
    with JointPipes(tmp_path, SystemAmbient(), 2) as made:
        yield made


def play_ranks(pipes: JointPipes, told: Mapping[int, list[tuple[str, dict[str, object]]]]) -> list[threading.Thread]:
    """Let each rank tell its events from a thread."""

    def tell(rank: int) -> None:
        variables = {PIPES_VARIABLE: pipes.variable, RANK_VARIABLE: str(rank)}
        evidence = Evidence.find(Variables(**variables), {})
        for kind, facts in told[rank]:
            evidence.tell(kind, **facts)

    threads = [threading.Thread(target=tell, args=(rank,)) for rank in told]
    for thread in threads:
        thread.start()
    return threads


def next_of(pipes: JointPipes, wait_s: float = 30.0) -> Event | None:
    return pipes.next_event(deadline=SystemAmbient().monotonic() + wait_s, has_ended=lambda: False)


def test_no_rank_goes_on_before_all_have_told_an_update_and_a_commit_is_told_once(pipes: JointPipes) -> None:
    committed = ("committed", {"step": 1, "generation": "g"})
    first = [("update", {"step": 1}), ("phase", {"phase": "write"}), committed, ("closed", {})]
    threads = play_ranks(pipes, {0: [*first], 1: [("update", {"step": 1}), committed, ("closed", {})]})
    assert next_of(pipes) == Update(1, {}, {}, " ")
    assert set(pipes.processes) == {0, 1}
    assert next_of(pipes, 0.1) is None
    pipes.answer("go")
    told = []
    while not told or told[-1] != Closed():
        told.append(next_of(pipes))
        pipes.answer("go")
    # The ranks come to their phases and commits in any order.
    assert sorted(map(str, told)) == sorted(map(str, [Phase("write"), Committed(1, "g"), Closed()]))
    for thread in threads:
        thread.join(30)
        assert not thread.is_alive()


def test_ranks_that_are_let_go_wait_for_nobody(pipes: JointPipes) -> None:
    committed = ("committed", {"step": 1, "generation": "g"})
    (thread,) = play_ranks(pipes, {0: [("update", {"step": 1}), ("phase", {"phase": "write"}), committed]})
    assert next_of(pipes, 1.0) is None
    pipes.let_go()
    assert next_of(pipes) == Committed(1, "g")
    thread.join(30)
    assert not thread.is_alive()


def test_a_phase_is_told_for_each_rank_that_comes_to_it(pipes: JointPipes) -> None:
    threads = play_ranks(pipes, {rank: [("phase", {"phase": "vote"})] for rank in (0, 1)})
    for _ in threads:
        assert next_of(pipes) == Phase("vote")
        pipes.answer("go")
    for thread in threads:
        thread.join(30)


@pytest.mark.parametrize("rank", ["2", "", "x"])
def test_a_process_without_a_rank_is_not_watched_as_one(pipes: JointPipes, rank: str) -> None:
    with pytest.raises(RequestError, match="no pipes for this process"):
        Evidence.find(Variables(**{PIPES_VARIABLE: pipes.variable, RANK_VARIABLE: rank}), {})


def test_kills_hit_the_ranks_that_were_asked_for_and_the_same_seed_the_same_ones(seed: int) -> None:
    kills = tuple(Kill(number) for number in range(60))
    sizes = [4, 2, 3] * 20
    assert aim_kills(kills, at="all", sizes=sizes, seed=seed) == kills
    assert {kill.rank for kill in aim_kills(kills, at="leader", sizes=sizes, seed=seed)} == {0}
    ones = [kill.rank for kill in aim_kills(kills, at="one", sizes=sizes, seed=seed)]
    assert ones == [kill.rank for kill in aim_kills(kills, at="one", sizes=sizes, seed=seed)]
    assert [{rank for rank, size in zip(ones, sizes, strict=True) if size == count} for count in (2, 3, 4)] == [
        set(range(count)) for count in (2, 3, 4)
    ]
    with pytest.raises(RequestError, match="one, leader, all"):
        aim_kills(kills, at="last", sizes=sizes, seed=seed)
    assert AIMS == ("one", "leader", "all")


@pytest.mark.parametrize("sizes", [(4, 2), (4, 2, 3, 1), (4, 0, 2)])
def test_each_start_has_its_number_of_ranks(sizes: tuple[int, ...]) -> None:
    check_sizes((), 2)
    check_sizes((4, 2, 3), 2)
    with pytest.raises(RequestError, match="3 numbers"):
        check_sizes(sizes, 2)


@pytest.mark.parametrize(
    ("command", "end"),
    [
        (("train.py", "--run", "a"), ("--", "train.py", "--run", "a")),
        (("python", "train.py"), ("--no-python", "--", "python", "train.py")),
        (("-m", "package.train", "x"), ("-m", "--", "package.train", "x")),
    ],
)
def test_ranks_are_started_by_torchrun(tmp_path: Path, command: tuple[str, ...], end: tuple[str, ...]) -> None:
    stage = Stage(command, tmp_path, {}, SystemAmbient(), ranks=3)
    assert stage.started[1:6] == ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "3")
    assert stage.started[6:] == end
    assert replace(stage, ranks=0).started == command
