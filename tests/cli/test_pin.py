"""Pins by hand: what is told, and that retention by hand obeys them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from safepoint.cli import main
from safepoint.format.records import LineageLink
from safepoint.storage.local import LocalStorage
from tests.build import begin, write_generation

CHAIN = (LineageLink(1, None, 0),)


@pytest.fixture
def run(tmp_path: Path) -> Path:
    storage = LocalStorage(tmp_path / "run")
    begin(storage)
    for step in (100, 200, 300, 400):
        write_generation(storage, step, chain=CHAIN)
    return tmp_path / "run"


def test_a_pinned_checkpoint_is_shown_and_survives_a_prune(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["pin", str(run), "100", "--reason", "the paper"]) == 0
    assert capsys.readouterr().out == "pinned step 100 [step-000000000100-i000001-0badcafe]: the paper\n"
    assert main(["ls", str(run)]) == 0
    assert "step 100 is pinned: the paper" in capsys.readouterr().out
    assert main(["show", f"{run}@100", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["pinned"] == "the paper"
    for _ in range(2):
        assert main(["prune", str(run), "--keep-last", "2"]) == 0
    assert "pinned: the paper" in capsys.readouterr().out
    assert sorted(int(path.name[5:17]) for path in (run / "generations").iterdir()) == [100, 300, 400]


def test_after_unpin_a_prune_takes_it(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    main(["pin", str(run), "100", "--reason", "the paper"])
    assert main(["unpin", str(run), "100", "--json"]) == 0
    assert json.loads(capsys.readouterr().out.split("\n", 1)[1])["step"] == 100
    assert main(["prune", str(run), "--keep-last", "2", "--dry-run", "--json"]) == 0
    assert [entry["is_kept"] for entry in json.loads(capsys.readouterr().out)["decisions"]] == [
        True,
        True,
        False,
        False,
    ]


@pytest.mark.parametrize(
    ("words", "code"),
    [
        (["pin", "RUN", "100"], 2),
        (["pin", "RUN", "100", "--reason", ""], 2),
        (["pin", "RUN", "101", "--reason", "x"], 3),
        (["pin", "RUN-misspelt", "100", "--reason", "x"], 3),
        (["pin", "RUN", "-1", "--reason", "x"], 2),
        (["unpin", "RUN", "100"], 3),
    ],
)
def test_what_cannot_be_pinned_changes_nothing(run: Path, words: list[str], code: int) -> None:
    before = sorted(run.rglob("*"))
    assert main([word.replace("RUN", str(run)) for word in words]) == code
    assert sorted(run.rglob("*")) == before
