"""Real ranks over gloo: other numbers of them go on from each other's checkpoints.

The checks themselves are in `reshard_worker`; each start of a job makes all of them for several runs.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import pytest

import safepoint as sp
from safepoint.catalog import examine_all, read_lineage
from safepoint.restoring.compare import compare_checkpoints
from safepoint.restoring.verify import verify_generation
from safepoint.storage.local import LocalStorage
from tests.restoring.ranks import norms
from tests.restoring.ranks.reshard_worker import CHAINS, digests
from tests.state.divided import build
from tests.warm import WarmPython

WORKER = Path(__file__).with_name("reshard_worker.py")


def start(python: WarmPython, folder: Path, world_size: int, chains: Sequence[str]) -> list[str]:
    """Start a job, and return what its leader says of each run."""
    ranks = python.run_ranks(WORKER, folder, *chains, count=world_size, logs=folder, limit_s=240)
    assert not any(one.returncode for one in ranks), ranks
    return ranks[0].output.splitlines()


def expected(before: int | None, world_size: int, chains: Sequence[str]) -> list[str]:
    """Return what is said of a job that goes on from another number of ranks, or begins."""
    if before in (None, world_size):
        found = "exact"
    else:
        # What one process had of a generator is given to all; only its global streams are known to be its own.
        found = "rng world_size" if before == 1 else "noise.per_rank rng world_size"
    told = [f"{chain}: {CHAINS[chain][world_size]} on {world_size}, {found}" for chain in chains]
    return [*told, f"norms: step {norms.UPDATES} on {world_size}"]


@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    ("world_sizes", "chains"),
    [((4, 2), ("fsdp", "mixed")), pytest.param((4, 2, 3, 1, 4, 4), tuple(CHAINS), marks=pytest.mark.soak)],
    ids=lambda words: "-".join(map(str, words)),
)
def test_any_number_of_ranks_goes_on_from_what_another_number_left(
    tmp_path: Path, world_sizes: tuple[int, ...], chains: tuple[str, ...], warm_python: WarmPython
) -> None:
    """Spec: C11.6"""
    for before, world_size in zip((None, *world_sizes), world_sizes, strict=False):
        assert start(warm_python, tmp_path, world_size, chains) == expected(before, world_size, chains)
    for chain in chains:
        check_is_read_by_one_process(tmp_path, chain, world_size=world_sizes[-1])


def check_is_read_by_one_process(folder: Path, chain: str, *, world_size: int) -> None:
    """See that the last checkpoint of a run verifies, is equal to itself, and is loaded whole, without joining it."""
    left = json.loads((folder / f"{chain}.json").read_text())
    storage = LocalStorage(str(folder / chain))
    newest = next(iter(examine_all(storage, read_lineage(storage))))
    assert newest.manifest is not None and newest.manifest.world_size == world_size
    assert verify_generation(storage, newest).findings == ()
    assert compare_checkpoints(storage, newest, storage, newest).is_equal
    built = build("plain", seed=3)
    report = sp.open_run(folder / chain).load({"model": built[0], "optimizer": built[1]})
    assert report.step == left["step"] == newest.name.step
    assert digests(built) == left["digests"]
