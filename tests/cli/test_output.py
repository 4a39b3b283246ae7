"""What becomes of an answer that cannot be written: one line and an exit code of its own, never a bug to report."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from safepoint.cli import main
from safepoint.storage.local import LocalStorage
from tests.build import begin, write_generation

SOURCE = Path(__file__).resolve().parents[2] / "src"
# An answer that waits in the buffer until the end, and one that no buffer holds.
STEPS = {"short": (1, 2, 3), "long": tuple(range(1, 101))}
each_length = pytest.mark.parametrize("length", STEPS)


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("output")
    for length, steps in STEPS.items():
        storage = LocalStorage(folder / length)
        chain = begin(storage)
        for step in steps:
            write_generation(storage, step, chain=chain)
    return folder


def safepoint(run: Path, redirection: str = "", stdout: int | None = None) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        ["sh", "-c", f'exec "$0" -m safepoint.cli ls "$1" {redirection}', sys.executable, str(run)],
        env={**os.environ, "PYTHONPATH": str(SOURCE)},
        stdout=stdout,
        stderr=subprocess.PIPE,
        text=True,
        check=False,
        timeout=60,
    )


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="there is no full device here")
@each_length
def test_an_answer_to_a_full_disk_is_a_failure_of_the_storage(runs: Path, length: str) -> None:
    done = safepoint(runs / length, "> /dev/full")
    assert done.returncode == 5
    assert done.stderr == "safepoint: the answer cannot be written [standard output]; found No space left on device.\n"


def test_a_closed_output_is_a_failure_of_the_storage(runs: Path) -> None:
    done = safepoint(runs / "short", ">&-")
    assert done.returncode == 5
    assert done.stderr == "safepoint: the answer cannot be written [standard output]; found it is closed.\n"


@each_length
def test_a_reader_that_is_gone_ends_the_command_in_silence(runs: Path, length: str) -> None:
    reading, writing = os.pipe()
    os.close(reading)
    done = safepoint(runs / length, stdout=writing)
    os.close(writing)
    assert (done.returncode, done.stderr) == (141, "")


def test_a_file_of_the_command_itself_that_cannot_be_made_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").write_text("")
    folder = tmp_path / "file" / "kept"
    assert main(["drill", "--keep-folder", str(folder), "--", "true"]) == 5
    assert str(folder) in capsys.readouterr().err


@pytest.mark.parametrize("tail", ["abc", "", "-5", "1.5"])
def test_what_is_no_step_is_a_wrong_call(runs: Path, tail: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["show", f"{runs}/short@{tail}"]) == 2
    assert capsys.readouterr().err.startswith("safepoint: neither a step nor a generation's name ")


def test_an_at_sign_in_the_path_of_a_folder_begins_no_step(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["show", f"{tmp_path}/a@b/nothing"]) == 3
    (tmp_path / "run@abc").mkdir()
    assert main(["show", f"{tmp_path}/run@abc"]) == 3
    assert capsys.readouterr().err.count("there is no run here") == 2


def test_a_run_whose_name_ends_in_a_sign_and_digits_comes_before_a_step_of_another(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def shown(text: str) -> object:
        assert main(["show", text, "--json"]) == 0
        return json.loads(capsys.readouterr().out)["manifest"]["step"]

    alone = LocalStorage(tmp_path / "a@3")
    write_generation(alone, 7, chain=begin(alone))
    assert shown(f"{tmp_path}/a@3") == 7
    assert shown(f"{tmp_path}/a@3@7") == 7
    other = LocalStorage(tmp_path / "a")
    write_generation(other, 3, chain=begin(other))
    assert main(["show", f"{tmp_path}/a@3"]) == 2
    told = capsys.readouterr().err
    assert f"{tmp_path}/a@3/ for the run" in told and f"{tmp_path}/a/@3 for the step" in told
    assert shown(f"{tmp_path}/a@3/") == 7
    assert shown(f"{tmp_path}/a/@3") == 3
    (tmp_path / "a@3" / "run.json").unlink()
    assert shown(f"{tmp_path}/a@3") == 3
