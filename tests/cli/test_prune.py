"""Retention by hand: reasons, two phases, and who holds the run."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest

from safepoint.ambient import SystemAmbient
from safepoint.cli import main
from safepoint.format.names import incarnation_path
from safepoint.format.records import Holder, LineageLink
from safepoint.storage.local import LocalStorage
from tests.build import begin, write_generation, write_incarnation, write_run

CHAIN = (LineageLink(1, None, 0),)


def steps(run: Path) -> list[int]:
    return sorted(int(path.name[5:17]) for path in (run / "generations").iterdir())


@pytest.fixture
def run(tmp_path: Path) -> Path:
    storage = LocalStorage(tmp_path / "run")
    begin(storage)
    for step in range(100, 700, 100):
        write_generation(storage, step, chain=CHAIN, metrics={"loss": abs(step - 250)})
    return tmp_path / "run"


def test_a_dry_run_explains_every_decision_and_changes_nothing(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = {path: path.read_bytes() for path in run.rglob("*") if path.is_file()}
    words = ["prune", str(run), "--keep-last", "2", "--every", "300", "--best", "loss:min", "--dry-run"]
    assert main([*words, "--json"]) == 0
    decisions = json.loads(capsys.readouterr().out)["decisions"]
    assert [(entry["step"], entry["is_kept"]) for entry in decisions] == [
        (600, True),
        (500, True),
        (400, False),
        (300, True),
        (200, True),
        (100, False),
    ]
    assert all(entry["reasons"] for entry in decisions)
    assert main(words) == 0
    assert "the best by loss" in capsys.readouterr().out
    assert {path: path.read_bytes() for path in run.rglob("*") if path.is_file()} == before


def test_a_dry_run_explains_also_what_no_policy_decides_on(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Marked, never completed and being made, and what cannot be read, which stops all."""
    storage = LocalStorage(run)
    assert main(["prune", str(run), "--keep-last", "5"]) == 0
    write_generation(storage, 650, chain=CHAIN, is_committed=False)
    chain = (*CHAIN, LineageLink(2, "step-000000000600-i000001-0badcafe", 600))
    write_incarnation(storage, 2, chain=chain)
    write_generation(storage, 700, chain=chain)
    write_generation(storage, 800, chain=chain, is_committed=False)
    words = ["prune", str(run), "--keep-last", "9", "--within", "36h", "--dry-run", "--json"]
    capsys.readouterr()
    assert main(words) == 0
    told = json.loads(capsys.readouterr().out)
    reasons = {entry["step"]: (entry["is_kept"], "; ".join(entry["reasons"])) for entry in told["decisions"]}
    assert sorted(reasons) == [100, 200, 300, 400, 500, 600, 650, 700, 800]
    assert reasons[800] == (True, "not completed, or being made; only a newer start sweeps it")
    assert reasons[650] == (False, "never completed, by an earlier start; its data go first")
    assert reasons[100] == (False, "marked earlier (no rule keeps it); its data go first")
    assert "saved within 36 h before the newest ones" in reasons[200][1]
    freed = sum(path.stat().st_size for step in (100, 650) for path in run.glob(f"generations/step-{step:012d}*/rank*"))
    assert told["swept"]["freed_bytes"] == freed
    damaged = run / "generations/step-000000000300-i000001-0badcafe/manifest.json"
    damaged.chmod(0o600)
    damaged.write_bytes(b"")
    assert main(words) == 1
    shown = capsys.readouterr()
    assert "nothing would be marked or deleted: a manifest cannot be decoded" in shown.err
    assert next(one for one in json.loads(shown.out)["decisions"] if one["step"] == 300)["is_kept"]


@pytest.mark.parametrize("options", [[], ["--dry-run"]])
def test_a_metric_that_no_checkpoint_has_is_said_before_anything_is_marked(
    run: Path, options: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    before = sorted(path for path in run.rglob("*"))
    assert main(["prune", str(run), "--keep-last", "1", "--best", "lss:min", *options]) == 2
    told = capsys.readouterr().err
    assert "'lss'" in told and "they have loss" in told
    assert sorted(path for path in run.rglob("*")) == before


def test_it_marks_first_and_deletes_when_called_again(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["prune", str(run), "--keep-last", "3"]) == 0
    assert "marked 3 checkpoints" in capsys.readouterr().out
    assert steps(run) == [100, 200, 300, 400, 500, 600]
    assert main(["prune", str(run), "--keep-last", "3"]) == 0
    assert "deleted what was marked earlier: 3 generations" in capsys.readouterr().out
    assert steps(run) == [400, 500, 600]


def test_it_refuses_while_a_living_job_holds_the_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    storage = LocalStorage(tmp_path / "run")
    write_run(storage)
    holder = Holder(**dataclasses.asdict(SystemAmbient().process()))
    write_incarnation(storage, 1, chain=CHAIN, is_closed=False, holder=holder)
    storage.put(incarnation_path(1, "alive"), b"1")
    for step in (1, 2, 3, 4):
        write_generation(storage, step, chain=CHAIN)
    assert main(["prune", str(tmp_path / "run"), "--keep-last", "2"]) == 6
    assert "a job holds the run" in capsys.readouterr().err
    assert not list(tmp_path.rglob("deleted.json"))


def test_a_manifest_that_cannot_be_read_stops_it(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    manifest = run / "generations/step-000000000300-i000001-0badcafe/manifest.json"
    manifest.chmod(0o600)
    manifest.write_bytes(b"")
    assert main(["prune", str(run), "--keep-last", "2"]) == 1
    assert "step-000000000300-i000001-0badcafe" in capsys.readouterr().err
    assert not list(run.rglob("deleted.json"))


def test_without_a_rule_of_the_best_one_it_warns_of_the_metrics_that_there_are(
    run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["prune", str(run), "--keep-last", "2", "--dry-run"]) == 0
    assert "have loss: --best keeps" in capsys.readouterr().err
    assert main(["prune", str(run), "--keep-last", "2", "--best", "loss:min", "--dry-run"]) == 0
    assert capsys.readouterr().err == ""
