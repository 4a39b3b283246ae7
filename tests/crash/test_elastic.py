"""One command under torchrun that loses ranks, is restarted by torchrun, resumes and ends as if nothing had been."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from safepoint.catalog import Incarnation, read_lineage
from safepoint.storage.local import LocalStorage
from tests.crash.processes import SCRIPTS, SOURCE

RANKS, UNTIL = 2, 20
# Else all restarts share one store, and a rank may read the address of one that is dead there (tried with torch 2.13).
OWN_STORE = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}


def train(root: Path, *kills: str) -> list[dict[str, object]]:
    """Start the one command, with as many restarts as there are kills, and return what its ranks said."""
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(RANKS)]
    script = [str(SCRIPTS / "elastic_training.py"), str(root), str(UNTIL), *kills]
    done = subprocess.run(
        [sys.executable, *launcher, "--max-restarts", str(len(kills)), *script],
        env={**os.environ, **OWN_STORE, "PYTHONPATH": SOURCE, "OMP_NUM_THREADS": "1", "TORCH_CPP_LOG_LEVEL": "ERROR"},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]


def told(said: list[dict[str, object]], what: str) -> dict[tuple[object, object], set[object]]:
    """Return all texts by rank and step: one each, where an update that was made again was the same again."""
    texts: dict[tuple[object, object], set[object]] = {}
    for one in said:
        if one["what"] == what:
            texts.setdefault((one["rank"], one["step"]), set()).add(one["text"])
    return texts


def incarnations(root: Path) -> tuple[Incarnation, ...]:
    return read_lineage(LocalStorage(root)).incarnations


@pytest.mark.soak
@pytest.mark.timeout(0)
def test_a_job_that_torchrun_restarts_resumes_by_itself_and_ends_bit_for_bit_the_same(tmp_path: Path) -> None:
    """A rank dies before update 8, the leader before update 14: each restart is a start of its own, and recorded.

    Spec: C1.4
    """
    undisturbed = train(tmp_path / "undisturbed")
    killed = train(tmp_path / "killed", "1:8", "0:14")
    updates = told(undisturbed, "update")
    assert {step for _, step in updates} == set(range(1, UNTIL + 1))
    assert all(len(texts) == 1 for texts in updates.values())
    assert told(killed, "update") == updates
    assert told(killed, "end") == told(undisturbed, "end")
    assert len(told(killed, "end")) == RANKS
    assert told(killed, "resumed") == {(rank, step): {"exact"} for rank in range(RANKS) for step in (0, 6, 12)}

    records = [one.record for one in incarnations(tmp_path / "killed") if one.record is not None]
    assert [record.elastic_restart for record in records] == [0, 1, 2]
    (job,) = {record.elastic_run for record in records}
    assert job not in ("", "none")
    resumed = [one.resumed for one in incarnations(tmp_path / "killed")]
    assert [one.step if one is not None else None for one in resumed] == [0, 6, 12]
