"""A rank that cannot write, a storage that fails on the leader, a newer start: one word for all, and nothing left."""

from __future__ import annotations

import errno

import pytest

from safepoint.errors import AbortedError, FencedError, OutcomeUnknownError, SafepointError, StorageError
from safepoint.faults.script import Effect, Fault, FaultScript
from safepoint.faults.storage import FaultyStorage
from safepoint.joining.claim import claim_incarnation, record_resumed
from safepoint.saving.context import SaveResult
from safepoint.state.item import CapturedTensor, TensorSpec
from safepoint.storage.memory import MemoryStorage
from safepoint.testing.ambient import FakeAmbient, FakeWorld
from tests.joining.hooks import HookedStorage
from tests.saving.ranks.job import Held, Rank, Ranks, manifests, sharded, weights_at, whole

WORLD = 3


def two_saves(rank: Rank) -> list[SaveResult | SafepointError]:
    return [rank.try_to_save(10), rank.try_to_save(20)]


def faulty_on(rank: int, *faults: Fault) -> tuple[MemoryStorage, dict[int, FaultyStorage]]:
    """Return a storage that all ranks share, and the faults that one of them meets."""
    storage = MemoryStorage()
    return storage, {rank: FaultyStorage(storage, FaultScript(faults, seed=3))}


@pytest.mark.parametrize("rank", range(WORLD))
@pytest.mark.parametrize(
    "fault",
    [
        Fault(Effect.FAIL, verb="create", path="*.safetensors", errno=errno.ENOSPC),
        Fault(Effect.FAIL, verb="write", path="*.safetensors", errno=errno.ENOSPC),
        Fault(Effect.FAIL, verb="finish", path="*.safetensors", errno=errno.ENOSPC),
        Fault(Effect.FAIL, verb="create", path="*-of-00003.json", errno=errno.ENOSPC),
        Fault(Effect.FAIL, verb="sync_folder", path="generations/*", errno=errno.ENOSPC),
    ],
    ids=["create", "write", "sync", "index", "names"],
)
def test_a_full_disk_on_one_rank_is_named_on_all_and_everything_is_taken_back(fault: Fault, rank: int) -> None:
    """Spec: C3.3, C4.1"""
    storage, faulty = faulty_on(rank, fault)
    job = Ranks(WORLD, sharded, storage=storage, storages=faulty)
    texts = set()
    for outcome in job.run(two_saves):
        refused, saved = outcome.returned()  # type: ignore[misc]
        assert isinstance(refused, AbortedError)
        texts.add(str(refused))
        assert isinstance(saved, SaveResult)
        assert isinstance(refused.__cause__, StorageError) == (outcome.rank == rank)
    (text,) = texts
    assert f"rank {rank}" in text and "disk is full" in text
    assert [entry.name for entry in storage.list("generations")] == [manifests(storage)[0].generation]
    assert whole(storage, manifests(storage)[0], "model", "w") == weights_at(20)


@pytest.mark.parametrize(
    "fault",
    [
        Fault(Effect.FAIL, verb="make_folder", path="generations/*", errno=errno.EIO),
        Fault(Effect.FAIL, verb="sync_folder", path="generations", errno=errno.EIO),
        Fault(Effect.FAIL, verb="size", path="*.safetensors", errno=errno.EIO),
        Fault(Effect.FAIL, verb="publish", path="*/manifest.json", errno=errno.ENOSPC),
    ],
    ids=["folder", "folder's name", "check", "publish"],
)
def test_a_failure_of_the_leader_s_storage_is_every_rank_s(fault: Fault) -> None:
    """Spec: C2.1, C7.1"""
    storage, faulty = faulty_on(0, fault)
    job = Ranks(WORLD, sharded, storage=storage, storages=faulty)
    for outcome in job.run(two_saves):
        failed, saved = outcome.returned()  # type: ignore[misc]
        assert isinstance(failed, StorageError), failed
        assert failed.errno == fault.errno
        assert isinstance(saved, SaveResult)
    assert len(faulty[0].fired) == 1
    assert [one.step for one in manifests(storage)] == [20]
    assert len(storage.list("generations")) == 1


def test_an_attempt_that_the_leader_cannot_name_fails_on_every_rank() -> None:
    """Only after another attempt at the step it has to look which names there are. Spec: C7.1"""
    storage, faulty = faulty_on(
        0,
        Fault(Effect.FAIL, verb="make_folder", path="generations/*", errno=errno.EROFS),
        # The join lists four times.
        Fault(Effect.FAIL, verb="list", path="generations", errno=errno.EIO, occurrence=4),
    )
    job = Ranks(WORLD, sharded, storage=storage, storages=faulty)
    for outcome in job.run(lambda rank: [rank.try_to_save(10) for _ in range(3)]):
        *failed, saved = outcome.returned()
        assert [one.errno for one in failed if isinstance(one, StorageError)] == [errno.EROFS, errno.EIO]
        assert isinstance(saved, SaveResult)
    assert len(storage.list("generations")) == 1


def test_a_rank_that_refuses_is_heard_also_where_no_replicas_are_compared() -> None:
    """Spec: C4.1"""
    fault = Fault(Effect.FAIL, verb="create", path="*.safetensors", errno=errno.ENOSPC)
    storage, faulty = faulty_on(1, fault)
    job = Ranks(WORLD, sharded, storage=storage, storages=faulty, compares_every=0)
    texts = set()
    for outcome in job.run(two_saves):
        refused, saved = outcome.returned()  # type: ignore[misc]
        assert isinstance(refused, AbortedError)
        texts.add(str(refused))
        assert isinstance(saved, SaveResult)
    (text,) = texts
    assert "rank 1" in text and "disk is full" in text
    assert [one.step for one in manifests(storage)] == [20]


def test_a_publish_whose_outcome_is_not_known_is_unknown_to_all_and_nothing_is_deleted() -> None:
    """Spec: C6.2, C7.1"""
    faults = (
        Fault(Effect.LOSE_ANSWER, verb="publish", path="*/manifest.json"),
        Fault(Effect.FAIL, verb="read", path="*000010*/manifest.json", lasts=True),
    )
    storage, faulty = faulty_on(0, *faults)
    job = Ranks(WORLD, sharded, storage=storage, storages=faulty)
    for outcome in job.run(two_saves):
        unknown, saved = outcome.returned()  # type: ignore[misc]
        assert isinstance(unknown, OutcomeUnknownError)
        assert isinstance(saved, SaveResult)
    assert [one.step for one in manifests(storage)] == [20, 10]


@pytest.mark.parametrize("rank", range(WORLD))
def test_an_object_that_another_rank_wrote_short_is_never_published(rank: int) -> None:
    """Spec: C5.1"""
    storage, faulty = faulty_on(rank, Fault(Effect.CUT_SHORT, verb="write", path="*.safetensors"))
    for outcome in Ranks(WORLD, sharded, storage=storage, storages=faulty).run(two_saves):
        refused, saved = outcome.returned()  # type: ignore[misc]
        assert isinstance(refused, AbortedError)
        assert f"rank-{rank:05d}-of-00003" in refused.where
        assert isinstance(saved, SaveResult)


@pytest.mark.filterwarnings("ignore:safepoint. a save failed, training goes on:RuntimeWarning")
@pytest.mark.parametrize("rank", range(WORLD))
def test_a_rank_whose_copy_fails_says_so_at_once_and_raises_what_all_raise(rank: int) -> None:
    """Spec: C4.1, C7.1"""

    class Broken:
        nbytes = 32

        def copy_into(self, buffer: memoryview) -> None:
            raise OSError("the device is gone")

        def in_place(self) -> memoryview | None:
            return None

        def check(self) -> None:
            return None

    def holds(number: int, world_size: int, step: int) -> list[Held]:
        held = sharded(number, world_size, step)
        if number == rank and step == 10:
            spec = TensorSpec("w", "uint8", (32,), (96,), (32 * rank,))
            held[0] = Held("model", "module", {"step": step}, [CapturedTensor(spec, Broken())])
        return held

    def act(own: Rank) -> object:
        began = own.thread.ambient.monotonic()
        own.save(10, is_scheduled=True)
        failure = own.try_to_save(10)
        return failure, own.thread.ambient.monotonic() - began, own.save(20)

    job = Ranks(WORLD, holds)
    for outcome in job.run(act):
        failure, lasted_s, _ = outcome.returned()  # type: ignore[misc]
        assert isinstance(failure, AbortedError), failure
        assert isinstance(failure.__cause__, OSError) == (outcome.rank == rank)
        assert "the device is gone" in str(failure)
        assert lasted_s < 5
    assert [one.step for one in manifests(job.storage)] == [20]


def test_a_newer_start_fences_every_rank() -> None:
    """Spec: C5.2"""
    storage = MemoryStorage()

    def overtake() -> None:
        other = FakeAmbient(FakeWorld(), pid=50)
        claim = claim_incarnation(storage, other, world_size=1, versions={}, takeover=True)
        record_resumed(storage, other, claim, resumed=None, step=0, chain=())

    hooked = HookedStorage(storage, "size", ".json", overtake)
    job = Ranks(WORLD, sharded, storage=storage, storages={0: hooked})
    for outcome in job.run(lambda rank: rank.save(10)):
        assert isinstance(outcome.error, FencedError), outcome.error
    assert manifests(storage) == []
