"""A program that ends while a save is in flight: the save completes, and what failed is seen."""

from __future__ import annotations

from pathlib import Path

import pytest

from safepoint.storage.local import LocalStorage
from tests.crash.job import newest_step
from tests.crash.processes import LONGEST_WAIT_S, Process, check_resumes


def end(root: Path, ending: str, *options: str) -> tuple[int, str]:
    """Run the script to its end; return its exit code and what it wrote to standard error."""
    process = Process("ending.py", root, ending, *options)
    _, errors = process.popen.communicate(timeout=LONGEST_WAIT_S)
    return process.popen.returncode, errors


@pytest.mark.parametrize(("ending", "code"), [("fall", 0), ("exit", 0), ("exit 3", 3), ("raise", 1)])
def test_a_save_in_flight_completes_however_the_program_ends(tmp_path: Path, ending: str, code: int) -> None:
    found, errors = end(tmp_path / "run", ending)
    assert found == code, errors
    assert newest_step(LocalStorage(tmp_path / "run")) == 2
    check_resumes(tmp_path / "run", at_least=2, at_most=2)
    assert ("ArithmeticError: the loss is not a number" in errors) == (ending == "raise")


@pytest.mark.parametrize("ending", ["fall", "exit"])
def test_a_background_failure_that_nobody_asked_for_ends_the_program_with_its_code(tmp_path: Path, ending: str) -> None:
    code, errors = end(tmp_path / "run", ending, "--fails")
    assert code == 5
    assert "a background save failed and nobody asked" in errors
    assert "disk is full" in errors
    check_resumes(tmp_path / "run", at_least=1, at_most=1)


def test_the_exception_of_the_training_is_shown_before_that_of_the_save(tmp_path: Path) -> None:
    code, errors = end(tmp_path / "run", "raise", "--fails")
    assert code != 0
    training, save = errors.index("ArithmeticError: the loss is not a number"), errors.index("a background save failed")
    assert training < save
    check_resumes(tmp_path / "run", at_least=1, at_most=1)
