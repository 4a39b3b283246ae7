"""Rehearse a command that only pretends to train: what the drill makes of each way to fail."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from safepoint.ambient import SystemAmbient
from safepoint.drill.plan import Kill
from safepoint.drill.play import Stage, play
from safepoint.drill.report import warnings
from safepoint.drill.scenario import rehearse
from safepoint.drill.trace import Ending
from safepoint.drill.verdict import Verdict, judge_rehearsal
from safepoint.errors import RequestError

SCRIPT = Path(__file__).parent / "scripts" / "pretend.py"


def stage(folder: Path, fault: str = "none", *, until: int | None = None, patience_s: float = 30.0) -> Stage:
    command = (sys.executable, "-S", str(SCRIPT), "--fault", fault)
    return Stage(command, folder, dict(os.environ), SystemAmbient(), until, patience_s)


def test_a_run_that_saves_everything_passes_wherever_it_is_killed(tmp_path: Path) -> None:
    kills = (Kill(0), Kill(2), Kill(7), Kill(7, "write"), Kill(9), Kill(12, "publish"))
    rehearsal = rehearse(stage(tmp_path), kills=kills)
    judgement = judge_rehearsal(rehearsal)
    assert judgement.verdict is Verdict.PASS, judgement.findings
    assert [start.ending for start in rehearsal.starts] == [Ending.KILLED] * 6 + [Ending.FINISHED]
    assert [start.restored.step for start in rehearsal.starts if start.restored] == [0, 0, 0, 6, 6, 6, 9]
    # 0 + 2 + 7 + 3 + 3 + 6 + 3 updates were made by the seven starts, and each was compared.
    assert judgement.comparison.updates == 24
    assert judgement.comparison.repeated == 24 - 12
    assert judgement.comparison.items == ("data", "model")


def test_a_kill_at_an_update_lets_nothing_happen_after_it(tmp_path: Path) -> None:
    rehearsal = rehearse(stage(tmp_path), kills=(Kill(6),))
    first, second = rehearsal.starts
    assert [update.step for update in first.updates] == [1, 2, 3, 4, 5, 6]
    assert first.committed == (3,)
    assert second.restored is not None and second.restored.step == 3


def test_a_drill_that_ends_at_an_update_compares_the_state_there(tmp_path: Path) -> None:
    rehearsal = rehearse(stage(tmp_path, until=8), kills=(Kill(5),))
    assert [rehearsal.baseline.ending, rehearsal.starts[-1].ending] == [Ending.STOPPED, Ending.STOPPED]
    assert rehearsal.baseline.last_step == rehearsal.starts[-1].last_step == 8
    assert rehearsal.baseline.state == rehearsal.starts[-1].state
    assert judge_rehearsal(rehearsal).comparison.items == ("data", "model")


@pytest.mark.parametrize(
    ("kill", "is_early"), [(Kill(7, "publish"), True), (Kill(5, "publish"), False), (Kill(8), False)]
)
def test_a_kill_whose_place_no_start_came_to_is_told(tmp_path: Path, kill: Kill, is_early: bool) -> None:
    """A save is made at updates 3, 6, 9: one that is to die in a save from 7 on and ends at 8 dies at its end."""
    rehearsal = rehearse(stage(tmp_path, until=8), kills=(kill,))
    judgement = judge_rehearsal(rehearsal)
    expected = [
        "start 1 was to die in phase 'publish' of the first save from update 7 on, and never came there:"
        " it was killed after update 8"
    ]
    assert judgement.holds
    assert warnings(rehearsal, judgement) == (expected if is_early else [])


def test_random_kills_are_the_same_for_the_same_seed(tmp_path: Path, seed: int) -> None:
    rehearsal = rehearse(stage(tmp_path), count=5, seed=seed)
    assert judge_rehearsal(rehearsal).holds
    assert (rehearsal.kills, rehearsal.seed) == (5, seed)


@pytest.mark.parametrize(
    ("fault", "verdict", "finding"),
    [
        ("reseed", Verdict.SILENT_DIVERGENCE, "update 7 of start 2 differs: metric loss"),
        ("lost position", Verdict.SILENT_DIVERGENCE, "update 7 of start 2 differs: ids of data"),
        ("crash on resume", Verdict.HARD_FAIL, "start 2 ended by itself before its first event, with exit code 1"),
        ("start over", Verdict.LOST_WORK, "start 2 resumed from nothing (a fresh start); step 6 had been committed"),
        ("no save", Verdict.HARD_FAIL, "the uninterrupted run committed none either; is save= given?"),
        ("not reproducible", Verdict.SILENT_DIVERGENCE, "two starts of the command differ by themselves"),
    ],
)
def test_each_way_to_fail_has_its_verdict(tmp_path: Path, fault: str, verdict: Verdict, finding: str) -> None:
    judgement = judge_rehearsal(rehearse(stage(tmp_path, fault), kills=(Kill(8),)))
    assert judgement.verdict is verdict
    assert finding in judgement.findings[0]


def test_a_difference_that_the_restore_announced_is_not_silent(tmp_path: Path) -> None:
    judgement = judge_rehearsal(rehearse(stage(tmp_path, "lost position, said"), kills=(Kill(8),)))
    assert judgement.holds
    assert judgement.comparison.level == "approximate"


@pytest.mark.parametrize(
    ("fault", "text"),
    [
        ("no manager", "never told an event"),
        ("silent", "went silent"),
        ("die at 5", "the command fails without any kill"),
    ],
)
def test_a_command_that_cannot_be_drilled_is_refused_with_what_it_printed(
    tmp_path: Path, fault: str, text: str
) -> None:
    with pytest.raises(RequestError, match=text) as caught:
        rehearse(stage(tmp_path, fault, patience_s=2.0 if fault == "silent" else 30.0), kills=(Kill(3),))
    if fault != "silent":
        assert "a line that the command prints" in str(caught.value)


def test_a_single_random_kill_always_leaves_something_to_resume(tmp_path: Path) -> None:
    for number in range(8):
        folder = tmp_path / str(number)
        folder.mkdir()
        assert judge_rehearsal(rehearse(stage(folder), count=1, seed=number)).holds, f"seed {number}"


def test_a_kill_beyond_the_end_is_refused(tmp_path: Path) -> None:
    with pytest.raises(RequestError, match="an update from 0 to 12"):
        rehearse(stage(tmp_path), kills=(Kill(13),))


def test_a_command_that_does_not_exist_is_refused(tmp_path: Path) -> None:
    absent = Stage(("/no/such/program",), tmp_path, dict(os.environ), SystemAmbient())
    with pytest.raises(RequestError, match="cannot be started"):
        rehearse(absent, kills=(Kill(1),))


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="processes are listed through /proc")
def test_a_kill_leaves_no_process_behind_whatever_group_or_session_it_made(tmp_path: Path) -> None:
    rehearse(stage(tmp_path, "children"), kills=(Kill(4),))
    pids = [int(line) for file in tmp_path.rglob("children") for line in file.read_text().split()]
    assert len(pids) >= 3
    assert not [pid for pid in pids if is_running(pid)]


def ranks_of(folder: Path, fault: str = "none") -> Stage:
    return Stage((str(SCRIPT), "--fault", fault), folder, dict(os.environ), SystemAmbient(), None, 100.0, ranks=2)


@pytest.mark.timeout(400)
def test_one_rank_is_killed_and_the_launcher_ends_the_others(tmp_path: Path) -> None:
    rehearsal = rehearse(ranks_of(tmp_path), kills=(Kill(7),), kills_ranks="one", seed=1)
    judgement = judge_rehearsal(rehearsal)
    assert judgement.verdict is Verdict.PASS, (judgement.findings, rehearsal.starts)
    first, second = rehearsal.starts
    assert first.kill is not None and first.kill.rank == 1
    assert "after update 7, rank 1 alone: the others ended within" in first.place
    # The pretended ranks wait for nothing: what is left of them saves until it is ended, and that counts.
    assert first.committed[:2] == (3, 6)
    # One that is ended between a save and its word has told of the one before.
    assert second.restored is not None and second.restored.step - first.committed[-1] in (0, 3)
    assert judgement.comparison.items == ("data of rank 0", "data of rank 1", "model of rank 0", "model of rank 1")


@pytest.mark.timeout(400)
def test_ranks_that_come_to_different_updates_end_the_start(tmp_path: Path) -> None:
    start = play(ranks_of(tmp_path, "apart"), "runs", "log")
    assert start.ending is Ending.FAILED
    assert start.place == "with its ranks apart: rank 0 after update 5, rank 1 after update 6"
    assert start.last_step == 4


def is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2].split()[0] not in "ZX"
    except FileNotFoundError:
        return False
