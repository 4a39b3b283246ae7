"""Sizes and counts, as they are told."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from safepoint.cli import main
from safepoint.cli.display import counted
from safepoint.storage.local import LocalStorage
from tests.build import begin, flip, write_generation


def test_the_same_size_is_told_whether_or_not_a_manifest_can_be_read(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    storage, run = LocalStorage(tmp_path / "run"), tmp_path / "run"
    chain = begin(storage)
    write_generation(storage, 400, chain=chain)

    def size() -> tuple[int, str]:
        assert main(["ls", str(run), "--json"]) == 0
        (entry,) = json.loads(capsys.readouterr().out)["generations"]
        return entry["size_bytes"], entry["state"]

    (folder,) = run.glob("generations/step-000000000400-*")
    expected = sum(path.stat().st_size for path in folder.glob("rank-*"))
    assert size() == (expected, "committed")
    flip(storage, f"generations/{folder.name}/manifest.json")
    assert size() == (expected, "damaged")


def test_counts_are_told_with_their_nouns() -> None:
    assert [counted(count, "update") for count in (0, 1, 2)] == ["0 updates", "1 update", "2 updates"]
