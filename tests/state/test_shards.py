"""State that is divided over real ranks: what they capture is the whole, and any division takes it back.

The checks themselves are in `shard_worker`; each start of a job makes all of them.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.state.shard_worker import CHECKS
from tests.warm import WarmPython

WORKER = Path(__file__).with_name("shard_worker.py")


@pytest.mark.timeout(320)
@pytest.mark.parametrize("world_size", [2, pytest.param(4, marks=pytest.mark.soak)])
def test_every_check_holds_on_real_ranks(world_size: int, tmp_path: Path, warm_python: WarmPython) -> None:
    ranks = warm_python.run_ranks(WORKER, count=world_size, logs=tmp_path)
    assert not any(one.returncode for one in ranks), ranks
    assert ranks[0].output.split() == [check.__name__ for check in CHECKS]
