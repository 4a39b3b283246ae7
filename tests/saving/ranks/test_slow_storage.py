"""The leader's storage takes longer than the ranks' process group waits, and no collective times out."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.saving.ranks.slow_storage_worker import PUBLISH_S, RANKS, TIMEOUT_S

ROOT = Path(__file__).parents[3]


@pytest.mark.soak
@pytest.mark.timeout(0)
def test_no_collective_waits_for_the_leader_s_storage(tmp_path: Path) -> None:
    """Ranks wait for each other by messages, which the process group's time-out does not concern."""
    path = os.pathsep.join([str(ROOT / "src"), str(ROOT)])
    worker = Path(__file__).with_name("slow_storage_worker.py")
    done = subprocess.run(
        [sys.executable, str(worker), str(tmp_path)],
        env={**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )
    said = [json.loads(line) for line in done.stdout.splitlines()]
    assert len(said) == 2 * RANKS, done.stderr
    assert PUBLISH_S > TIMEOUT_S
    for one in said:
        assert one["step"] == 1 and one["sums"] == [3.0, 5.0, 7.0]
        assert one["background"] or one["saving_s"] >= PUBLISH_S, "a save in the foreground lasts on every rank"
