"""Planned == voted == stored, or nothing is published: ballots, sizes and boxes that do not agree."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import msgspec
import pytest

from safepoint.errors import AbortedError, CorruptionError
from safepoint.faults.script import Effect, Fault, FaultScript
from safepoint.faults.storage import FaultyStorage
from safepoint.format.ballot import Ballot
from safepoint.format.index import ObjectReference
from safepoint.group.solo import SoloGroup
from safepoint.saving.divide import divide
from safepoint.saving.layout import Layout, LayoutBox, columns_of, cut_digest
from safepoint.saving.vote import check_planned, check_stored, count, vote
from safepoint.storage.memory import MemoryStorage
from safepoint.testing.ambient import FakeAmbient, FakeWorld
from tests.crash.job import Job, newest_step, whole_state
from tests.joining.hooks import HookedStorage

GENERATION = "step-000000000010-i000001-0badcafe"
OBJECT = ObjectReference(GENERATION, "rank-00000-of-00001.json", 10, "0" * 32)


def ballot(**changes: object) -> Ballot:
    facts = {
        "run": "aa",
        "generation": GENERATION,
        "incarnation": 1,
        "rank": 0,
        "world_size": 1,
        "layout": "cc",
        "objects": (OBJECT,),
    }
    return Ballot(**{**facts, **changes})  # type: ignore[arg-type]


@dataclass
class Gathered(SoloGroup):
    """A leader that receives these messages, whatever its own is."""

    make: Callable[[bytes], list[bytes]]
    rank: int = 0
    world_size: int = 1
    topics: list[str] = field(default_factory=list)

    def gather(self, topic: str, message: bytes, *, deadline_s: float) -> list[bytes] | None:
        self.topics.append(topic)
        return self.make(message)


def two_ranks(*others: Ballot) -> list[bytes]:
    return [msgspec.json.encode(entry) for entry in (ballot(world_size=2), *others)]


@pytest.mark.parametrize(
    "change",
    [
        {"run": "bb"},
        {"generation": "step-000000000010-i000001-0badcaff"},
        {"incarnation": 2},
        {"world_size": 3},
        {"refusal": "no space left on device"},
        {"rank": 0},
        {"rank": 2},
    ],
)
def test_one_ballot_that_is_foreign_refusing_or_repeated_aborts(change: dict[str, object]) -> None:
    """Spec: C4.1"""
    own = ballot(world_size=2)
    sound = ballot(world_size=2, rank=1)
    assert count(two_ranks(sound), own) == [own, sound]
    other = ballot(**{"world_size": 2, "rank": 1, **change})
    with pytest.raises(AbortedError):
        count(two_ranks(other), own)


@pytest.mark.parametrize("messages", [[], [b""], [b"{}"], [b"\x80\x02."], [b'{"run": 1}'], [b"null", b"null"]])
def test_a_missing_or_undecodable_ballot_aborts(messages: list[bytes]) -> None:
    """Spec: C4.1"""
    with pytest.raises(AbortedError):
        count(messages, ballot())


def test_a_ballot_more_than_there_are_ranks_aborts() -> None:
    """Spec: C4.1"""
    message = msgspec.json.encode(ballot())
    with pytest.raises(AbortedError, match="not every rank voted once"):
        count([message, message], ballot())


def test_ballots_that_two_ranks_exchanged_abort() -> None:
    """Spec: C4.1"""
    own, sound = two_ranks(ballot(world_size=2, rank=1))
    with pytest.raises(AbortedError, match="the ballot of another"):
        count([sound, own], ballot(world_size=2))


def test_ballots_of_two_attempts_are_gathered_under_different_topics() -> None:
    group = Gathered(lambda message: [message])
    vote(group, ballot(), deadline_s=1)
    other = ballot(generation="step-000000000010-i000001-0badcaff")
    vote(group, other, deadline_s=1)
    assert len(set(group.topics)) == 2


@pytest.mark.parametrize("size_bytes", [9, 11, 0])
def test_an_object_of_another_size_than_voted_aborts(size_bytes: int) -> None:
    """Spec: C5.1"""
    storage = MemoryStorage()
    storage.make_root()
    storage.make_folder(f"generations/{GENERATION}")
    storage.publish(f"generations/{GENERATION}/{OBJECT.name}", b"x" * size_bytes)
    with pytest.raises(AbortedError, match=r"not stored as voted.*expected 10 bytes; found"):
        check_stored(storage, (OBJECT,), ambient=FakeAmbient(FakeWorld(), pid=1))


def test_what_another_host_wrote_may_be_seen_late() -> None:
    """Spec: C5.1"""
    storage, world = MemoryStorage(), FakeWorld()
    storage.make_root()
    ambient = FakeAmbient(world, pid=1)

    class Late(FakeAmbient):
        def sleep(self, seconds: float) -> None:
            super().sleep(seconds)
            if world.seconds > began + 20 and not storage.list("generations"):
                storage.make_folder(f"generations/{GENERATION}")
                storage.publish(f"generations/{GENERATION}/{OBJECT.name}", b"x" * 10)

    began = ambient.monotonic()
    check_stored(storage, (OBJECT,), ambient=Late(world, pid=1), deadline_s=30)
    assert 20 < world.seconds - began < 22


def test_many_objects_are_looked_at_side_by_side() -> None:
    storage = MemoryStorage()
    storage.make_root()
    storage.make_folder(f"generations/{GENERATION}")
    objects = []
    for rank in range(200):
        entry = msgspec.structs.replace(OBJECT, name=f"rank-{rank:05d}-of-00200.json")
        storage.publish(f"generations/{GENERATION}/{entry.name}", b"x" * 10)
        objects.append(entry)
    ambient = FakeAmbient(FakeWorld(), pid=1)
    check_stored(storage, objects, ambient=ambient)
    storage.put(f"generations/{GENERATION}/{objects[150].name}", b"short")
    with pytest.raises(AbortedError, match="rank-00150-of-00200"):
        check_stored(storage, objects, ambient=ambient)


def test_an_object_that_was_voted_for_and_is_absent_aborts() -> None:
    """Spec: C5.1"""
    with pytest.raises(AbortedError, match="no such object"):
        check_stored(MemoryStorage(), (OBJECT,), ambient=FakeAmbient(FakeWorld(), pid=1), deadline_s=30)


def started() -> tuple[MemoryStorage, Job]:
    storage = MemoryStorage()
    job = Job(storage, FakeWorld(), pid=1)
    job.start()
    job.live(10)
    return storage, job


def test_a_save_whose_vote_is_aborted_publishes_nothing_and_the_next_one_succeeds() -> None:
    """Spec: C4.1, C7.1"""
    storage, job = started()
    before = [entry.name for entry in storage.list("generations")]
    job.saver._group = Gathered(lambda message: [message.replace(b'"rank":0', b'"rank":1')])
    job.train_to(20)
    with pytest.raises(AbortedError):
        job.save()
    assert before == [entry.name for entry in storage.list("generations")]
    assert newest_step(storage) == 10
    job.saver._group = SoloGroup()
    job.save()
    assert newest_step(storage) == 20


def test_a_save_whose_object_is_cut_short_after_the_write_publishes_nothing() -> None:
    """Something else shortens a file between the vote and the check.

    Spec: C5.1
    """
    storage, job = started()

    def cut() -> None:
        (path,) = (
            f"generations/{entry.name}/rank-00000-of-00001.safetensors"
            for entry in storage.list("generations")
            if "000020" in entry.name
        )
        storage.put(path, b"short")

    hooked = HookedStorage(storage, "size", ".safetensors", cut)
    job.saver._storage = hooked
    job.train_to(20)
    with pytest.raises(AbortedError, match="not stored as voted"):
        job.save()
    assert newest_step(storage) == 10


def test_a_storage_that_reports_a_short_write_as_whole_is_caught_before_the_publish() -> None:
    """Spec: C5.1, C3.1"""
    storage, job = started()
    for ending in ("*.safetensors", "*of-00001.json"):
        fault = Fault(Effect.CUT_SHORT, verb="write", path=ending)
        job.saver._storage = FaultyStorage(storage, FaultScript((fault,), seed=3))
        job.train_to(20)
        with pytest.raises(AbortedError):
            job.save()
        assert newest_step(storage) == 10


def test_what_is_checked_is_what_a_reader_would_refuse() -> None:
    storage, job = started()
    job.live(20)
    (name,) = (entry.name for entry in storage.list("generations") if "000020" in entry.name)
    storage.put(f"generations/{name}/rank-00000-of-00001.safetensors", b"short")
    job.die()
    start = Job(storage, FakeWorld(states={1: "gone"}), pid=2)
    assert start.start().step == 10
    assert start.state() == whole_state(10)
    with pytest.raises(CorruptionError):
        storage.read_into(f"generations/{name}/rank-00000-of-00001.safetensors", 0, memoryview(bytearray(9)))


@pytest.mark.parametrize(
    "change",
    [
        {"layout": "0" * 32},
        {"objects": ()},
        {"objects": (OBJECT,)},
        {"objects": (OBJECT, msgspec.structs.replace(OBJECT, name="rank-00001-of-00002.safetensors"))},
    ],
    ids=["other boxes", "no object", "no data", "another rank's data"],
)
def test_a_rank_that_stored_something_else_than_was_planned_aborts(change: dict[str, object]) -> None:
    """Spec: C5.1"""
    box = LayoutBox("model", "w", "float32", (4,), (0,), (4,))
    division = divide([columns_of(Layout((box,)))], frozenset())
    objects = (OBJECT, msgspec.structs.replace(OBJECT, name="rank-00000-of-00001.safetensors"))
    sound = ballot(layout=cut_digest([box]), objects=objects)
    check_planned([sound], division)
    with pytest.raises(AbortedError, match=r"something else than was planned.*rank 0"):
        check_planned([msgspec.structs.replace(sound, **change)], division)
