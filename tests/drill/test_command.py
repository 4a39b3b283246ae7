"""Drill from the command line: what is printed, and the exit code."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from safepoint.cli import main

SCRIPT = str(Path(__file__).parent / "scripts" / "pretend.py")


def command(*options: str) -> list[str]:
    return ["--", sys.executable, "-S", SCRIPT, *options]


def test_a_passed_drill_ends_with_zero_and_tells_each_start(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["drill", "--kill-at", "7", "--until", "10", *command()]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert "start          resumed from  promise  updates  committed  ended" in lines
    assert "1              fresh                  1-7      step 6     killed after update 7" in lines
    assert "2              step 6        exact    7-10     step 9     stopped after update 10" in lines
    assert lines[-1] == "verdict: pass (the run resumed by itself, and nothing of what was compared differs)"
    assert lines[-2] == "not seen by this drill: objects that are neither registered nor shown in metrics"


def test_a_drill_without_any_resume_ends_with_one_and_says_what_to_do(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["drill", "--kill-at", "2", *command()]) == 1
    lines = capsys.readouterr().out.splitlines()
    assert lines[-1] == "verdict: hard_fail (did not resume by itself)"
    assert lines[-2].endswith("(the uninterrupted run committed its first at step 3); save more often, or kill later")


def test_a_drill_without_metrics_says_what_alone_was_compared(capsys: pytest.CaptureFixture[str]) -> None:
    without = ["drill", "--kill-at", "7", *command("--fault", "no metrics")]
    assert main(without) == 0
    out = capsys.readouterr().out
    warning = "no metrics were given to after_update: only sample ids, random streams and the final state were compared"
    assert f"\nwarning: {warning}\n" in out
    assert "every sample id and random stream, bit for bit" in out
    assert main([*without[:3], "--json", *without[3:]]) == 0
    assert json.loads(capsys.readouterr().out)["warnings"] == [warning]


def test_a_failed_drill_ends_with_one_and_names_the_first_difference(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["drill", "--kill-at", "7", "--json", *command("--fault", "reseed")]) == 1
    told = json.loads(capsys.readouterr().out)
    assert (told["verdict"], told["kills"], told["seed"]) == ("silent_divergence", 1, None)
    assert (told["first_divergence"]["start"], told["first_divergence"]["step"]) == (2, 7)
    assert told["first_divergence"]["values"][0]["subject"] == "metric loss"
    assert [start["ending"] for start in told["starts"]] == ["killed", "finished"]


def test_a_hard_fail_shows_what_the_command_printed_last(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["drill", "--kill-at", "7", *command("--fault", "crash on resume")]) == 1
    assert "cannot read the checkpoint" in capsys.readouterr().err


def test_the_seed_of_random_kills_is_printed_and_replays_them(capsys: pytest.CaptureFixture[str]) -> None:
    kills = []
    for _ in range(2):
        assert main(["drill", "--kills", "3", "--seed", "5", "--json", *command()]) == 0
        told = json.loads(capsys.readouterr().out)
        assert told["seed"] == 5
        kills.append([start["kill"] for start in told["starts"]])
    assert kills[0] == kills[1]
    assert main(["drill", "--kills", "3", "--seed", "5", *command()]) == 0
    assert capsys.readouterr().out.startswith("3 random kills, seed 5\n")


def test_a_kept_folder_holds_runs_and_logs_and_is_never_used_twice(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "kept"
    assert main(["drill", "--kill-at", "7", "--keep-folder", str(folder), *command()]) == 0
    assert (folder / "start-1.log").read_text() == "a line that the command prints\n"
    assert (folder / "killed" / "pretend" / "saved.json").is_file()
    assert main(["drill", "--kill-at", "7", "--keep-folder", str(folder), *command()]) == 2
    assert "not empty" in capsys.readouterr().err


def test_a_wrong_phase_is_refused_before_anything_runs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    mark = tmp_path / "started"
    assert main(["drill", "--kill-phase", "foo", "--", "touch", str(mark)]) == 2
    assert "a save has no such phase" in capsys.readouterr().err and not mark.exists()


@pytest.mark.parametrize(
    "options",
    [
        ["--kill-at", "7", "--kills", "2"],
        ["--kill-at", "13"],
        ["--kill-rank", "one"],
        ["--nproc", "2", "--world-sizes", "2,3"],
        ["--world-sizes", "2"],
        ["--world-sizes", "2,x"],
        ["--world-sizes", "2,3,4", "--kill-at", "7"],
        ["--nproc", "2", "--kill-rank", "first"],
    ],
)
def test_a_wrong_call_ends_with_two(options: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["drill", *options, *command()]) == 2
    assert capsys.readouterr().err.startswith("safepoint: ")
