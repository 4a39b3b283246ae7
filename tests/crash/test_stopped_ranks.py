"""A job that torchrun starts, and a scheduler's SIGTERM: one checkpoint of all ranks, and no process left."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

import safepoint as sp
from tests.crash.processes import LONGEST_WAIT_S, ROOT, SOURCE

# So many that a run is not over before all ranks know of the signal; and how many more are compared.
MANY, FURTHER = 1_000_000, 20


def start(root: Path) -> subprocess.Popen[str]:
    """Start the example on two ranks, in a session of its own."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "--"]
    script = [str(ROOT / "examples" / "ddp.py"), "--run", str(root), "--updates", str(MANY), "--save-every", str(MANY)]
    return subprocess.Popen(
        [*command, *script],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
        env={**os.environ, "PYTHONPATH": SOURCE, "OMP_NUM_THREADS": "1"},
    )


def heard(job: subprocess.Popen[str], *, until: int) -> str:
    """Return what a job says up to a step."""
    assert job.stdout is not None
    said = ""
    while f"step {until} " not in said:
        line = job.stdout.readline()
        assert line, said
        said += line
    return said


@contextmanager
def running(root: Path) -> Iterator[subprocess.Popen[str]]:
    """Start a job, of which nothing is left after the block."""
    job = start(root)
    try:
        yield job
    finally:
        for process in (*members(job.pid), job.pid):
            with suppress(ProcessLookupError):
                os.kill(process, signal.SIGKILL)
        job.communicate()


def members(session: int) -> list[int]:
    """Return the processes that descend from a session's leader, those of sessions of their own included."""
    children: dict[int, list[int]] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                fields = (entry / "stat").read_text().rpartition(")")[2].split()
            except OSError:
                continue
            children.setdefault(int(fields[1]), []).append(int(entry.name))
    found, look = [], [session]
    while look:
        below = children.get(look.pop(), [])
        found += below
        look += below
    return found


def losses(text: str) -> dict[int, str]:
    return {int(step): loss for step, loss in re.findall(r"step (\d+) loss (\S+)", text)}


@pytest.mark.soak
@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="needs Linux's process table")
def test_a_job_of_torchrun_stops_on_a_signal_and_goes_on_with_the_same_losses(tmp_path: Path) -> None:
    with running(tmp_path / "run") as job:
        said = heard(job, until=5)
        ranks = members(job.pid)
        job.send_signal(signal.SIGTERM)
        rest, _ = job.communicate(timeout=LONGEST_WAIT_S)
    assert not [rank for rank in ranks if Path(f"/proc/{rank}").exists()]
    made = losses(said + rest)
    assert [one.step for one in sp.open_run(tmp_path / "run").checkpoints()] == [max(made)], said + rest
    until = max(made) + FURTHER
    with running(tmp_path / "run") as again, running(tmp_path / "whole") as whole:
        resumed, expected = losses(heard(again, until=until)), losses(heard(whole, until=until))
    assert min(resumed) == max(made) + 1
    assert made | resumed == expected
