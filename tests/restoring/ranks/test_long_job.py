"""A job of four real ranks that dies, and of whose newest checkpoint three ranks' parts are left."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from safepoint.format.names import GENERATIONS, data_name
from tests.warm import WarmPython

WORKER = Path(__file__).with_name("long_job_worker.py")
RANKS, LOST_RANK = 4, 2


def start(python: WarmPython, folder: Path, dies_at: int, save_every: int) -> list[dict[str, Any]]:
    """Start the job, and return what its ranks said, in their order."""
    ranks = python.run_ranks(WORKER, folder, dies_at, save_every, count=RANKS, logs=folder.parent, limit_s=400)
    assert not any(one.returncode for one in ranks), ranks
    said = [json.loads(one.output) for one in ranks]
    assert [one["rank"] for one in said] == list(range(RANKS))
    return said


@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    ("dies_at", "torn_at", "whole_at"), [(33, 30, 20), pytest.param(1130, 1100, 1000, marks=pytest.mark.soak)]
)
def test_parts_of_three_ranks_are_no_checkpoint_and_each_rank_goes_on_with_what_was_its_own(
    tmp_path: Path, warm_python: WarmPython, dies_at: int, torn_at: int, whole_at: int
) -> None:
    """Spec: C11.6"""
    run, save_every = tmp_path / "run", torn_at - whole_at
    died = start(warm_python, run, dies_at, save_every)
    assert {one["step"] for one in died} == {0}
    (torn,) = (run / GENERATIONS).glob(f"step-{torn_at:012d}-*")
    lost = data_name(LOST_RANK, RANKS)
    (torn / lost).unlink()

    resumed = start(warm_python, run, dies_at, save_every)
    for before, now in zip(died, resumed, strict=True):
        assert (now["step"], now["replayed"]) == (whole_at, dies_at - whole_at)
        assert torn.name in now["report"] and lost in now["report"]
        assert f"{dies_at - whole_at} updates were done after this step and will be done again" in now["report"]
        # Weights, generator and position are of one step, and of this rank; and so is all that is made of them.
        assert now["at"] == {step: before["at"][step] for step in map(str, (whole_at, torn_at, dies_at))}
        assert now["ids"] == before["ids"]
    generators = [one["at"][str(whole_at)][1] for one in resumed]
    assert len(set(generators)) == RANKS
