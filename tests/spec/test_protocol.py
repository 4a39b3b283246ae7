"""The clauses of joining, saving and restoring, each seen in the calls that reach the storage."""

from __future__ import annotations

import errno
from collections.abc import Callable
from pathlib import Path

import pytest

from safepoint.errors import (
    CorruptionError,
    FencedError,
    NotFoundError,
    ObjectExistsError,
    OutcomeUnknownError,
    RequestError,
    SafepointError,
    StorageError,
)
from safepoint.faults.script import Effect, Fault, FaultScript
from safepoint.faults.storage import FaultyStorage
from safepoint.format.records import RefusedRecord
from safepoint.joining.claim import publish_record
from safepoint.restoring.select import Wish, check_run_is_there
from safepoint.storage.local import LocalStorage
from safepoint.storage.memory import MemoryStorage
from safepoint.testing.ambient import FakeWorld
from tests import build
from tests.crash.job import Job, newest_step, weights_at, whole_state


def lived(*steps: int) -> tuple[MemoryStorage, FakeWorld]:
    """Return a run whose first start saved some steps and ended."""
    storage, world = MemoryStorage(), FakeWorld()
    job = Job(storage, world, pid=1)
    job.start()
    for step in steps:
        job.train_to(step)
        job.save()
    job.end()
    return storage, world


def going_on(storage: MemoryStorage, world: FakeWorld, *faults: Fault, to: int) -> tuple[Job, FaultyStorage]:
    """Return a second start that has restored and trained, and its storage, to which faults happen."""
    faulty = FaultyStorage(storage, FaultScript(faults))
    job = Job(faulty, world, pid=2)
    job.start()
    job.train_to(to)
    return job, faulty


def calls(storage: FaultyStorage, verb: str, part: str) -> list[int]:
    return [number for number, found, path in storage.operations if found == verb and part in path]


def names_of(storage: MemoryStorage) -> list[str]:
    return [entry.name for entry in storage.list("generations")]


def test_a_start_beside_a_living_holder_is_refused_unless_it_takes_over() -> None:
    """Spec: C1.2"""
    storage, world = lived(10)
    Job(storage, world, pid=2).start()
    with pytest.raises(FencedError, match="another process holds the run"):
        Job(storage, world, pid=3).start()
    assert Job(storage, world, pid=4, takeover=True).start().step == 10


@pytest.mark.parametrize("how", ["it closed", "its process is gone", "its process is stopped", "its heartbeat stands"])
def test_a_holder_that_is_gone_is_succeeded(how: str) -> None:
    """Spec: C1.2"""
    storage, world = lived(10)
    holder = Job(storage, world, pid=2)
    holder.start()
    if how == "it closed":
        holder.end()
    elif how == "its process is stopped":
        world.states[2] = "stopped"
    else:
        holder.die()
        world.is_visible = how != "its heartbeat stands"
    assert Job(storage, world, pid=3).start().step == 10


def test_what_was_resumed_is_recorded_before_anything_is_saved() -> None:
    """Spec: C1.5"""
    storage, world = lived(10)
    job, faulty = going_on(storage, world, to=11)
    job.save()
    (recorded,) = calls(faulty, "publish", "000002.resumed.json")
    synced = [number for number in calls(faulty, "sync_folder", "incarnations") if number > recorded]
    assert synced and synced[0] < calls(faulty, "make_folder", "generations/step")[0]


def test_a_start_that_restored_nothing_does_not_pass_over_checkpoints() -> None:
    """Spec: C1.5"""
    storage, world = lived(10)
    with pytest.raises(RequestError, match="did not start from one"):
        Job(storage, world, pid=2).train_to(1)


def test_nothing_is_created_for_a_step_of_a_run_that_is_not_there(tmp_path: Path) -> None:
    """Spec: C1.7, C10.4"""
    storage = LocalStorage(tmp_path / "misspelt" / "run")
    with pytest.raises(NotFoundError):
        check_run_is_there(storage, Wish(10))
    assert list(tmp_path.iterdir()) == []


def test_objects_are_exclusive_and_synced_with_their_folder_before_the_manifest() -> None:
    """Spec: C3.1, C6.1"""
    storage, world = lived(10)
    job, faulty = going_on(storage, world, to=11)
    job.save()
    created = calls(faulty, "create", "/rank-")
    finished = calls(faulty, "finish", "/rank-")
    (published,) = calls(faulty, "publish", "manifest.json")
    folder = calls(faulty, "sync_folder", "generations/step")
    assert len(created) == len(finished) == 2
    assert max(finished) < folder[0] < published < folder[1]
    assert max(calls(faulty, "sync_folder", "generations")[:1]) < min(created)
    read_back = [number for number in calls(faulty, "read", "manifest.json") if number > folder[1]]
    looked = [number for number in calls(faulty, "list", "incarnations") if number > published]
    assert read_back and looked


@pytest.mark.parametrize(
    ("verb", "path"),
    [
        ("write", "*.safetensors"),
        ("finish", "*.safetensors"),
        ("finish", "*/rank-*.json"),
        ("sync_folder", "generations/step*"),
    ],
)
def test_after_a_failed_write_or_sync_nothing_is_published(verb: str, path: str) -> None:
    """Spec: C3.2"""
    storage, world = lived(10)
    fault = Fault(Effect.FAIL, verb=verb, path=path, errno=errno.EIO)
    job, faulty = going_on(storage, world, fault, to=11)
    with pytest.raises(StorageError):
        job.save()
    assert len(faulty.fired) == 1
    assert calls(faulty, "publish", "manifest.json") == []
    assert newest_step(storage) == 10


def test_an_object_that_is_shorter_than_voted_is_not_committed() -> None:
    """Spec: C5.1"""
    storage, world = lived(10)
    job, faulty = going_on(storage, world, Fault(Effect.CUT_SHORT, verb="write", path="*.safetensors"), to=11)
    with pytest.raises(SafepointError):
        job.save()
    assert calls(faulty, "publish", "manifest.json") == []
    assert newest_step(storage) == 10


def test_nothing_is_published_once_a_newer_start_exists() -> None:
    """Spec: C5.2"""
    storage, world = lived(10)
    job, faulty = going_on(storage, world, to=11)
    Job(storage, world, pid=3, takeover=True).start()
    with pytest.raises(FencedError):
        job.save()
    assert calls(faulty, "publish", "manifest.json") == []


class Overtaken(MemoryStorage):
    """Let another start claim the run at the very moment at which a manifest gets its name."""

    after_publish: Callable[[], object] | None = None

    def publish(self, path: str, data: bytes) -> None:
        super().publish(path, data)
        if path.endswith("manifest.json") and self.after_publish is not None:
            then, self.after_publish = self.after_publish, None
            then()


def test_a_start_that_appears_while_the_manifest_is_published_turns_success_into_fenced() -> None:
    """Spec: C6.1"""
    storage, world = Overtaken(), FakeWorld()
    job = Job(storage, world, pid=1)
    job.start()
    job.train_to(10)
    job.save()
    job.train_to(11)
    storage.after_publish = lambda: build.write_incarnation(storage, 2, run=run_of(storage))
    with pytest.raises(FencedError):
        job.save()


def run_of(storage: MemoryStorage) -> str:
    from safepoint.catalog import read_lineage

    return str(read_lineage(storage).run)


def test_a_second_save_of_one_step_is_the_later_one() -> None:
    """Spec: C10.1, F5.2"""
    storage, world = lived(10)
    job, _ = going_on(storage, world, to=11)
    attempts = list[str]()
    for _attempt in range(3):
        job.save()
        attempts.append(max(name for name in names_of(storage) if name.startswith("step-000000000011-i000002-"))[-8:-6])
    assert attempts == ["00", "01", "02"]


def test_a_lost_answer_is_settled_by_reading_and_never_by_a_second_publish() -> None:
    """Spec: C6.2"""
    storage, world = lived(10)
    job, faulty = going_on(storage, world, Fault(Effect.LOSE_ANSWER, verb="publish", path="*/manifest.json"), to=11)
    job.save()
    assert len(calls(faulty, "publish", "manifest.json")) == 1
    assert newest_step(storage) == 11


def test_an_error_after_the_name_was_given_leaves_the_outcome_unknown() -> None:
    """Spec: C6.2"""
    storage, world = lived(10)
    fault = Fault(Effect.FAIL, verb="sync_folder", path="generations/step*", occurrence=1)
    job, faulty = going_on(storage, world, fault, to=11)
    with pytest.raises(OutcomeUnknownError):
        job.save()
    assert len(calls(faulty, "publish", "manifest.json")) == 1


def test_a_taken_name_is_success_for_our_own_bytes_only() -> None:
    """Spec: F6.2"""
    storage = MemoryStorage()
    build.begin(storage)
    ours = RefusedRecord(1, build.RUN, 9, "another start was alive", "0a")
    publish_record(storage, "incarnations/000009.refused.json", ours)
    publish_record(storage, "incarnations/000009.refused.json", ours)
    with pytest.raises(ObjectExistsError):
        publish_record(storage, "incarnations/000009.refused.json", RefusedRecord(1, build.RUN, 9, "it", "0b"))


def damage(storage: MemoryStorage, step: int) -> str:
    (name,) = [name for name in names_of(storage) if name.startswith(f"step-{step:012d}")]
    build.flip(storage, f"generations/{name}/rank-00000-of-00001.safetensors")
    return name


def test_a_damaged_candidate_is_reported_and_the_next_older_one_restored_whole() -> None:
    """Spec: C10.2, C11.2"""
    storage, world = lived(10, 20)
    name = damage(storage, 20)
    job = Job(storage, world, pid=2)
    report = job.start()
    assert (report.step, job.state()) == (10, whole_state(10))
    assert [(refusal.generation, refusal.file) for refusal in report.refused] == [
        (name, "rank-00000-of-00001.safetensors")
    ]
    assert "rows 0 to" in report.refused[0].reason


def test_only_damaged_candidates_are_an_error_and_never_a_fresh_start() -> None:
    """Spec: C10.3"""
    storage, world = lived(10, 20)
    damaged = [damage(storage, step) for step in (10, 20)]
    with pytest.raises(CorruptionError) as caught:
        Job(storage, world, pid=2).start()
    assert all(name in str(caught.value) for name in damaged)


def test_no_checkpoint_is_a_fresh_start_unless_one_is_asked_for() -> None:
    """Spec: C10.4"""
    assert Job(MemoryStorage(), FakeWorld(), pid=1).start().is_fresh
    for wish in (Wish(5), Wish(required=True)):
        storage, world = lived(10)
        for name in names_of(storage) if wish.asked is None else []:
            for entry in storage.list(f"generations/{name}"):
                storage.delete(f"generations/{name}/{entry.name}")
            storage.delete_folder(f"generations/{name}")
        storage.delete("journal/000001.jsonl")
        before = names_of(storage)
        with pytest.raises(NotFoundError):
            Job(storage, world, pid=2).start(wish)
        assert names_of(storage) == before


@pytest.mark.parametrize("file", ["rank-00000-of-00001.json", "manifest.json", "header"])
def test_no_live_object_is_touched_before_everything_without_data_was_checked(file: str) -> None:
    """Spec: C11.1"""
    storage, world = lived(10)
    (name,) = names_of(storage)
    is_header = file == "header"
    build.flip(
        storage,
        f"generations/{name}/{'rank-00000-of-00001.safetensors' if is_header else file}",
        20 if is_header else -3,
    )
    job = Job(storage, world, pid=2)
    with pytest.raises(CorruptionError):
        job.start()
    assert job.state() == {(0, weights_at(0))}


def test_a_pickle_in_any_place_is_refused_and_not_run(tmp_path: Path) -> None:
    """Spec: C11.4"""
    witness = tmp_path / "it-ran"
    # What pickle.dumps gives for an object whose reduction is os.mkdir(path), written out by hand.
    crafted = b"cos\nmkdir\n(V" + str(witness).encode() + b"\ntR."
    storage, world = lived(10)
    (name,) = names_of(storage)
    for entry in storage.list(f"generations/{name}"):
        path = f"generations/{name}/{entry.name}"
        good = storage.read(path, limit_bytes=1 << 20)
        storage.put(path, crafted + good[len(crafted) :])
        with pytest.raises(CorruptionError):
            Job(storage, world, pid=2).start()
        storage.put(path, good)
        world.states[2] = "gone"
    assert not witness.exists()
