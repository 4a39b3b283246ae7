"""What a comparison prints of plain values."""

from __future__ import annotations

from pathlib import Path

import pytest

from safepoint.cli import main
from safepoint.format.plain import encode_plain
from safepoint.format.records import LineageLink
from safepoint.storage.local import LocalStorage
from tests.build import begin, write_generation

CHAIN = (LineageLink(1, None, 0),)


def test_diff_folds_what_changed_alike_under_one_key_and_nothing_else(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = tmp_path / "run"
    storage = LocalStorage(run)
    begin(storage)
    for step, count, rate in ((700, 5, 0.5), (800, 10, 0.25)):
        states = {str(number): {"step": count, "other": count} for number in range(3)}
        plain = {"model": encode_plain({"state": states, "odd": {"step": count + 1}, "rate": rate})}
        write_generation(storage, step, chain=CHAIN, items={"model": {}}, plain=plain)
    assert main(["diff", f"{run}@700", f"{run}@800"]) == 1
    out = capsys.readouterr().out
    told = [line.split("  ")[0] for line in out.partition("Plain values that differ\n")[2].splitlines()[1:]]
    assert told == [
        "model: state.0.step and 2 more .step",
        "model: state.0.other and 2 more .other",
        "model: odd.step",
        "model: rate",
    ]
    assert main(["diff", "--all", f"{run}@700", f"{run}@800"]) == 1
    assert capsys.readouterr().out.count(".step  ") == 4
