"""What the reading commands answer, in words and in JSON, and how they end."""

from __future__ import annotations

import json
import os
import pty
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import safepoint.cli.verify as verify_command
from safepoint.cli import main
from safepoint.cli.display import age_s, age_text, size_text
from safepoint.errors import StorageError
from safepoint.format.encoding import seal
from safepoint.format.names import generation_path
from safepoint.format.plain import encode_plain
from safepoint.format.records import LineageLink, TombstoneRecord
from safepoint.storage.local import LocalStorage
from tests.build import RUN, begin, flip, floats, write_generation, write_incarnation

DATA = "rank-00000-of-00001.safetensors"
CHAIN = (LineageLink(1, None, 0),)
SECOND = (*CHAIN, LineageLink(2, "step-000000000200-i000001-0badcafe", 200))
SOURCE = Path(__file__).resolve().parents[2] / "src"


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """Return a run with a generation of every state: one is superseded by a second start, and that start saves."""
    storage = LocalStorage(tmp_path / "run")
    begin(storage)
    names = [write_generation(storage, step, chain=CHAIN) for step in (100, 200, 300)]
    write_incarnation(storage, 2, chain=SECOND)
    storage.publish(generation_path(names[0], "deleted.json"), seal(TombstoneRecord(1, RUN, names[0], 2, "old", "00")))
    write_generation(storage, 250, chain=CHAIN, is_committed=False)
    write_generation(storage, 400, chain=SECOND, metrics={"loss": encode_plain(0.25)})
    damaged = write_generation(storage, 500, chain=SECOND)
    storage.delete(generation_path(damaged, DATA))
    write_generation(storage, 600, chain=SECOND, is_committed=False)
    return tmp_path / "run"


def answer(capsys: pytest.CaptureFixture[str], *words: str | Path) -> tuple[int, Any]:
    code = main([*map(str, words), "--json"])
    return code, json.loads(capsys.readouterr().out)


def python(code: str, *words: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": str(SOURCE)}
    return subprocess.run(
        [sys.executable, "-c", code, *words], env=environment, capture_output=True, text=True, check=False, timeout=60
    )


def test_ls_tells_the_state_of_each_generation_and_where_a_run_resumes(
    run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code, listing = answer(capsys, "ls", run)
    assert code == 0
    assert [(entry["step"], entry["state"]) for entry in listing["generations"]] == [
        (600, "pending"),
        (500, "damaged"),
        (400, "committed"),
        (300, "superseded"),
        (250, "abandoned"),
        (200, "committed"),
        (100, "deleted"),
    ]
    assert listing["resumes_at"] == 400
    damaged = listing["generations"][1]
    assert (damaged["file"], damaged["reason"]) == (DATA, "the file is missing")
    newest = listing["generations"][2]
    assert (newest["world_size"], newest["contract"], newest["verified"]) == (1, "exact", None)
    folder = run / "generations" / newest["generation"]
    assert newest["size_bytes"] == sum((folder / name).stat().st_size for name in (DATA, "rank-00000-of-00001.json"))


def test_ls_prints_a_row_for_each_generation_and_the_reason_of_damage(
    run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["ls", str(run)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split() == ["step", "state", "size", "age", "world", "asked", "verified", "generation"]
    assert lines[3].split()[:2] == ["400", "committed"]
    assert f"step 500 is damaged: {DATA}: the file is missing" in lines
    assert lines[-1] == "resumes at step 400"


def test_a_note_of_verification_shows_in_ls_and_show(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["verify", f"{run}@400"]) == 0
    capsys.readouterr()
    _, listing = answer(capsys, "ls", run)
    assert [entry["step"] for entry in listing["generations"] if entry["verified"]] == [400]
    _, shown = answer(capsys, "show", run)
    assert shown["verified"] is not None


def test_show_tells_the_manifest_of_the_newest_checkpoint_or_of_a_step(
    run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert answer(capsys, "show", run)[1]["manifest"]["step"] == 400
    code, shown = answer(capsys, "show", f"{run}@300", "--tensors")
    assert (code, shown["state"], shown["manifest"]["step"]) == (0, "superseded", 300)
    assert [(tensor["name"], tensor["dtype"], tensor["shape"]) for tensor in shown["tensors"]] == [
        ("bias", "float32", [1]),
        ("weight", "float32", [4]),
    ]


def test_show_prints_items_counters_configuration_and_lineage_in_words(
    run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["show", str(run), "--tensors"]) == 0
    out = capsys.readouterr().out
    for words in (
        "promise asked  exact",
        "incarnation 1 started afresh",
        "incarnation 2 resumed step 200 (step-000000000200-i000001-0badcafe)",
        "samples           12800",
        "config.lr  0.125",
        "loss  0.25",
        "torch  2.13.0",
        "model/weight  float32  [4]",
        DATA,
    ):
        assert words in out


def test_verify_takes_the_newest_one_and_says_what_does_not_hold(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, report = answer(capsys, "verify", run)
    assert (code, report["checkpoints"][0]["step"]) == (1, 500)
    assert main(["verify", f"{run}@400"]) == 0
    assert "step 400 holds" in capsys.readouterr().out
    path = run / "generations/step-000000000400-i000002-0badcafe" / DATA
    flip(LocalStorage(run), str(path.relative_to(run)))
    code, report = answer(capsys, "verify", f"{run}@400")
    (finding,) = report["checkpoints"][0]["findings"]
    assert (code, finding["file"], finding["tensor"], finding["rows"]) == (1, DATA, "model/weight", [0, 4])


def test_verify_all_reads_every_checkpoint_and_notes_only_what_holds(
    run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code, report = answer(capsys, "verify", run, "--all")
    assert code == 1
    assert [(entry["step"], entry["holds"], entry["noted"]) for entry in report["checkpoints"]] == [
        (500, False, False),
        (400, True, True),
        (300, True, True),
        (200, True, True),
    ]


def test_verify_leaves_no_note_when_asked_not_to(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["verify", f"{run}@400", "--no-note"]) == 0
    assert not list(run.rglob("verified.json"))


def test_diff_ends_with_one_when_bits_differ_and_names_what_never_moved(
    run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    storage = LocalStorage(run)
    items = {"model": {"weight": floats(1.0, 2.0, 3.0, 4.5), "bias": floats(0.5)}}
    write_generation(storage, 700, chain=SECOND, items=items, plain={"model": {"eps": 1}})
    assert main(["diff", f"{run}@200", f"{run}@400"]) == 0
    assert "all bits are equal" in capsys.readouterr().out
    assert main(["diff", f"{run}@400", f"{run}@700"]) == 1
    out = capsys.readouterr().out
    assert "Tensors that never moved: 1 of 2\n  model/bias" in out
    assert "model/weight  float32 [4]    1 of 4  0.5" in out
    code, report = answer(capsys, "diff", f"{run}@400", f"{run}@700")
    assert (code, report["equal"]) == (1, False)
    assert [(entry["name"], entry["greatest_difference"]) for entry in report["tensors"]] == [
        ("bias", None),
        ("weight", 0.5),
    ]


@pytest.mark.parametrize("command", ["ls", "show", "verify"])
def test_a_run_that_is_a_plain_file_is_a_wrong_call(
    command: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").write_bytes(b"kept")
    assert main([command, str(tmp_path / "file")]) == 2
    assert "a run is a folder" in capsys.readouterr().err


@pytest.mark.parametrize("command", ["ls", "show", "verify", "prune"])
def test_a_run_that_is_not_there_is_not_found_and_nothing_is_created(
    command: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = [command, str(tmp_path / "runs" / "misspelt"), *(["--keep-last", "3"] if command == "prune" else [])]
    assert main(words) == 3
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith("safepoint: there is no run here")
    assert list(tmp_path.iterdir()) == []


def test_an_existing_folder_that_is_no_run_is_not_found(tmp_path: Path) -> None:
    assert main(["ls", str(tmp_path)]) == 3
    assert list(tmp_path.iterdir()) == []


def test_a_step_that_is_not_there_is_not_found_and_the_steps_there_are_are_named(
    run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["show", f"{run}@401"]) == 3
    assert "600, 500, 400" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "code"),
    [
        (["ls"], 2),
        (["ls", "s3://bucket/run"], 2),
        (["unknown"], 2),
        (["ls", "RUN@5"], 2),
        (["show", "RUN@600"], 3),
        (["show", "RUN@500"], 0),
        (["diff", "RUN@400", "RUN@600"], 1),
        (["prune", "RUN", "--keep-last", "0"], 2),
        (["prune", "RUN", "--keep-last", "3", "--best", "loss"], 2),
        (["--version"], 0),
        (["--help"], 0),
    ],
)
def test_the_exit_code_says_what_came_of_it(run: Path, words: list[str], code: int) -> None:
    assert main([word.replace("RUN", str(run)) for word in words]) == code


def test_a_newer_format_ends_with_nine(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = run / "run.json"
    text = path.read_bytes()
    path.unlink()
    changed = text.replace(b'"format": 1', b'"format": 2')
    from safepoint.format.digest import digest_bytes

    path.write_bytes(b'{"digest":"' + digest_bytes(changed[43:]).encode() + changed[43:])
    assert main(["ls", str(run)]) == 9
    assert "Upgrade" in capsys.readouterr().err


def test_an_error_is_one_paragraph_and_a_traceback_only_on_demand(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    main(["ls", str(tmp_path)])
    plain = capsys.readouterr().err
    assert plain.count("\n") == 1
    main(["ls", str(tmp_path), "--traceback"])
    assert "Traceback (most recent call last)" in capsys.readouterr().err


def test_a_failing_storage_ends_with_five_and_our_own_failure_with_seventy(
    run: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise StorageError("could not read: the device failed", errno=5)

    def break_down(*_: object, **__: object) -> None:
        raise KeyError("surprise")

    monkeypatch.setattr(verify_command, "verify_generation", fail)
    assert main(["verify", f"{run}@400"]) == 5
    monkeypatch.setattr(verify_command, "verify_generation", break_down)
    assert main(["verify", f"{run}@400"]) == 70
    err = capsys.readouterr().err
    assert "surprise" in err
    assert "Traceback" not in err


def test_an_interrupt_ends_with_130_and_leaves_nothing_half_done(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    before = sorted(run.rglob("*"))
    monkeypatch.setattr(verify_command, "verify_generation", interrupt)
    assert main(["verify", f"{run}@400"]) == 130
    assert sorted(run.rglob("*")) == before


@pytest.mark.parametrize("words", [["ls", "RUN"], ["show", "RUN", "--tensors"], ["verify", "RUN@400"]])
def test_a_reading_command_imports_neither_torch_nor_numpy_nor_rich(run: Path, words: list[str]) -> None:
    done = python(
        "import sys; from safepoint.cli import main; code = main(sys.argv[1:]); "
        "print('|', code, [name for name in ('torch', 'numpy', 'rich') if name in sys.modules])",
        *[word.replace("RUN", str(run)) for word in words],
    )
    assert done.stdout.splitlines()[-1] == "| 0 []", done.stderr


def test_on_a_terminal_the_table_fits_and_elsewhere_it_is_plain(run: Path) -> None:
    controller, terminal = pty.openpty()
    environment = {**os.environ, "PYTHONPATH": str(SOURCE), "COLUMNS": "60", "TERM": "xterm-256color"}
    environment.pop("NO_COLOR", None)
    command = [sys.executable, "-m", "safepoint.cli", "ls", str(run)]
    done = subprocess.run(command, env=environment, stdout=terminal, stderr=subprocess.PIPE, check=True, timeout=60)
    os.close(terminal)
    shown = b""
    while True:
        try:
            piece = os.read(controller, 65536)
        except OSError:
            break
        if not piece:
            break
        shown += piece
    os.close(controller)
    assert b"\x1b[" in shown
    assert done.stderr == b""
    plain = subprocess.run(command, env=environment, capture_output=True, check=True, timeout=60).stdout
    assert b"\x1b" not in plain


def test_a_name_from_a_run_cannot_steer_the_terminal(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    storage = LocalStorage(run)
    write_generation(storage, 800, chain=SECOND, items={"model": {"\x1b[2Jw": floats(1.0)}})
    assert main(["show", str(run), "--tensors"]) == 0
    out = capsys.readouterr().out
    assert "\x1b" not in out
    assert "\\x1b[2Jw" in out


@pytest.mark.parametrize(
    ("size_bytes", "text"),
    [(0, "0 B"), (999, "999 B"), (1000, "1.0 kB"), (1_250_000, "1.2 MB"), (2 * 10**12, "2.0 TB")],
)
def test_sizes_are_told_in_powers_of_ten(size_bytes: int, text: str) -> None:
    assert size_text(size_bytes) == text


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0.0, "0 s"),
        (59.9, "59 s"),
        (60.0, "1 min"),
        (7200.0, "2 h"),
        (200000.0, "2 d"),
        (-5.0, "0 s"),
        (None, "unknown"),
    ],
)
def test_ages_are_told_in_one_unit(seconds: float | None, text: str) -> None:
    assert age_text(seconds) == text


def test_an_age_counts_from_the_recorded_time() -> None:
    assert age_s("1970-01-01T00:01:00+00:00", 100.0) == 40.0
    assert age_s("1970-01-01T00:01:00Z", 100.0) == 40.0
    assert age_s("yesterday", 100.0) is None


@pytest.fixture
def lost(run: Path) -> Path:
    """Return a run in which the newest start's record of what it resumed is damaged, and nothing else tells it."""
    storage = LocalStorage(run)
    write_incarnation(storage, 3, chain=(*SECOND, LineageLink(3, "step-000000000400-i000002-0badcafe", 400)))
    (run / "incarnations" / "000003.resumed.json").write_bytes(b"")
    return run


def test_a_run_whose_lineage_cannot_be_told_is_still_listed_so_that_a_step_can_be_chosen(
    lost: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["ls", str(lost)]) == 0
    text = capsys.readouterr().out
    assert "which checkpoints are live cannot be told" in text and "000003.resumed.json" in text
    code, shown = answer(capsys, "show", f"{lost}@400")
    assert (code, shown["manifest"]["step"]) == (0, 400)
    code, verified = answer(capsys, "verify", f"{lost}@400")
    assert verified["holds"] and code == 0


@pytest.mark.parametrize("command", [["show"], ["verify"], ["prune", "--keep-last", "2"]])
def test_what_needs_the_lineage_is_refused_where_it_cannot_be_told(
    lost: Path, capsys: pytest.CaptureFixture[str], command: list[str]
) -> None:
    assert main([*command, str(lost)]) == 1
    assert "what the newest start resumed from cannot be read" in capsys.readouterr().err
