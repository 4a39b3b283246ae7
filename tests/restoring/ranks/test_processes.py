"""Real ranks over gloo: 4 → 2 → 3 → 1 → 4 → 4 of them go on from each other's checkpoints.

The checks themselves are in `reshard_worker`; each start of a job makes all of them for three runs.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

import safepoint as sp
from safepoint.catalog import examine_all, read_lineage
from safepoint.restoring.compare import compare_checkpoints
from safepoint.restoring.verify import verify_generation
from safepoint.storage.local import LocalStorage
from tests.restoring.ranks.reshard_worker import CHAINS, digests
from tests.state.divided import build

ROOT = Path(__file__).parents[3]
CHANGED = "noise.per_rank rng world_size"


def start(folder: Path, world_size: int) -> list[str]:
    """Start a job, and return what its leader says of each run."""
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([str(ROOT / "src"), str(ROOT)]),
        "OMP_NUM_THREADS": "1",
        "TORCH_CPP_LOG_LEVEL": "ERROR",
    }
    worker = Path(__file__).with_name("reshard_worker.py")
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(world_size)]
    done = subprocess.run(
        [*command, worker, folder], env=environment, capture_output=True, text=True, timeout=240, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout.splitlines()


@pytest.mark.timeout(900)
def test_any_number_of_ranks_goes_on_from_what_another_number_left(tmp_path: Path) -> None:
    """Spec: C11.6"""
    said = [start(tmp_path, world_size) for world_size in (4, 2, 3, 1, 4, 4)]
    assert said[0] == ["fsdp: fsdp on 4, exact", "ddp: ddp on 4, exact", "mixed: fsdp_tp on 4, exact"]
    assert said[1] == [f"fsdp: fsdp on 2, {CHANGED}", f"ddp: ddp on 2, {CHANGED}", f"mixed: ddp on 2, {CHANGED}"]
    assert said[2] == [f"fsdp: fsdp on 3, {CHANGED}", f"ddp: ddp on 3, {CHANGED}", f"mixed: fsdp on 3, {CHANGED}"]
    assert said[3] == [f"fsdp: fsdp on 1, {CHANGED}", f"ddp: ddp on 1, {CHANGED}", f"mixed: plain on 1, {CHANGED}"]
    # What one process had of a generator is given to all; only its global streams are known to be its own.
    after_one = "rng world_size"
    assert said[4] == [
        f"fsdp: fsdp on 4, {after_one}",
        f"ddp: ddp on 4, {after_one}",
        f"mixed: fsdp_tp on 4, {after_one}",
    ]
    assert said[5] == said[0]
    for chain in CHAINS:
        check_is_read_by_one_process(tmp_path, chain)


def check_is_read_by_one_process(folder: Path, chain: str) -> None:
    """See that the last checkpoint of a run verifies, is equal to itself, and is loaded whole, without joining it."""
    left = json.loads((folder / f"{chain}.json").read_text())
    storage = LocalStorage(str(folder / chain))
    newest = next(iter(examine_all(storage, read_lineage(storage))))
    assert newest.manifest is not None and newest.manifest.world_size == 4
    assert verify_generation(storage, newest).findings == ()
    assert compare_checkpoints(storage, newest, storage, newest).is_equal
    built = build("plain", seed=3)
    report = sp.open_run(folder / chain).load({"model": built[0], "optimizer": built[1]})
    assert report.step == left["step"] == newest.name.step
    assert digests(built) == left["digests"]
