"""What damage costs: told for each checkpoint and each file, and true when it is tried."""

from __future__ import annotations

import ast
import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest

import safepoint as sp
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


def train(run: Path, values: dict[int, int], *, step: int | str | None = None) -> None:
    """Go on from a checkpoint, and save a value at each step that is given."""
    state = {"value": 0}
    with sp.CheckpointManager(run, {"state": state}, signals=None) as manager:
        manager.restore(step=step, branch=step is not None)
        while manager.progress.step < max(values):
            state["value"] = values.get(manager.progress.step + 1, 0)
            manager.after_update()
            if manager.progress.step in values:
                manager.save()


@pytest.fixture
def branched(tmp_path: Path) -> Path:
    """Return a run with two of step 3: the value on the branch that was left is 30, on the live one 31."""
    run = tmp_path / "branched"
    train(run, {1: 10, 2: 20, 3: 30, 4: 40})
    train(run, {3: 31}, step=2)
    return run


def test_each_recipe_restores_the_checkpoint_beside_which_it_stands(
    branched: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["verify", str(branched), "--repair-plan", "--no-note"]) == 0
    lines = [line for line in capsys.readouterr().out.splitlines() if "restore(" in line]
    found = []
    for number, line in enumerate(lines):
        generation = line.split()[-1]
        recipe = re.search(r"restore\(.*\)", line)
        assert recipe is not None
        call = ast.parse(recipe[0], mode="eval").body
        assert isinstance(call, ast.Call)
        copy = tmp_path / f"copy-{number}"
        shutil.copytree(branched, copy)
        state = {"value": 0}
        with sp.CheckpointManager(copy, {"state": state}, signals=None) as manager:
            report = manager.restore(**{str(word.arg): ast.literal_eval(word.value) for word in call.keywords})
        assert report.generation == generation
        found.append(state["value"])
    assert sorted(found) == [10, 20, 30, 40], "all but the live step 3, which the next start takes"


def test_a_checkpoint_of_any_lineage_is_reached_by_its_name(branched: Path, capsys: pytest.CaptureFixture[str]) -> None:
    names = sorted(path.name for path in (branched / "generations").iterdir() if "step-000000000003" in path.name)
    left, live = names
    for name, state in ((left, "superseded"), (live, "committed")):
        capsys.readouterr()
        assert main(["show", f"{branched}@{name}", "--json"]) == 0
        shown = json.loads(capsys.readouterr().out)
        assert (shown["manifest"]["generation"], shown["state"]) == (name, state)
        assert main(["verify", f"{branched}@{name}", "--json", "--no-note"]) == 0
        assert [entry["generation"] for entry in json.loads(capsys.readouterr().out)["checkpoints"]] == [name]
        assert sp.open_run(branched).manifest(name).generation == name
        assert sp.open_run(branched).load({"state": {"value": 0}}, step=name).generation == name
    assert main(["diff", f"{branched}@{left}", f"{branched}@{live}", "--json"]) == 1
    (differing,) = json.loads(capsys.readouterr().out)["plain"]
    assert (differing["first"], differing["second"]) == ("30", "31")
    assert main(["pin", str(branched), left, "--reason", "the left one"]) == 0
    assert capsys.readouterr().out == f"pinned step 3 [{left}]: the left one\n"
    assert [path.parent.name for path in branched.rglob("pinned.json")] == [left]
    assert main(["unpin", str(branched), live]) == 3
    assert main(["unpin", str(branched), left]) == 0
    assert not list(branched.rglob("pinned.json"))


def test_a_step_on_several_branches_is_that_of_the_live_one(branched: Path) -> None:
    """The later start was left: its step 3 is newer, and not the one that is meant."""
    train(branched, {5: 50}, step=4)
    state = {"value": 0}
    with sp.CheckpointManager(branched, {"state": state}, signals=None) as manager:
        assert manager.restore(step=3, branch=True).step == 3
    assert state["value"] == 30


def test_a_name_that_nothing_has_is_not_found(branched: Path, capsys: pytest.CaptureFixture[str]) -> None:
    name = "step-000000000003-i000009-00abcdef"
    assert main(["show", f"{branched}@{name}"]) == 3
    assert name in capsys.readouterr().err
    with (
        sp.CheckpointManager(branched, {"state": {"value": 0}}, signals=None) as manager,
        pytest.raises(sp.NotFoundError, match=name),
    ):
        manager.restore(step=name, branch=True)
    with pytest.raises(sp.NotFoundError, match=name):
        sp.open_run(branched).manifest(name)
