"""A job that torchrun starts, and a scheduler's SIGTERM: one checkpoint of all ranks, and no process left."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

import safepoint as sp
from tests.crash.processes import LONGEST_WAIT_S, ROOT, SOURCE

UPDATES = 40


def start(root: Path, *options: str) -> subprocess.Popen[str]:
    """Start the example on two ranks, in a process group of its own."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "--"]
    script = [str(ROOT / "examples" / "ddp.py"), "--run", str(root), "--updates", str(UPDATES), "--save-every", "1000"]
    return subprocess.Popen(
        [*command, *script, *options],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
        env={**os.environ, "PYTHONPATH": SOURCE, "OMP_NUM_THREADS": "1"},
    )


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
    whole, _ = start(tmp_path / "whole").communicate(timeout=LONGEST_WAIT_S)
    job = start(tmp_path / "run")
    try:
        assert job.stdout is not None
        said = ""
        while "step 5 " not in said:
            line = job.stdout.readline()
            assert line, said
            said += line
        ranks = members(job.pid)
        job.send_signal(signal.SIGTERM)
        rest, _ = job.communicate(timeout=LONGEST_WAIT_S)
    finally:
        job.kill()
    assert not [rank for rank in ranks if Path(f"/proc/{rank}").exists()]
    made = losses(said + rest)
    (checkpoint,) = sp.open_run(tmp_path / "run").checkpoints()
    assert checkpoint.step == max(made) < UPDATES
    again, _ = start(tmp_path / "run").communicate(timeout=LONGEST_WAIT_S)
    resumed = losses(again)
    assert min(resumed) == checkpoint.step + 1
    assert made | resumed == losses(whole)
