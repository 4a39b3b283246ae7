"""What is tried again, how often, and what never is."""

from __future__ import annotations

import errno
from collections.abc import Callable
from pathlib import Path

import pytest

from safepoint.ambient import SystemAmbient
from safepoint.errors import ObjectMissingError, StorageError
from safepoint.faults.script import Effect, Fault, FaultScript
from safepoint.faults.storage import FaultyStorage
from safepoint.storage.base import Storage
from safepoint.storage.local import LocalStorage
from safepoint.storage.memory import MemoryStorage
from safepoint.storage.patient import WAITS_S, PatientStorage
from safepoint.storage.reading import Foreseeing, Streaming, aligned_buffer, opened
from safepoint.storage.url import open_storage
from safepoint.testing.ambient import FakeAmbient, FakeWorld
from safepoint.testing.storage import StorageConformance

ACTS: dict[str, Callable[[Storage], object]] = {
    "root_exists": lambda storage: storage.root_exists(),
    "make_root": lambda storage: storage.make_root(),
    "make_folder": lambda storage: storage.make_folder("folder"),
    "sync_folder": lambda storage: storage.sync_folder(""),
    "create": lambda storage: storage.create("new"),
    "publish": lambda storage: storage.publish("new", b"data"),
    "put": lambda storage: storage.put("new", b"data"),
    "append": lambda storage: storage.append("new"),
    "read": lambda storage: storage.read("there", limit_bytes=4),
    "read_into": lambda storage: storage.read_into("there", 0, memoryview(bytearray(4))),
    "size": lambda storage: storage.size("there"),
    "list": lambda storage: storage.list(""),
    "delete": lambda storage: storage.delete("there"),
    "delete_folder": lambda storage: storage.delete_folder("empty"),
}
ONCE = {"make_root", "sync_folder", "create", "publish", "put", "append"}


class TestPatientStorage(StorageConformance):
    """A storage that waits is a storage."""

    def make_storage(self) -> Storage:
        return PatientStorage(MemoryStorage(), FakeAmbient(FakeWorld(), pid=1))


def failing(verb: str, *, times: int, number: int = errno.ESTALE) -> tuple[FaultyStorage, PatientStorage, FakeWorld]:
    inner, world = MemoryStorage(), FakeWorld()
    inner.make_root()
    inner.make_folder("empty")
    inner.publish("there", b"data")
    faults = tuple(Fault(Effect.FAIL, operation=count, verb=verb, errno=number) for count in range(times))
    faulty = FaultyStorage(inner, FaultScript(faults))
    return faulty, PatientStorage(faulty, FakeAmbient(world, pid=1)), world


@pytest.mark.parametrize("verb", sorted(ACTS.keys() - ONCE))
def test_what_may_be_done_twice_is_done_until_a_passing_failure_has_passed(verb: str) -> None:
    faulty, storage, world = failing(verb, times=len(WAITS_S))
    before = world.seconds
    ACTS[verb](storage)
    assert len(faulty.operations) == len(WAITS_S) + 1
    assert world.seconds - before == pytest.approx(sum(WAITS_S))


@pytest.mark.parametrize("verb", sorted(ACTS.keys() - ONCE))
def test_a_failure_that_stays_is_raised_after_the_last_try(verb: str) -> None:
    faulty, storage, _ = failing(verb, times=99)
    with pytest.raises(StorageError) as caught:
        ACTS[verb](storage)
    assert caught.value.errno == errno.ESTALE
    assert len(faulty.operations) == len(WAITS_S) + 1


@pytest.mark.parametrize("verb", sorted(ONCE))
def test_what_must_not_be_done_twice_is_done_once(verb: str) -> None:
    """A sync that failed is final, and a publish is never repeated.

    Spec: C3.2, C6.2
    """
    faulty, storage, world = failing(verb, times=1)
    before = world.seconds
    with pytest.raises(StorageError):
        ACTS[verb](storage)
    assert (len(faulty.operations), world.seconds) == (1, before)


@pytest.mark.parametrize("number", [errno.EIO, errno.ENOSPC, errno.EACCES])
def test_a_failure_that_does_not_pass_is_raised_at_once(number: int) -> None:
    faulty, storage, _ = failing("read", times=1, number=number)
    with pytest.raises(StorageError):
        ACTS["read"](storage)
    assert len(faulty.operations) == 1


def test_what_is_absent_is_not_waited_for() -> None:
    faulty, storage, _ = failing("read", times=0)
    with pytest.raises(ObjectMissingError):
        storage.read("absent", limit_bytes=1)
    assert len(faulty.operations) == 1


def test_a_folder_that_is_opened_by_name_is_patient(tmp_path: Path) -> None:
    assert isinstance(open_storage(tmp_path, ambient=SystemAmbient()), PatientStorage)


def test_a_folder_is_read_in_runs_past_the_cache_and_ahead(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Spec: C8.4"""
    asked: list[bool] = []
    local = LocalStorage.opened

    def noted(self: LocalStorage, path: str, buffer: memoryview, *, is_past_cache: bool = False) -> object:
        asked.append(is_past_cache)
        return local(self, path, buffer, is_past_cache=is_past_cache)

    monkeypatch.setattr(LocalStorage, "opened", noted)
    (tmp_path / "f").write_bytes(b"abcdef")
    storage = open_storage(tmp_path)
    assert isinstance(storage, Streaming)
    assert isinstance(storage, Foreseeing)
    target = bytearray(4)
    with opened(storage, "f", aligned_buffer(4096), is_past_cache=True) as reader:
        assert [bytes(piece) for _, piece in reader.fill(1, [memoryview(target)])] == [b"bcde"]
    assert asked == [True]
    assert list(storage.foresee("f", 4)) == [4, 6]


def test_what_cannot_be_read_in_runs_is_read_in_parts() -> None:
    inner = MemoryStorage()
    inner.make_root()
    inner.put("f", b"abcdef")
    storage = PatientStorage(inner, FakeAmbient(FakeWorld(), pid=1))
    target = bytearray(4)
    with opened(storage, "f", aligned_buffer(4096)) as reader:
        assert len(list(reader.fill(1, [memoryview(target)]))) == 1
    assert target == b"bcde"
    assert list(storage.foresee("f", 4)) == []


def test_an_object_is_opened_again_after_a_passing_failure(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "f").write_bytes(b"abcdef")
    failures = [StorageError("a test's handle is stale", where="f", retryable=True)]
    local = LocalStorage.opened

    def failing(self: LocalStorage, path: str, buffer: memoryview, **options: bool) -> object:
        if failures:
            raise failures.pop()
        return local(self, path, buffer, **options)

    monkeypatch.setattr(LocalStorage, "opened", failing)
    storage = PatientStorage(LocalStorage(tmp_path), FakeAmbient(FakeWorld(), pid=1))
    target = bytearray(6)
    with opened(storage, "f", aligned_buffer(4096)) as reader:
        list(reader.fill(0, [memoryview(target)]))
    assert target == b"abcdef"
