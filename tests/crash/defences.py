"""The defences of a run's safety, each with what switches it off and the tests that notice.

A case is a replacement of text that has to match exactly once, so that it cannot drift away from the code. It is made
in a copy of the sources and of the tests; what is here is never touched.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from tests.crash.processes import ROOT

LONGEST_RUN_S = 300
_FAILED = re.compile(r"^FAILED (.+?)(?: - .*)?$", re.MULTILINE)
_COPIED = ("src", "tests", "pyproject.toml")
_LEFT_OUT = shutil.ignore_patterns("*.egg-info", ".hypothesis", ".pytest_cache")


@dataclass(frozen=True, slots=True)
class Case:
    """One place of a defence.

    Args:
        defence: The defence's name.
        where: What is no longer done, in a few words.
        file: The file, below `src/safepoint`.
        old: Text that stands there exactly once.
        new: What takes its place.
        tests: Tests of which each fails then.
        others: Further texts of the file, each with what takes its place.
    """

    defence: str
    where: str
    file: str
    old: str
    new: str
    tests: tuple[str, ...]
    others: tuple[tuple[str, str], ...] = ()

    @property
    def name(self) -> str:
        return f"{self.defence}: {self.where}"

    @property
    def replacements(self) -> tuple[tuple[str, str], ...]:
        return ((self.old, self.new), *self.others)

    def check_matches(self) -> None:
        """Check that each text stands there once, that what is left is Python, and that the tests are there."""
        text = (ROOT / "src/safepoint" / self.file).read_text()
        for old, _ in self.replacements:
            found = text.count(old)
            assert found == 1, f"{self.name}: {old!r} stands {found} times in {self.file}"
        compile(self.without(text), self.file, "exec")
        for test in self.tests:
            file, *_, function = test.split("::")
            heading = f"def {function.partition('[')[0]}("
            # A test of the suite that every storage has to pass stands with that suite.
            files = (ROOT / file, ROOT / "src/safepoint/testing/storage.py")
            assert any(heading in path.read_text() for path in files), f"{self.name}: there is no {test}"

    def without(self, text: str) -> str:
        """Return a source without the defence."""
        for old, new in self.replacements:
            text = text.replace(old, new)
        return text

    def switch_off(self, copy: Path) -> None:
        """Make the replacements in a copy."""
        path = copy / "src/safepoint" / self.file
        path.write_text(self.without(path.read_text()))

    def switch_on(self, copy: Path) -> None:
        """Put the file back in a copy."""
        shutil.copy2(ROOT / "src/safepoint" / self.file, copy / "src/safepoint" / self.file)


def copied(folder: Path) -> Path:
    """Return a copy of the sources and the tests."""
    for name in _COPIED:
        source = ROOT / name
        if source.is_dir():
            shutil.copytree(source, folder / name, ignore=_LEFT_OUT)
        else:
            shutil.copy2(source, folder / name)
    return folder


def passing(copy: Path, *tests: str) -> list[str]:
    """Run tests in a copy, and return those of which nothing failed; that they could not be run is an error."""
    answer = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--tb=no", *tests],
        cwd=copy,
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(copy / "src"), str(copy)])},
        capture_output=True,
        text=True,
        timeout=LONGEST_RUN_S,
    )
    assert answer.returncode in (0, 1) and " error" not in answer.stdout.splitlines()[-1], answer.stdout[-3000:]
    failed = _FAILED.findall(answer.stdout)
    return [test for test in tests if not any(one == test or one.startswith(f"{test}[") for one in failed)]
