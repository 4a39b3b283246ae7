"""Reading ahead: a hint, which ends when the reading begins; and what else a restore holds still."""

from __future__ import annotations

import gc
import os
import random
import threading
from collections.abc import Generator, Sequence
from pathlib import Path

import pytest
import torch

import safepoint as sp
from safepoint.collector import collector_at_rest
from safepoint.errors import StorageError
from safepoint.format.extent import Box
from safepoint.restoring.ahead import Ahead, likely_ahead
from safepoint.restoring.plan import ChunkRead, TensorRead
from safepoint.restoring.runs import RUN_BYTES, batches_of
from safepoint.storage import local_reads
from safepoint.storage.local import LocalStorage
from safepoint.storage.memory import MemoryStorage
from safepoint.storage.reading import Foreseeing

STEP = 16 << 20
MOST = 512 << 20
LONGEST_WAIT_S = 60


class Asked(MemoryStorage):
    """Note what is foreseen; each time, wait until the test lets it end."""

    def __init__(self, *, fails: bool = False) -> None:
        super().__init__()
        self.taken: list[tuple[str, int]] = []
        self.begun, self.may_end = threading.Semaphore(0), threading.Semaphore(0)
        self._fails = fails

    def foresee(self, path: str, step_bytes: int) -> Generator[int, None, None]:
        # An index has one step, a data file more than are ever taken.
        for end_bytes in range(step_bytes, (1 if path.endswith("json") else 1000) * step_bytes + 1, step_bytes):
            yield end_bytes
            self.taken.append((path, end_bytes))
            self.begun.release()
            self.may_end.acquire()
            if self._fails:
                raise StorageError("a test's disk does not answer", where=path)


def test_a_file_is_taken_step_by_step_until_the_reading_begins() -> None:
    """What is under way when it begins counts as near: it comes in any case."""
    storage = Asked()
    with Ahead(storage, "f") as ahead:
        storage.begun.acquire()
        storage.may_end.release()
        storage.begun.acquire()
        assert ahead.end() == {"f": 2 * STEP}
        storage.may_end.release()
    assert storage.taken == [("f", STEP), ("f", 2 * STEP)]


def test_no_more_of_a_file_is_taken_than_the_cache_has_room_for() -> None:
    storage = Asked()
    for _ in range(1000):
        storage.may_end.release()
    with Ahead(storage, "f") as ahead:
        for _ in range(MOST // STEP):
            storage.begun.acquire()
    assert ahead.end() == {"f": MOST}
    assert storage.taken[-1] == ("f", MOST)


def test_the_index_of_the_newest_generation_is_asked_for_before_its_data() -> None:
    """Behind the data it would wait for the disk, and all else for it."""
    storage = Asked()
    storage.make_root()
    generation = "generations/step-000000000002-i000001-aaaaaaaa"
    for folder in ("generations/step-000000000001-i000001-bbbbbbbb", generation):
        storage.make_folder(folder)
    with likely_ahead(storage) as ahead:
        for _ in range(2):
            storage.begun.acquire()
            storage.may_end.release()
        storage.begun.acquire()
        ahead.end()
        storage.may_end.release()
    index, data = (f"{generation}/rank-00000-of-00001.{kind}" for kind in ("json", "safetensors"))
    assert storage.taken == [(index, STEP), (data, STEP), (data, 2 * STEP)]


def test_a_failure_of_reading_ahead_is_nobodys_and_ends_it() -> None:
    storage = Asked(fails=True)
    storage.may_end.release()
    with Ahead(storage, "f"):
        storage.begun.acquire()
    assert len(storage.taken) == 1


def test_where_no_thread_is_to_be_had_nothing_is_read_ahead(monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", refused)
    with Ahead(Asked(), "f") as ahead:
        assert ahead.end() == {"f": 0}


def test_a_storage_that_cannot_foresee_is_left_alone() -> None:
    assert not isinstance(MemoryStorage(), Foreseeing)
    with Ahead(MemoryStorage(), "f") as ahead:
        assert ahead.end() == {"f": 0}


def test_a_file_that_is_not_there_is_no_failure_of_reading_ahead(tmp_path: Path) -> None:
    with Ahead(LocalStorage(tmp_path), "generations/absent/f") as ahead:
        pass
    assert ahead.end() == {"generations/absent/f": 0}


def test_files_are_read_up_to_their_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, chance: random.Random) -> None:
    monkeypatch.setattr(local_reads, "_STEP_BYTES", 7)
    monkeypatch.setattr(local_reads, "is_cached", lambda *place: False)
    read: list[tuple[int, int]] = []
    preadv = os.preadv

    def noted(descriptor: int, views: list[memoryview], offset: int) -> int:
        count = preadv(descriptor, views[: chance.randint(1, len(views))], offset)
        read.append((offset, offset + count))
        return count

    monkeypatch.setattr(os, "preadv", noted)
    (tmp_path / "f").write_bytes(b"x" * 100)
    storage = LocalStorage(tmp_path)
    assert list(storage.foresee("f", 60)) == [60, 100]
    assert [begin for begin, _ in read] == [0, *[end for _, end in read[:-1]]]
    assert read[-1][1] == 100


def test_what_is_near_is_not_read_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(local_reads, "is_cached", lambda *place: True)
    monkeypatch.setattr(os, "preadv", lambda *call: pytest.fail("it was read"))
    (tmp_path / "f").write_bytes(b"x" * 100)
    assert list(LocalStorage(tmp_path).foresee("f", 60)) == [60, 100]


def test_large_tensors_that_are_near_stand_evenly_among_the_others_the_largest_first() -> None:
    sizes = [RUN_BYTES, 3 * RUN_BYTES, RUN_BYTES + 4, 2 * RUN_BYTES, 8]
    reads = list(_in_one_file(sizes))
    near = {"f": sizes[0] + 1, "other": 1 << 40}
    names = [batch.tensors[0].name for batch in batches_of(reads, near=near)]
    assert names == ["w3", "w1", "w2", "w0", "w4"]
    assert [batch.tensors[0].name for batch in batches_of(reads)] == ["w1", "w3", "w2", "w0", "w4"]


def test_small_tensors_that_are_near_stand_evenly_among_the_others() -> None:
    """One thread copies what is near while another one waits for the disk."""
    reads = list(_in_one_file([RUN_BYTES - 1] * 6))
    names = [batch.tensors[0].name for batch in batches_of(reads, near={"f": 2 * RUN_BYTES - 2})]
    assert names == ["w2", "w3", "w0", "w4", "w5", "w1"]
    assert [batch.tensors[0].name for batch in batches_of(reads)] == ["w0", "w1", "w2", "w3", "w4", "w5"]
    assert sorted(batch.tensors[0].name for batch in batches_of(reads, near={"f": 1 << 40})) == sorted(names)


def _in_one_file(sizes: Sequence[int]) -> Sequence[TensorRead]:
    begin, reads = 0, []
    for number, size in enumerate(sizes):
        chunk = ChunkRead("f", begin, size, (0, 1), "0" * 32, Box((0,), (1,)), (0,), 0)
        reads.append(TensorRead("model", f"w{number}", 4, (), (chunk,)))
        begin += size
    return reads


def test_no_cycle_is_collected_within_the_block_and_the_collector_is_left_as_it_was() -> None:
    assert gc.isenabled()
    with pytest.raises(StorageError), collector_at_rest():
        assert not gc.isenabled()
        raise StorageError("a test's error", where="f")
    assert gc.isenabled()
    gc.disable()
    try:
        with collector_at_rest():
            pass
        assert not gc.isenabled()
    finally:
        gc.enable()


def test_a_restore_reads_its_own_file_ahead(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = torch.nn.Linear(2, 2)
    with sp.CheckpointManager(tmp_path, {"model": model}) as manager:
        manager.restore()
        manager.after_update()
        generation = manager.save().wait().generation
    asked, is_asked, read = list[str](), threading.Event(), LocalStorage.read

    def foresee(storage: LocalStorage, path: str, step_bytes: int) -> Generator[int, None, None]:
        asked.append(path)
        if path.endswith(".safetensors"):
            is_asked.set()
        yield from ()

    def read_late(storage: LocalStorage, path: str, **limits: int) -> bytes:
        # A restore that is quick ends the reading ahead before it has begun.
        if path.endswith("rank-00000-of-00001.json"):
            assert is_asked.wait(LONGEST_WAIT_S)
        return read(storage, path, **limits)

    monkeypatch.setattr(LocalStorage, "foresee", foresee)
    monkeypatch.setattr(LocalStorage, "read", read_late)
    with sp.CheckpointManager(tmp_path, {"model": model}) as manager:
        assert manager.restore().step == 1
    assert asked == [f"generations/{generation}/rank-00000-of-00001.{kind}" for kind in ("json", "safetensors")]
