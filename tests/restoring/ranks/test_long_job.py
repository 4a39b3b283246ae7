"""A long job of four real ranks that dies, and of whose newest checkpoint three ranks' parts are left."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from safepoint.format.names import GENERATIONS, data_name
from tests.warm import WarmPython

WORKER = Path(__file__).with_name("long_job_worker.py")
RANKS, LOST_RANK = 4, 2
DIES_AT, TORN, WHOLE = 1130, 1100, 1000


def start(python: WarmPython, folder: Path) -> list[dict[str, Any]]:
    """Start the job, and return what its ranks said, in their order."""
    ranks = python.run_ranks(WORKER, folder, DIES_AT, count=RANKS, logs=folder.parent, limit_s=400)
    assert not any(one.returncode for one in ranks), ranks
    said = [json.loads(one.output) for one in ranks]
    assert [one["rank"] for one in said] == list(range(RANKS))
    return said


@pytest.mark.timeout(900)
def test_parts_of_three_ranks_are_no_checkpoint_and_each_rank_goes_on_with_what_was_its_own(
    tmp_path: Path, warm_python: WarmPython
) -> None:
    """Spec: C11.6"""
    run = tmp_path / "run"
    died = start(warm_python, run)
    assert {one["step"] for one in died} == {0}
    (torn,) = (run / GENERATIONS).glob(f"step-{TORN:012d}-*")
    lost = data_name(LOST_RANK, RANKS)
    (torn / lost).unlink()

    resumed = start(warm_python, run)
    for before, now in zip(died, resumed, strict=True):
        assert (now["step"], now["replayed"]) == (WHOLE, DIES_AT - WHOLE)
        assert torn.name in now["report"] and lost in now["report"]
        assert "130 updates were done after this step and will be done again" in now["report"]
        # Weights, generator and position are of one step, and of this rank; and so is all that is made of them.
        assert now["at"] == {step: before["at"][step] for step in map(str, (WHOLE, TORN, DIES_AT))}
        assert now["ids"] == before["ids"]
    generators = [one["at"][str(WHOLE)][1] for one in resumed]
    assert len(set(generators)) == RANKS
