"""Start job processes, read what they say, and kill them."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from safepoint.ambient import SystemAmbient
from safepoint.storage.local import LocalStorage
from safepoint.testing.ambient import FakeWorld
from tests.crash.job import Job, Weights, whole_state
from tests.warm import EAGER

SCRIPTS = Path(__file__).parent / "scripts"
ROOT = Path(__file__).parents[2]
SOURCE = os.pathsep.join([str(ROOT / "src"), str(ROOT)])
LONGEST_WAIT_S = 60


class Process:
    """Follow one process of a script that prints a JSON object a line."""

    def __init__(self, script: str, *arguments: object, before: Sequence[str] = ()) -> None:
        self.popen = subprocess.Popen(
            [*before, sys.executable, str(SCRIPTS / script), *map(str, arguments)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, "PYTHONPATH": os.pathsep.join([SOURCE, str(EAGER)])},
        )

    def line(self) -> dict[str, Any]:
        """Return the next thing the process says; an empty dict when it has ended."""
        assert self.popen.stdout is not None
        text = self.popen.stdout.readline()
        return json.loads(text) if text.endswith("\n") else {}

    def go(self) -> None:
        """Let a waiting process make its next save."""
        assert self.popen.stdin is not None
        self.popen.stdin.write("\n")
        self.popen.stdin.flush()

    def signal(self, number: signal.Signals) -> None:
        """Send a signal."""
        self.popen.send_signal(number)

    def rest(self) -> list[dict[str, Any]]:
        """Wait for the end, and return all that was still said."""
        text, _ = self.popen.communicate(timeout=LONGEST_WAIT_S)
        return [json.loads(line) for line in text.splitlines(keepends=True) if line.endswith("\n")]

    def kill(self) -> list[dict[str, Any]]:
        """Kill with SIGKILL, and return all that was still said."""
        self.popen.kill()
        return self.rest()


@contextmanager
def running(script: str, *arguments: object) -> Iterator[Process]:
    """Run a process, which is killed at the end of the block if it is still there."""
    process = Process(script, *arguments)
    try:
        yield process
    finally:
        process.popen.kill()
        process.popen.communicate(timeout=LONGEST_WAIT_S)


def own_job(root: Path, *, ballast_bytes: int = 0, **options: Any) -> Job:
    """Return a start of the job in this very process, on real files."""
    job = Job(LocalStorage(root), FakeWorld(), pid=os.getpid(), ambient=SystemAmbient(), **options)
    if ballast_bytes:
        job.items["ballast"] = Weights("ballast", data=bytearray(ballast_bytes))
    return job


def run_of(steps: Sequence[int], root: Path, *, ballast_bytes: int = 0) -> Path:
    """Let a job save these steps and end, and return the run's folder."""
    job = own_job(root, ballast_bytes=ballast_bytes)
    job.start()
    job.live(*steps)
    job.end()
    return root


def check_resumes(root: Path, *, at_least: int, at_most: int, ballast_bytes: int = 0) -> int:
    """Start on what is left, check that it is whole and how far it came, save, and return the step resumed."""
    job = own_job(root, ballast_bytes=ballast_bytes)
    try:
        report = job.start()
        assert at_least <= report.step <= at_most
        assert report.step == 0 or job.state() == whole_state(report.step)
        job.live(report.step + 1)
    finally:
        job.end()
    again = own_job(root, ballast_bytes=ballast_bytes)
    try:
        assert again.start().step == report.step + 1
        assert again.state() == whole_state(report.step + 1)
    finally:
        again.end()
    return report.step
