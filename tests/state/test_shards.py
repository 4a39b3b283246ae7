"""State that is divided over real ranks: what they capture is the whole, and any division takes it back.

The checks themselves are in `shard_worker`; each start of a job makes all of them.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.state.shard_worker import CHECKS

ROOT = Path(__file__).parents[2]


@pytest.mark.timeout(320)
@pytest.mark.parametrize("world_size", [2, pytest.param(4, marks=pytest.mark.soak)])
def test_every_check_holds_on_real_ranks(world_size: int) -> None:
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([str(ROOT / "src"), str(ROOT)]),
        "OMP_NUM_THREADS": "1",
        "TORCH_CPP_LOG_LEVEL": "ERROR",
    }
    worker = Path(__file__).with_name("shard_worker.py")
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(world_size)]
    done = subprocess.run([*command, worker], env=environment, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.split() == [check.__name__ for check in CHECKS]
