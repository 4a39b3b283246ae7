"""Play the cases of `fault_worker`, and read what their ranks said."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

ROOT = Path(__file__).parents[3]
WORKER = Path(__file__).with_name("fault_worker.py")
# The cases wait far more than they compute.
AT_ONCE = 6
FIRST, STRUCK, LAST = 1, 2, 3

# (step, what happened, the digest of the weights or the error's text), one for each thing that a rank said.
Lines = list[list[tuple[int, str, str]]]


@dataclass(frozen=True, slots=True)
class Fault:
    """Say what `fault_worker.Case` says."""

    name: str
    rank: int = 0
    phase: str = ""
    fault: str = ""
    late: bool = False
    hosts: list[str] = field(default_factory=list)
    address: str = ""
    interface: str = ""
    mend: str = ""


@dataclass(frozen=True, slots=True)
class Told:
    """Hold what the ranks of one case said, before the fault and after it, and where their run lies."""

    case: Fault
    run: Path
    stuck: int
    first: Lines
    second: Lines

    @property
    def is_made(self) -> bool:
        """Return whether the first start's second save has a manifest."""
        pattern = f"generations/step-{STRUCK:012d}-i000001-*/manifest.json"
        return bool(list(self.run.glob(pattern)))

    def words(self) -> list[str | None]:
        """Return what each rank was told of the second save; None where it said nothing."""
        return [next((what for step, what, _ in lines if step == STRUCK), None) for lines in self.first]

    def check_goes_on(self, whole: Told) -> None:
        """Check that the next start resumed what is there, and came to the same end as the uninterrupted run."""
        weights = {step: text for step, what, text in whole.first[0] if what == "saved"}
        resumed = STRUCK if self.is_made else FIRST
        for lines in self.second:
            assert tuple(lines[0]) == (resumed, "resumed", weights[resumed]), self
            assert tuple(lines[-1]) == (LAST, "saved", weights[LAST]), self


def fault(rank: int, phase: str, number: str, *, late: bool = False) -> Fault:
    """Return the case of a rank that gets a signal where a phase begins; of nothing, where the signal is empty."""
    name = f"rank-{rank}-{phase}-{number}{'-late' if late else ''}" if number else "whole"
    return Fault(name, rank, phase, number, late)


def play(cases: Sequence[Fault], folder: Path) -> list[Told]:
    """Play cases, several at once, and return what was said, in their order."""
    path = os.pathsep.join([str(ROOT / "src"), str(ROOT)])
    variables = {"PYTHONPATH": path, "OMP_NUM_THREADS": "1", "TORCH_CPP_LOG_LEVEL": "ERROR"}
    done = subprocess.run(
        [sys.executable, str(WORKER), str(folder), str(AT_ONCE)],
        input="".join(json.dumps(asdict(case)) + "\n" for case in cases),
        env={**os.environ, **variables},
        capture_output=True,
        text=True,
        timeout=60 + 60 * len(cases),
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    said = {one.pop("name"): one for one in map(json.loads, done.stdout.splitlines())}
    for name, one in said.items():
        assert "status" not in one, (name, one, done.stderr, (folder / name / "stderr").read_text())
    return [Told(case, folder / case.name / "run", **said[case.name]) for case in cases]
