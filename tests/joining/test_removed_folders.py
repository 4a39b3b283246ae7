"""Folders of records that somebody removed by hand."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from safepoint.storage.local import LocalStorage
from safepoint.testing.ambient import FakeWorld
from tests.crash.job import Job


@pytest.mark.parametrize("folder", ["incarnations", "journal"])
def test_a_folder_of_records_that_was_removed_costs_no_checkpoint(folder: str, tmp_path: Path) -> None:
    storage, world = LocalStorage(tmp_path / "run"), FakeWorld()
    for pid, step in ((1, 10), (2, 20)):
        job = Job(storage, world, pid=pid)
        job.start()
        job.live(step)
        job.end()
    shutil.rmtree(tmp_path / "run" / folder)
    job = Job(storage, world, pid=3)
    assert job.start().step == 20
    assert job.session is not None
    assert job.session.claim.incarnation == 3
    job.live(30)
    job.end()
    assert Job(storage, world, pid=4).start().step == 30
