"""A save that cannot fit is refused before it begins, and says what it needs, what there is, and what may go."""

from __future__ import annotations

import errno

import pytest

from safepoint.errors import AbortedError, StorageError
from safepoint.retention.policy import keep
from safepoint.storage.memory import MemoryStorage
from safepoint.testing.ambient import FakeWorld
from tests.crash.job import Job, Weights
from tests.retention.saves import everything, folders
from tests.saving.ranks.job import Rank, Ranks

BALLAST_BYTES = 1 << 20


class Small(MemoryStorage):
    """A storage with so much room, or that does not tell it."""

    free: int | None = None
    error: StorageError | None = None
    asked = 0

    def free_bytes(self) -> int | None:
        self.asked += 1
        if self.error is not None:
            raise self.error
        return self.free


def job_on(storage: MemoryStorage, **options: bool) -> Job:
    """Return a job that has saved steps 10, 20 and 30, the first of which is marked, and has 1 MiB more to save."""
    job = Job(storage, FakeWorld(), pid=1, keeps=keep(last=2), **options)
    job.start()
    for step in (10, 20, 30):
        job.train_to(step)
        saved_and_swept(job)
    job.items["ballast"] = Weights("ballast", data=bytearray(BALLAST_BYTES))
    return job


def saved_and_swept(job: Job) -> None:
    """Save, and wait also for the retention that follows the commit in the same thread."""
    job.save().wait(deadline_s=30)
    job.saver.raise_owed(waits=True)


@pytest.mark.parametrize("is_background", [False, True])
def test_a_save_that_cannot_fit_is_refused_before_anything_is_made(is_background: bool) -> None:
    storage = Small()
    job = job_on(storage, is_background=is_background)
    storage.free = BALLAST_BYTES
    before = everything(storage)
    job.train_to(40)
    with pytest.raises(StorageError) as caught:
        job.save()
    told = str(caught.value)
    assert caught.value.errno == errno.ENOSPC
    assert "1.1 MB free, predicted for one rank" in told
    assert "found 1.0 MB free" in told and "kB more are marked for deletion" in told
    assert storage.url in told and "was not begun" in told and "keep fewer checkpoints" in told
    after = everything(storage)
    journal = "journal/000001.jsonl"
    assert {path: data for path, data in after.items() if path != journal} == {
        path: data for path, data in before.items() if path != journal
    }
    assert folders(storage) == [10, 20, 30], "also what is marked stays: no save was committed"
    storage.free = 2 * BALLAST_BYTES
    saved_and_swept(job)
    assert folders(storage) == [20, 30, 40]
    job.saver.close()


def test_a_due_save_that_cannot_fit_warns_and_the_third_in_a_row_raises() -> None:
    storage = Small()
    job = job_on(storage)
    storage.free = 0
    for step in (40, 50):
        job.train_to(step)
        with pytest.warns(RuntimeWarning, match="training goes on.*was not begun"):
            job.save(is_scheduled=True)
    job.train_to(60)
    with pytest.raises(StorageError, match="was not begun"):
        job.save(is_scheduled=True)
    assert folders(storage) == [10, 20, 30]


def test_the_room_is_asked_for_once_at_a_save_and_just_enough_is_enough() -> None:
    storage = Small()
    job = job_on(storage)
    storage.asked, storage.free = 0, 1 << 40
    job.live(40)
    assert storage.asked == 1
    newest = max(entry.name for entry in storage.list("generations"))
    (size,) = (entry.size_bytes for entry in storage.list(f"generations/{newest}") if entry.name.endswith("tensors"))
    storage.free = size
    job.live(50)
    storage.free = size - 1
    with pytest.raises(StorageError, match="was not begun"):
        job.live(60)


def test_a_storage_that_does_not_answer_refuses_nothing() -> None:
    storage = Small()
    job = job_on(storage)
    storage.error = StorageError("no answer", where="")
    job.live(40)
    assert folders(storage) == [20, 30, 40]


def test_what_a_save_only_refers_to_needs_no_room() -> None:
    storage = Small()
    job = Job(storage, FakeWorld(), pid=1, full_every=9)
    job.items["ballast"] = Weights("ballast", data=bytearray(BALLAST_BYTES))
    job.start()
    job.live(10)
    storage.free = BALLAST_BYTES // 2
    job.live(20)
    assert folders(storage) == [10, 20]


def test_of_several_ranks_the_leader_counts_what_all_of_them_write() -> None:
    """The room is one for all: each rank's own part would fit."""
    storage = Small()
    job = Ranks(3, storage=storage)

    def act(rank: Rank) -> object:
        first = rank.try_to_save(10)
        if rank.thread.rank == 0:
            storage.free = 8 << 10
        return first, rank.try_to_save(20)

    for outcome in job.run(act):
        _, second = outcome.returned()  # type: ignore[misc]  # a pair
        assert isinstance(second, AbortedError)
        assert "was not begun" in str(second) and "predicted for 3 ranks" in str(second)
    assert folders(storage) == [10]
