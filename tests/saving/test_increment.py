"""What a save refers to: nothing that is not known to be committed, and nothing that is not what it was."""

from __future__ import annotations

import threading
from dataclasses import dataclass

import pytest

from safepoint.catalog import examine_all, read_lineage
from safepoint.errors import OutcomeUnknownError, StorageError, TornSnapshotError
from safepoint.faults.script import Effect, Fault, FaultScript
from safepoint.faults.storage import FaultyStorage
from safepoint.format.digest import digest_bytes
from safepoint.format.extent import split_rows
from safepoint.format.index import ObjectReference
from safepoint.saving import form, increment
from safepoint.saving.form import FileForm, form_of
from safepoint.saving.increment import Base, Increment, StoredChunk, find_kept, full, without_kept
from safepoint.saving.layout import LayoutBox
from safepoint.storage.base import Storage
from safepoint.storage.memory import MemoryStorage
from safepoint.testing.ambient import FakeWorld
from tests.crash.job import BytesSource, Job

OLDER = ObjectReference("step-000000000001-i000001-00aaaaaa", "rank-00000-of-00001.safetensors", 4096 + 40, "0" * 32)
DATA = bytes(range(40))
MANIFEST = "*/manifest.json"


def started() -> tuple[MemoryStorage, Job]:
    storage = MemoryStorage()
    job = Job(storage, FakeWorld(), pid=1, full_every=9)
    job.start()
    job.live(10)
    return storage, job


def ancestors(storage: Storage) -> list[int]:
    """Return to how many generations each one refers, oldest first."""
    found = examine_all(storage, read_lineage(storage))
    return [len(one.manifest.ancestors) for one in reversed(found) if one.manifest is not None]


def test_nothing_is_referred_to_through_a_save_of_unknown_outcome() -> None:
    """Spec: C6.3, C13.4"""
    storage, job = started()
    faults = (
        Fault(Effect.LOSE_ANSWER, verb="publish", path=MANIFEST),
        Fault(Effect.FAIL, verb="read", path=MANIFEST, occurrence=1),
    )
    job.saver._storage = FaultyStorage(storage, FaultScript(faults))
    job.train_to(20)
    with pytest.raises(OutcomeUnknownError):
        job.save()
    job.saver._storage = storage
    job.live(30, 40)
    assert ancestors(storage) == [0, 1, 0, 1]


def test_the_save_after_one_that_failed_is_full() -> None:
    """Spec: C13.4"""
    storage, job = started()
    job.saver._storage = FaultyStorage(storage, FaultScript((Fault(Effect.FAIL, verb="finish", path="*.safetensors"),)))
    job.train_to(20)
    with pytest.raises(StorageError):
        job.save()
    job.live(30, 40)
    assert ancestors(storage) == [0, 0, 1]


@dataclass(slots=True)
class Torn(BytesSource):
    def check(self) -> None:
        raise TornSnapshotError("a test's tensor was written to")


def forms(monkeypatch: pytest.MonkeyPatch) -> FileForm:
    """Return the form of a file of a box of four rows, in chunks of one."""
    monkeypatch.setattr(form, "split_rows", lambda shape, size: split_rows(shape, size, limit_bytes=10))
    return form_of([LayoutBox("model", "w", "uint8", (4, 10), (0, 0), (4, 10))], is_alone=True)


def base_of(*rows: int) -> Base:
    """Return that these rows of the data lie in an older file."""
    chunks = {
        ("model", "w", "uint8", (4, 10), (0, 0), (4, 10), (row, row + 1)): StoredChunk(
            OLDER, 4096 + 10 * row, digest_bytes(DATA[10 * row : 10 * row + 10])
        )
        for row in rows
    }
    return Base(1, chunks, 0)


def test_a_tensor_that_is_written_to_while_it_is_digested_is_torn(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(TornSnapshotError):
        find_kept(forms(monkeypatch), [Torn(DATA)], base_of(0, 1, 2, 3))


def test_a_source_that_cannot_be_read_in_part_is_written_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = forms(monkeypatch)
    assert find_kept(whole, [BytesSource(DATA)], base_of(0, 1, 3)) == full(whole)
    assert find_kept(whole, [BytesSource(DATA)], base_of(0, 1, 2, 3)).referenced_bytes == 40


def test_where_no_thread_is_to_be_had_all_is_digested_by_this_one(monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", refused)
    monkeypatch.setattr(increment, "_TASK_BYTES", 10)
    found = find_kept(forms(monkeypatch), [BytesSource(DATA)], base_of(0, 1, 2, 3))
    assert found.referenced_bytes == 40


def test_what_is_written_of_a_file_lies_without_a_hole(monkeypatch: pytest.MonkeyPatch) -> None:
    @dataclass(slots=True)
    class Parts(BytesSource):
        def rows(self, start: int, stop: int) -> BytesSource:
            return BytesSource(self.data[10 * start : 10 * stop])

    whole = forms(monkeypatch)
    increment = find_kept(whole, [Parts(DATA)], base_of(1))
    part, sources = without_kept(increment, [Parts(DATA)])
    assert [source.in_place() for source in sources] == [DATA[:10], DATA[20:]]
    assert [entry.offset_bytes - len(part.header) for entry in part.entries] == [0, 10]
    chunks = [chunk for entry in part.entries for chunk in entry.chunks]
    assert [(chunk.rows, chunk.offset_bytes - len(part.header)) for chunk in chunks] == [
        ((0, 1), 0),
        ((0, 1), 10),
        ((1, 2), 20),
    ]
    assert part.extents == (len(part.header), 10, 10, 10)
    assert part.size_bytes == len(part.header) + 30
    assert part.layout == whole.layout


def test_a_file_of_which_nothing_is_written_has_a_header_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    increment = Increment(forms(monkeypatch), tuple(base_of(0, 1, 2, 3).chunks.values()))
    part, sources = without_kept(increment, [BytesSource(DATA)])
    assert (part.entries, sources, part.extents) == ((), (), (len(part.header),))
    assert not increment.is_full
