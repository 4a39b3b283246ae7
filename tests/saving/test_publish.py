"""The one step that makes a checkpoint exist, and what is said when its answer is lost."""

from __future__ import annotations

import errno

import pytest

from safepoint.catalog import examine_all, read_lineage
from safepoint.errors import FencedError, OutcomeUnknownError, RequestError, StorageError
from safepoint.faults.script import Effect, Fault, FaultScript
from safepoint.faults.storage import FaultyStorage
from safepoint.retention.policy import keep
from safepoint.storage.memory import MemoryStorage
from safepoint.testing.ambient import FakeWorld
from tests.crash.job import Job, newest_step, whole_state
from tests.joining.hooks import HookedStorage

MANIFEST = "*/manifest.json"


def started(*faults: Fault) -> tuple[MemoryStorage, FaultyStorage, Job]:
    """Return a run with step 10, whose next save meets these faults."""
    storage = MemoryStorage()
    job = Job(storage, FakeWorld(), pid=1, keeps=keep(last=2))
    job.start()
    job.live(10)
    faulty = FaultyStorage(storage, FaultScript(faults))
    job.saver._storage = faulty
    job.train_to(20)
    return storage, faulty, job


def publishes(storage: FaultyStorage) -> list[str]:
    return [path for _, verb, path in storage.operations if verb == "publish" and path.endswith("manifest.json")]


def test_a_lost_answer_is_success_when_the_manifest_reads_back() -> None:
    """Spec: C6.2, F6.2"""
    storage, faulty, job = started(Fault(Effect.LOSE_ANSWER, verb="publish", path=MANIFEST))
    assert job.save().committed
    assert len(publishes(faulty)) == 1, "a publish is never repeated"
    assert newest_step(storage) == 20


@pytest.mark.parametrize(
    "then",
    [
        Fault(Effect.FAIL, verb="read", path=MANIFEST, lasts=True),
        Fault(Effect.FLIP_BIT, verb="read", path=MANIFEST, lasts=True),
        Fault(Effect.CUT_SHORT, verb="read", path=MANIFEST, lasts=True),
    ],
)
def test_a_lost_answer_that_reading_cannot_settle_is_an_unknown_outcome(then: Fault) -> None:
    """Spec: C6.2"""
    _, faulty, job = started(Fault(Effect.LOSE_ANSWER, verb="publish", path=MANIFEST), then)
    with pytest.raises(OutcomeUnknownError) as caught:
        job.save()
    assert caught.value.exit_code == 7
    assert len(publishes(faulty)) == 1


@pytest.mark.parametrize(
    "fault",
    [
        Fault(Effect.FAIL, verb="sync_folder", path="generations/*", occurrence=1),
        Fault(Effect.FAIL, verb="read", path=MANIFEST),
        Fault(Effect.FLIP_BIT, verb="read", path=MANIFEST),
        Fault(Effect.CUT_SHORT, verb="read", path=MANIFEST),
        Fault(Effect.FAIL, verb="list", path="incarnations", occurrence=2),
    ],
    ids=["sync", "unreadable", "flipped", "cut", "no look for a newer start"],
)
def test_an_error_after_the_name_was_given_is_an_unknown_outcome(fault: Fault) -> None:
    """Spec: C6.1, C6.2"""
    storage, faulty, job = started(fault)
    with pytest.raises(OutcomeUnknownError):
        job.save()
    assert len(faulty.fired) == 1
    assert len(publishes(faulty)) == 1
    assert newest_step(storage) == 20, "a reader may use it"


def test_a_generation_of_unknown_outcome_counts_for_no_retention() -> None:
    """With keep(last=2), steps 10 and 30 stay: 20 may not survive, so it stands for nothing.

    Spec: C6.3, C7.1
    """
    storage, _, job = started(Fault(Effect.FAIL, verb="sync_folder", path="generations/*", occurrence=1))
    with pytest.raises(OutcomeUnknownError):
        job.save()
    job.live(30)
    steps = {found.name.step: found.state.value for found in examine_all(storage, read_lineage(storage))}
    assert steps == {10: "committed", 20: "committed", 30: "committed"}
    job.live(40)
    steps = {found.name.step: found.state.value for found in examine_all(storage, read_lineage(storage))}
    assert steps == {10: "deleted", 20: "committed", 30: "committed", 40: "committed"}


def test_an_error_before_the_name_was_given_is_a_failure_that_published_nothing() -> None:
    storage, _, job = started(Fault(Effect.FAIL, verb="publish", path=MANIFEST, errno=errno.ENOSPC))
    with pytest.raises(StorageError, match="disk is full"):
        job.save()
    assert newest_step(storage) == 10
    job.save()
    assert newest_step(storage) == 20


def test_a_name_that_is_taken_by_other_bytes_is_not_ours() -> None:
    """Spec: F6.2, C6.2"""
    storage, _, job = started()

    def take() -> None:
        (name,) = (entry.name for entry in storage.list("generations") if "000020" in entry.name)
        storage.publish(f"generations/{name}/manifest.json", b"another")

    job.saver._storage = HookedStorage(storage, "publish", "manifest.json", take)
    with pytest.raises(OutcomeUnknownError):
        job.save()
    assert newest_step(storage) == 10


def test_a_fenced_process_that_published_says_fenced_and_not_success() -> None:
    """Spec: C6.1"""
    storage, _, job = started()
    new = Job(storage, job.world, pid=2, takeover=True)
    # The manifest is read back after it has its name.
    job.saver._storage = HookedStorage(storage, "read", "manifest.json", lambda: steps.append(new.start().step))
    steps: list[int] = []
    with pytest.raises(FencedError):
        job.save()
    # It was published before the new start chose, which therefore goes on from it.
    assert steps == [20]
    assert new.state() == whole_state(20)


@pytest.mark.parametrize("limit", ["publish.MANIFEST_LIMIT_BYTES", "write.INDEX_LIMIT_BYTES"])
def test_what_is_longer_than_a_reader_takes_is_refused_before_it_is_published(
    limit: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Spec: F2.5"""
    storage, faulty, job = started()
    with monkeypatch.context() as patch:
        patch.setattr(f"safepoint.saving.{limit}", 100)
        with pytest.raises(RequestError, match="longer in all than their file may be"):
            job.save()
    assert publishes(faulty) == []
    assert newest_step(storage) == 10
    job.train_to(30)
    assert job.save().committed
    assert newest_step(storage) == 30
