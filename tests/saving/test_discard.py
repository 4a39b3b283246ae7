"""What a failed save leaves behind: nothing where it published nothing, everything where that is not known."""

from __future__ import annotations

import errno
import shutil
from pathlib import Path

import pytest

from safepoint.errors import AbortedError, FencedError, OutcomeUnknownError, StorageError
from safepoint.faults.script import Effect, Fault, FaultScript
from safepoint.faults.storage import FaultyStorage
from safepoint.storage.base import Storage
from safepoint.storage.local import LocalStorage
from safepoint.storage.memory import MemoryStorage
from safepoint.testing.ambient import FakeWorld
from tests.crash.job import Job, newest_step
from tests.joining.hooks import HookedStorage
from tests.retention.saves import everything, folders

DATA, INDEX, MANIFEST = "*.safetensors", "*of-00001.json", "*/manifest.json"


def started(storage: Storage | None = None) -> tuple[Storage, Job]:
    storage = storage or MemoryStorage()
    job = Job(storage, FakeWorld(), pid=1)
    job.start()
    job.live(10)
    return storage, job


@pytest.mark.parametrize(
    "fault",
    [
        Fault(Effect.FAIL, verb="sync_folder", path="generations"),
        Fault(Effect.FAIL, verb="write", path=DATA, errno=errno.ENOSPC),
        Fault(Effect.FAIL, verb="finish", path=DATA),
        Fault(Effect.FAIL, verb="create", path=INDEX, errno=errno.ENOSPC),
        Fault(Effect.FAIL, verb="sync_folder", path="generations/*"),
        Fault(Effect.CUT_SHORT, verb="write", path=DATA),
        Fault(Effect.FAIL, verb="size", path=DATA),
        Fault(Effect.FAIL, verb="publish", path=MANIFEST, errno=errno.ENOSPC),
    ],
    ids=["folder", "write", "sync", "index", "names", "short", "check", "publish"],
)
@pytest.mark.parametrize("is_local", [False, True])
def test_a_save_that_published_nothing_takes_back_what_it_wrote(fault: Fault, is_local: bool, tmp_path: Path) -> None:
    """Spec: C3.3"""
    storage, job = started(LocalStorage(tmp_path / "run") if is_local else None)
    before = everything(storage, "generations")
    faulty = FaultyStorage(storage, FaultScript((fault,), seed=3))
    job.saver._storage = faulty
    job.train_to(20)
    with pytest.raises((StorageError, AbortedError)):
        job.save()
    assert len(faulty.fired) == 1
    assert everything(storage, "generations") == before
    assert folders(storage) == [10]
    job.save()
    assert newest_step(storage) == 20


def test_what_cannot_be_taken_back_stays_and_the_failure_is_still_the_first_one() -> None:
    storage, job = started()
    faults = (
        Fault(Effect.FAIL, verb="create", path=INDEX, errno=errno.ENOSPC),
        Fault(Effect.FAIL, verb="delete", errno=errno.EIO, lasts=True),
    )
    job.saver._storage = FaultyStorage(storage, FaultScript(faults))
    job.train_to(20)
    with pytest.raises(StorageError, match="disk is full"):
        job.save()
    assert folders(storage) == [10, 20]


def test_a_save_of_unknown_outcome_keeps_every_byte() -> None:
    """Spec: C3.3, C6.2"""
    storage, job = started()
    faults = (
        Fault(Effect.LOSE_ANSWER, verb="publish", path=MANIFEST),
        Fault(Effect.FAIL, verb="read", path=MANIFEST, lasts=True),
    )
    faulty = FaultyStorage(storage, FaultScript(faults))
    job.saver._storage = faulty
    job.train_to(20)
    with pytest.raises(OutcomeUnknownError):
        job.save()
    assert not [verb for _, verb, _ in faulty.operations if verb.startswith("delete")]
    assert newest_step(storage) == 20


def test_a_fenced_save_leaves_its_objects_to_the_newer_start() -> None:
    """Spec: C3.3"""
    storage, job = started()
    new = Job(storage, job.world, pid=2, takeover=True)
    faulty = FaultyStorage(storage)
    job.saver._storage = HookedStorage(faulty, "size", ".json", lambda: void(new.start()))
    job.train_to(20)
    with pytest.raises(FencedError):
        job.save()
    assert not [verb for _, verb, _ in faulty.operations if verb.startswith("delete")]
    assert folders(storage) == [10, 20]


def void(result: object) -> None:
    return None


def test_a_foreign_file_in_the_folder_of_a_failed_save_stays() -> None:
    """Spec: C3.3, C12.7"""
    storage, job = started()

    def put_beside() -> None:
        (name,) = (entry.name for entry in storage.list("generations") if "000020" in entry.name)
        storage.put(f"generations/{name}/notes.txt", b"mine")

    faulty = FaultyStorage(storage, FaultScript((Fault(Effect.FAIL, verb="size", path=DATA),)))
    job.saver._storage = HookedStorage(faulty, "size", ".safetensors", put_beside)
    job.train_to(20)
    with pytest.raises(StorageError):
        job.save()
    left = [path for path in everything(storage, "generations") if "000020" in path]
    assert [path.rpartition("/")[2] for path in left] == ["notes.txt"]


@pytest.mark.parametrize("is_made_anew", [False, True])
def test_a_folder_that_is_deleted_under_the_job_is_named_and_not_made_again(is_made_anew: bool, tmp_path: Path) -> None:
    """Spec: C5.3"""
    root = tmp_path / "run"
    _, job = started(LocalStorage(root))
    shutil.rmtree(root)
    if is_made_anew:
        root.mkdir()
    job.train_to(20)
    with pytest.raises(StorageError, match="deleted or replaced while this job runs"):
        job.save()
    assert list(tmp_path.rglob("*")) == ([root] if is_made_anew else [])


def test_a_folder_that_holds_another_run_by_now_gets_nothing_of_ours(tmp_path: Path) -> None:
    """Spec: C5.3"""
    root = tmp_path / "run"
    storage, job = started(LocalStorage(root))
    shutil.rmtree(root)
    other = Job(storage, FakeWorld(), pid=7)
    other.start()
    other.live(3)
    before = everything(storage, "generations")
    job.train_to(20)
    with pytest.raises(StorageError, match="deleted or replaced while this job runs"):
        job.save()
    assert everything(storage, "generations") == before


def test_a_folder_that_goes_away_during_the_save_is_named(tmp_path: Path) -> None:
    """Spec: C5.3"""
    root = tmp_path / "run"
    storage, job = started(LocalStorage(root))
    job.saver._storage = HookedStorage(storage, "create", ".safetensors", lambda: shutil.rmtree(root))
    job.train_to(20)
    with pytest.raises(StorageError, match="deleted or replaced while this job runs"):
        job.save()


@pytest.mark.parametrize("rubbish", [None, b"", b"rubbish"])
def test_a_lost_or_damaged_run_record_stops_no_save(rubbish: bytes | None) -> None:
    """Spec: C5.3, F6.6"""
    storage, job = started()
    storage.delete("run.json")
    if rubbish is not None:
        storage.put("run.json", rubbish)
    job.live(20)
    assert newest_step(storage) == 20
