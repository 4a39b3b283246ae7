"""A rank that is slow to restore is waited for, and one that is stopped meanwhile is not: with processes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
RANKS = 3

pytestmark = [pytest.mark.soak, pytest.mark.timeout(0)]


def restored(folder: Path, rank: int, how: str) -> dict[int, tuple[int, str]]:
    """Return what each rank that ended by itself came to in the second start: a step and an error's text."""
    worker = Path(__file__).with_name("frozen_worker.py")
    path = os.pathsep.join([str(ROOT / "src"), str(ROOT)])
    done = subprocess.run(
        [sys.executable, str(worker), str(folder), str(rank), how],
        env={**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1", "TORCH_CPP_LOG_LEVEL": "ERROR"},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    said = [json.loads(line) for line in done.stdout.splitlines()]
    assert [one["step"] for one in said[:RANKS]] == [0] * RANKS, done.stdout + done.stderr
    return {one["rank"]: (one["step"], one["text"]) for one in said[RANKS:]}


@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_that_is_slow_to_restore_is_waited_for(tmp_path: Path, rank: int) -> None:
    """Spec: C11.12"""
    assert restored(tmp_path, rank, "slow") == dict.fromkeys(range(RANKS), (1, ""))


def test_a_rank_that_is_stopped_while_it_restores_is_named_by_the_others(tmp_path: Path) -> None:
    """The deadline of a restore is half an hour; this comes in seconds. Spec: C11.12"""
    told = restored(tmp_path, 1, "frozen")
    assert sorted(told) == [0, 2]
    assert all("AbortedError: 1 of 3 ranks show no sign of life" in text for _, text in told.values())
    assert all("nothing from rank 1" in text for _, text in told.values())


def test_a_leader_that_is_stopped_while_it_restores_is_lost_to_the_others(tmp_path: Path) -> None:
    """Spec: C11.12"""
    told = restored(tmp_path, 0, "frozen")
    assert sorted(told) == [1, 2]
    assert all(text.startswith("LeaderLostError: ") and "rank 0" in text for _, text in told.values())
