"""What damage costs: told for each checkpoint and each file, and true when it is tried."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from safepoint.cli import main
from safepoint.format.names import generation_path
from safepoint.format.records import LineageLink
from safepoint.storage.local import LocalStorage
from tests.build import begin, flip, floats, write_generation, write_incarnation
from tests.retention.saves import CHAIN, DATA, INDEX, borrowing_from

ITEMS = {"model": {"w": floats(1.0, 2.0)}, "ema": {"w": floats(3.0, 4.0)}}


def name_of(step: int) -> str:
    return f"step-{step:012d}-i000001-0badcafe"


@pytest.fixture
def run(tmp_path: Path) -> Path:
    storage = LocalStorage(tmp_path / "run")
    begin(storage)
    for step in (100, 200, 300):
        write_generation(storage, step, chain=CHAIN, items=ITEMS)
    return tmp_path / "run"


def plan(run: Path, capsys: pytest.CaptureFixture[str]) -> tuple[int, dict[str, Any]]:
    capsys.readouterr()
    code = main(["verify", str(run), "--all", "--repair-plan", "--json", "--no-note"])
    return code, json.loads(capsys.readouterr().out)["repair"]


def uses(told: dict[str, Any]) -> list[tuple[int, str]]:
    return [(entry["step"], entry["use"]) for entry in told["checkpoints"]]


def test_of_a_whole_run_nothing_is_lost(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, told = plan(run, capsys)
    assert (code, told["resumes_at"], told["lost_updates"], told["files"]) == (0, 300, 0, [])
    assert uses(told) == [(300, "next"), (200, "fallback"), (100, "fallback")]
    assert main(["verify", str(run), "--repair-plan"]) == 0
    assert "a start resumes at step 300; no update is lost" in capsys.readouterr().out


def test_damage_of_one_item_leaves_the_others(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The bytes of ``ema`` come first in the file; the same ones lie in the other checkpoints."""
    storage = LocalStorage(run)
    flip(storage, generation_path(name_of(300), DATA), offset=4096)
    code, told = plan(run, capsys)
    assert (code, told["resumes_at"], told["lost_updates"]) == (1, 200, 100)
    assert uses(told) == [(300, "partly"), (200, "next"), (100, "fallback")]
    assert told["checkpoints"][0]["lost_items"] == ["ema"]
    assert told["checkpoints"][0]["whole_items"] == ["model"]
    (file,) = told["files"]
    assert (file["generation"], file["name"]) == (name_of(300), DATA)
    assert file["size_bytes"] == storage.size(generation_path(name_of(300), DATA))
    assert file["same_as"] == [f"{name_of(200)}/{DATA}", f"{name_of(100)}/{DATA}"]
    main(["verify", str(run), "--repair-plan"])
    shown = capsys.readouterr().out
    assert 'the rest with restore(step=300, branch=True, skip=["ema"])' in shown
    assert "resumes at step 200, and repeats 100 updates" in shown
    good, damaged = (run / "generations" / name_of(step) / DATA for step in (200, 300))
    damaged.write_bytes(good.read_bytes())
    assert plan(run, capsys)[0] == 0, "the copy that was named mends it"


@pytest.mark.parametrize("name", [DATA, INDEX, "manifest.json"])
def test_a_missing_or_unreadable_file_costs_the_whole_checkpoint(
    run: Path, name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    path = run / "generations" / name_of(300) / name
    path.write_bytes(b"")
    code, told = plan(run, capsys)
    assert (code, told["resumes_at"]) == (1, 200)
    assert uses(told)[0] == (300, "none")
    assert name in [file["name"] for file in told["files"]]


def test_what_lies_on_a_branch_that_was_left_can_be_asked_for(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    storage = LocalStorage(run)
    chain = (*CHAIN, LineageLink(2, name_of(100), 100))
    write_incarnation(storage, 2, chain=chain)
    flip(storage, generation_path(name_of(100), INDEX))
    code, told = plan(run, capsys)
    assert (code, told["resumes_at"]) == (3, None)
    assert uses(told) == [(300, "branch"), (200, "branch"), (100, "none")]
    assert main(["verify", str(run), "--repair-plan"]) == 3
    assert "nothing can be resumed from" in capsys.readouterr().out


def test_an_ancestors_file_is_named_with_all_that_need_it(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    storage = LocalStorage(run)
    base = write_generation(storage, 400, chain=CHAIN, items={"model": {"w": floats(1.0, 2.0)}})
    write_generation(storage, 500, chain=CHAIN, items=borrowing_from(storage, base))
    flip(storage, generation_path(base, DATA), offset=4096)
    code, told = plan(run, capsys)
    assert (code, told["resumes_at"], told["lost_updates"]) == (1, 300, 200)
    (file,) = told["files"]
    assert (file["generation"], file["name"]) == (base, DATA)
    assert sorted(file["needed_by"]) == [base, name_of(500)]


def test_what_is_marked_for_deletion_is_no_choice(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    main(["prune", str(run), "--keep-last", "2"])
    assert uses(plan(run, capsys)[1]) == [(300, "next"), (200, "fallback"), (100, "none")]


def test_a_plan_of_one_step_is_a_wrong_call(run: Path) -> None:
    assert main(["verify", f"{run}@300", "--repair-plan"]) == 2
