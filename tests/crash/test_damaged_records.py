"""Each kind of small file with a changed byte: a whole verification names it, and a restore does where it reads it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from safepoint.cli import main
from tests.crash.damage import Files, small_run, start_on, storage_of

NEWEST = "generations/step-000000000050-"
RUN = small_run()


def path_of(files: Files, begin: str, end: str) -> str:
    """Return the first path that begins and ends so."""
    return min(path for path in files if path.startswith(begin) and path.endswith(end))


def laid_out(files: Files, folder: Path) -> Path:
    for path, data in files.items():
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / path).write_bytes(data)
    return folder


@pytest.fixture
def run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Path:
    """Return a run with every kind of small file, in which everything holds."""
    folder = laid_out(RUN, tmp_path / "run")
    assert main(["pin", str(folder), "50", "--reason", "kept"]) == 0
    assert main(["verify", str(folder), "--all"]) == 0
    capsys.readouterr()
    return folder


def flip(path: Path, mask: int = 1) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= mask
    path.write_bytes(data)


@pytest.mark.parametrize(
    ("begin", "end"),
    [
        ("run.json", ""),
        ("incarnations/000001", "1.json"),
        ("incarnations/000001", ".resumed.json"),
        ("incarnations/000002", ".resumed.json"),
        ("generations/", "deleted.json"),
        ("generations/", "pinned.json"),
        (NEWEST, "verified.json"),
        (NEWEST, "manifest.json"),
        (NEWEST, "of-00001.json"),
        (NEWEST, ".safetensors"),
    ],
)
def test_a_flipped_bit_is_named_and_does_not_hold(
    run: Path, begin: str, end: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Spec: F2.2, F6.7"""
    files = {str(path.relative_to(run)): b"" for path in run.rglob("*.*") if path.is_file()}
    path = path_of(files, begin, end)
    flip(run / path)
    assert main(["verify", str(run), "--all", "--no-note"]) == 1
    shown = capsys.readouterr().out
    assert path.rpartition("/")[2] in shown
    assert "does not hold" in shown
    assert main(["verify", str(run), "--repair-plan", "--no-note", "--json"]) == 1
    told = json.loads(capsys.readouterr().out)["repair"]
    named = [entry["file"] for entry in told["records"]]
    named += [f"generations/{entry['generation']}/{entry['name']}" for entry in told["files"]]
    assert path in named
    assert told["resumes_at"] == (
        40 if path.startswith(NEWEST) and "verified" not in path and "pin" not in path else 50
    )


def test_a_line_of_a_journal_is_named_and_costs_nothing(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Spec: F8.1"""
    flip(run / "journal/000001.jsonl", mask=0x80)
    assert main(["verify", str(run), "--all", "--no-note"]) == 0
    assert "journal/000001.jsonl does not hold: line" in capsys.readouterr().out
    assert main(["verify", str(run), "--repair-plan", "--no-note"]) == 0
    assert "journal/000001.jsonl does not hold: line" in capsys.readouterr().out


def test_what_cannot_be_a_journal_is_named_and_does_not_hold(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Spec: F6.7"""
    journal = run / "journal/000001.jsonl"
    journal.unlink()
    assert main(["verify", str(run), "--all", "--no-note"]) == 0
    assert "journal" not in capsys.readouterr().out
    journal.mkdir()
    assert main(["verify", str(run), "--all", "--no-note"]) == 1
    assert "journal/000001.jsonl does not hold" in capsys.readouterr().out


def test_a_note_that_cannot_be_read_is_named_once_and_made_anew(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (note,) = run.glob(f"{NEWEST}*/verified.json")
    flip(note)
    assert main(["verify", str(run), "--all"]) == 1
    assert main(["verify", str(run), "--all"]) == 0


def test_a_heartbeat_is_a_stamp_of_any_value(run: Path) -> None:
    for path in run.glob("incarnations/*.alive"):
        flip(path)
    assert main(["verify", str(run), "--all", "--no-note"]) == 0


@pytest.mark.parametrize("path", ["run.json", "incarnations/000001.json", "incarnations/000001.resumed.json"])
def test_a_restore_notes_a_record_that_it_could_not_read(path: str) -> None:
    data = bytearray(RUN[path])
    data[len(data) // 2] ^= 1
    report = start_on(storage_of({**RUN, path: bytes(data)})).report
    assert report is not None
    assert [note.partition(" ")[0] for note in report.notes] == [path]
    assert path in str(report)


def test_a_restore_of_a_sound_run_notes_nothing() -> None:
    report = start_on(storage_of(RUN)).report
    assert report is not None
    assert report.notes == ()
