"""Two real processes on one run: exactly one goes on, and the other does no harm."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from tests.crash.processes import check_resumes, running

FENCED = 6


def pair(root: Path) -> int:
    """Start two at the same moment, check that one is turned away, and let the other save; return its step."""
    arguments = ("job_process.py", root, "--saves", 2, "--waits")
    with running(*arguments) as one, running(*arguments) as other:
        said = {process: process.line() for process in (one, other)}
        (winner,) = (process for process, line in said.items() if "restored" in line)
        (loser,) = (process for process, line in said.items() if line.get("error") == "FencedError")
        assert "another process holds the run" in said[loser]["text"]
        assert f"process {winner.popen.pid} of " in said[loser]["text"]
        assert ", started 20" in said[loser]["text"]
        loser.rest()
        assert loser.popen.returncode == FENCED
        step = int(said[winner]["restored"])
        for number in (1, 2):
            winner.go()
            assert winner.line() == {"saved": step + number}
        winner.go()
        winner.rest()
        assert winner.popen.returncode == 0
    return step + 2


def test_of_two_real_processes_exactly_one_goes_on(tmp_path: Path) -> None:
    """Spec: C1.2, C1.3"""
    step = pair(tmp_path / "run")
    assert step == 2
    assert check_resumes(tmp_path / "run", at_least=2, at_most=2) == 2


@pytest.mark.soak
def test_of_two_real_processes_exactly_one_goes_on_each_time(tmp_path: Path) -> None:
    """Spec: C1.2, C1.3"""
    for count in range(1, 41):
        assert pair(tmp_path / "run") == 2 * count
    print(f"counted: {count} pairs of starts")


def test_a_real_takeover_fences_the_old_process_at_its_next_save(tmp_path: Path) -> None:
    """Spec: C5.2"""
    root = tmp_path / "run"
    with running("job_process.py", root, "--waits") as old:
        step = old.line()["restored"]
        with running("job_process.py", root, "--takeover", "--waits", "--saves", 1) as new:
            assert new.line()["restored"] == step
            old.go()
            assert old.line()["error"] == "FencedError"
            old.rest()
            assert old.popen.returncode == FENCED
            new.go()
            assert new.line() == {"saved": step + 1}
            new.go()
            new.rest()
    check_resumes(root, at_least=step + 1, at_most=step + 1)


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_a_real_process_that_is_dead_or_stopped_is_replaced_at_once(tmp_path: Path, number: signal.Signals) -> None:
    """Spec: C1.2, C5.2"""
    root = tmp_path / "run"
    with running("job_process.py", root, "--waits") as old:
        old.line()
        old.go()
        assert old.line() == {"saved": 1}
        old.signal(number)
        os.waitid(os.P_PID, old.popen.pid, os.WEXITED | os.WSTOPPED | os.WNOWAIT)
        with running("job_process.py", root, "--waits") as new:
            assert new.line()["restored"] == 1
            if number == signal.SIGSTOP:
                old.go()
                old.signal(signal.SIGCONT)
                assert old.line()["error"] == "FencedError"
            new.go()
            assert new.line() == {"saved": 2}
    check_resumes(root, at_least=2, at_most=2)
