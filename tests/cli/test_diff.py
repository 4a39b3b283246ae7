"""What a comparison prints, and of what it says that bits are equal."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from safepoint.cli import main
from safepoint.errors import CorruptionError
from safepoint.format.plain import encode_plain
from safepoint.format.records import LineageLink
from safepoint.storage.local import LocalStorage
from tests.build import MODEL, begin, flip, write_generation
from tests.retention.saves import DATA, INDEX

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


@pytest.fixture
def twins(tmp_path: Path) -> tuple[Path, Path]:
    """Return two runs with the same checkpoint."""
    runs = tmp_path / "one", tmp_path / "other"
    for run in runs:
        storage = LocalStorage(run)
        begin(storage)
        write_generation(storage, 700, chain=CHAIN, items=MODEL)
    return runs


def test_bits_that_were_read_and_match_are_equal(twins: tuple[Path, Path], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["diff", f"{twins[0]}@700", f"{twins[1]}@700"]) == 0
    assert capsys.readouterr().out == "all bits are equal: 2 tensors in 1 item\n"
    assert main(["diff", "--json", f"{twins[0]}@700", f"{twins[1]}@700"]) == 0
    assert json.loads(capsys.readouterr().out)["bytes_checked"] is True


@pytest.mark.parametrize("side", [0, 1])
@pytest.mark.parametrize("name", [DATA, INDEX])
@pytest.mark.parametrize("is_gone", [False, True])
def test_damage_of_either_side_is_named_and_never_called_equal(
    twins: tuple[Path, Path], side: int, name: str, is_gone: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    """What the records say is the same on both sides: only the bytes tell."""
    (file,) = twins[side].glob(f"generations/*/{name}")
    if is_gone:
        file.unlink()
    else:
        flip(LocalStorage(twins[side]), str(file.relative_to(twins[side])))
    assert main(["diff", f"{twins[0]}@700", f"{twins[1]}@700"]) == CorruptionError.exit_code == 1
    told = capsys.readouterr()
    assert "equal" not in told.out
    assert f"{twins[side]}@700" in told.err
    assert name in told.err
    assert f"{twins[1 - side]}@700" not in told.err


def test_trusted_records_are_not_called_bits(twins: tuple[Path, Path], capsys: pytest.CaptureFixture[str]) -> None:
    (file,) = twins[1].glob(f"generations/*/{DATA}")
    flip(LocalStorage(twins[1]), str(file.relative_to(twins[1])))
    call = ["diff", "--trust-records", f"{twins[0]}@700", f"{twins[1]}@700"]
    assert main(call) == 0
    assert capsys.readouterr().out == (
        "all recorded digests are equal: 2 tensors in 1 item; what they speak of was not read\n"
    )
    assert main([*call, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["bytes_checked"] is False
    file.unlink()
    assert main(call) == 1
    assert DATA in capsys.readouterr().err
