"""How marked data and uncompleted saves go, and what stops that."""

from __future__ import annotations

from pathlib import Path

import pytest

from safepoint.catalog import GenerationState, examine_all, read_lineage
from safepoint.errors import StorageError
from safepoint.faults.script import Effect, Fault, FaultScript, SimulatedCrash
from safepoint.faults.storage import FaultyStorage
from safepoint.format.encoding import seal
from safepoint.format.names import generation_path
from safepoint.format.records import LineageLink, TombstoneRecord
from safepoint.retention.policy import keep
from safepoint.retention.sweep import sweep
from safepoint.storage.base import Storage
from safepoint.storage.local import LocalStorage
from safepoint.storage.memory import MemoryStorage
from tests.build import RUN, floats, write_generation, write_incarnation, write_run
from tests.retention.saves import (
    CHAIN,
    DATA,
    INDEX,
    after_save,
    borrowing_from,
    everything,
    folders,
    save,
    steps,
)


class FailingDeletes:
    """Pass everything on to a storage, but fail each deletion within one folder."""

    def __init__(self, storage: Storage, folder: str) -> None:
        self._storage = storage
        self._folder = folder

    def __getattr__(self, verb: str) -> object:
        return getattr(self._storage, verb)

    def delete(self, path: str) -> None:
        """Fail where asked to."""
        if path.startswith(generation_path(self._folder)):
            raise StorageError("could not delete: the file is open elsewhere", where=path, errno=16)
        self._storage.delete(path)


def test_a_save_marks_and_the_next_one_deletes(storage: MemoryStorage) -> None:
    """Spec: C12.1."""
    save(storage, 1)
    save(storage, 2)
    first = save(storage, 3)
    assert steps(storage) == [2, 3]
    assert steps(storage, GenerationState.DELETED) == [1]
    assert [entry.name for entry in storage.list(generation_path(first.marked[0]))] == [
        "deleted.json",
        "manifest.json",
        INDEX,
        DATA,
    ]
    second = save(storage, 4)
    assert folders(storage) == [2, 3, 4]
    assert steps(storage) == [3, 4]
    assert second.swept.deleted == first.marked
    assert second.swept.freed_bytes > 4096
    assert second.warnings == ()


def test_a_failing_deletion_is_a_warning_and_the_others_go_on(storage: MemoryStorage) -> None:
    for step in (1, 2, 3, 4):
        write_generation(storage, step, chain=CHAIN)
    after_save(storage)
    stuck = "step-000000000001-i000001-0badcafe"
    report = after_save(FailingDeletes(storage, stuck))  # type: ignore[arg-type]  # all other verbs are the storage's own
    assert len(report.warnings) == 1
    assert "open elsewhere" in report.warnings[0]
    assert report.swept.deleted == ("step-000000000002-i000001-0badcafe",)
    assert steps(storage, GenerationState.DELETED) == [1]
    assert after_save(storage).swept.deleted == (stuck,)


def test_an_undecodable_manifest_stops_the_sweep_and_says_so(storage: MemoryStorage) -> None:
    """Spec: C12.4."""
    for step in (1, 2, 3):
        save(storage, step)
    storage.put(generation_path("step-000000000002-i000001-0badcafe", "manifest.json"), b"")
    before = everything(storage)
    report = after_save(storage)
    assert "step-000000000002-i000001-0badcafe/manifest.json" in report.stopped
    assert everything(storage) == before


def test_a_newer_start_ends_the_sweep(storage: MemoryStorage) -> None:
    for step in (1, 2, 3):
        save(storage, step)
    write_incarnation(storage, 2)
    before = everything(storage)
    assert after_save(storage).stopped == "incarnation 2 is newer"
    assert everything(storage) == before


def test_a_start_that_joins_during_a_sweep_ends_it_before_the_next_generation() -> None:
    """It may choose by another lineage, on which these marks are void."""

    class Joined(MemoryStorage):
        def delete_folder(self, path: str) -> None:
            super().delete_folder(path)
            write_incarnation(self, 2)

    joined = Joined()
    write_run(joined)
    write_incarnation(joined, 1, chain=CHAIN)
    for step in (1, 2, 3, 4):
        write_generation(joined, step, chain=CHAIN)
    assert len(after_save(joined).marked) == 2
    report = after_save(joined)
    assert (len(report.swept.deleted), report.stopped) == (1, "incarnation 2 is newer")
    assert folders(joined) == [2, 3, 4]


def test_a_refused_start_does_not_end_the_sweep(storage: MemoryStorage) -> None:
    for step in (1, 2, 3):
        save(storage, step)
    write_incarnation(storage, 2, is_refused=True)
    assert len(after_save(storage).swept.deleted) == 1


def revived(storage: MemoryStorage) -> tuple[tuple[LineageLink, ...], list[str]]:
    """Let a third start go back to step 3, before the second one, which had marked step 2; return chain and names."""
    names = [write_generation(storage, step, chain=CHAIN) for step in (1, 2, 3, 4)]
    write_incarnation(storage, 2, chain=(*CHAIN, LineageLink(2, names[3], 4)))
    storage.publish(generation_path(names[1], "deleted.json"), seal(TombstoneRecord(1, RUN, names[1], 2, "", "00")))
    chain = (*CHAIN, LineageLink(3, names[2], 3))
    write_incarnation(storage, 3, chain=chain)
    return chain, names


def test_what_a_start_off_the_lineage_may_still_be_deleting_is_no_second_copy(storage: MemoryStorage) -> None:
    """Spec: C12.5"""
    chain, names = revived(storage)
    storage.put(generation_path(names[2], DATA), b"cut")
    write_generation(storage, 5, chain=chain)
    storage.publish(generation_path(names[0], "deleted.json"), seal(TombstoneRecord(1, RUN, names[0], 3, "", "00")))
    assert sweep(storage, read_lineage(storage), 3).stopped.startswith("fewer than two good checkpoints")
    write_generation(storage, 6, chain=chain)
    assert sweep(storage, read_lineage(storage), 3).deleted == (names[0],)


def test_no_good_one_goes_for_what_a_start_off_the_lineage_may_still_be_deleting(storage: MemoryStorage) -> None:
    """Spec: C12.3, C12.5"""
    chain, _ = revived(storage)
    report = save(storage, 5, keep(last=3), chain=chain)
    assert steps(storage) == [1, 2, 3, 5]
    doubtful = next(entry for entry in report.decisions if entry.step == 2)
    assert doubtful.reasons == ("among the last 3", "marked by a start off the lineage; it counts for nothing")
    for step in (6, 7, 8):
        save(storage, step, keep(last=2), chain=chain)
    assert steps(storage) == [3, 7, 8], "the resumed one, and the newest two"


def test_a_tombstone_of_a_start_that_is_off_the_lineage_is_void(storage: MemoryStorage) -> None:
    """Spec: C12.3."""
    names = [write_generation(storage, step, chain=CHAIN) for step in (1, 2, 3)]
    write_incarnation(storage, 2, chain=(*CHAIN, LineageLink(2, names[2], 3)))
    third = (*CHAIN, LineageLink(3, names[2], 3))
    write_incarnation(storage, 3, chain=third)
    storage.publish(generation_path(names[0], "deleted.json"), seal(TombstoneRecord(1, RUN, names[0], 2, "late", "00")))
    report = save(storage, 4, keep(last=9), chain=third)
    assert report.swept.deleted == ()
    assert steps(storage) == [1, 2, 3, 4]
    assert names[0] in save(storage, 5, keep(last=2), chain=third).marked


def test_only_a_newer_start_that_has_committed_sweeps_what_was_never_completed(storage: MemoryStorage) -> None:
    """Spec: C12.6."""
    save(storage, 1)
    write_generation(storage, 2, chain=CHAIN, is_committed=False)
    save(storage, 3)
    assert folders(storage) == [1, 2, 3]
    chain = (*CHAIN, LineageLink(2, "step-000000000003-i000001-0badcafe", 3))
    write_incarnation(storage, 2, chain=chain)
    write_generation(storage, 4, chain=chain, is_committed=False)
    assert "has committed nothing" in after_save(storage, incarnation=2).stopped
    assert folders(storage) == [1, 2, 3, 4]
    save(storage, 5, chain=chain)
    assert folders(storage) == [1, 3, 4, 5]


@pytest.mark.parametrize("is_there", [False, True])
def test_fewer_than_two_good_ones_stop_the_sweep(storage: MemoryStorage, is_there: bool) -> None:
    """A file that lacks its end is no better than one that is gone.

    Spec: C12.5.
    """
    for step in (1, 2, 3):
        save(storage, step)
    path = generation_path("step-000000000003-i000001-0badcafe", INDEX)
    data = storage.read(path, limit_bytes=1 << 20)
    storage.delete(path)
    if is_there:
        storage.publish(path, data[:-1])
    before = everything(storage)
    assert "fewer than two" in after_save(storage).stopped
    assert everything(storage) == before


def test_a_generation_of_unknown_outcome_is_not_one_of_the_two_that_must_stay(storage: MemoryStorage) -> None:
    """It may not survive: its last sync was not seen to succeed.

    Spec: C6.3, C12.5.
    """
    for step in (1, 2, 3):
        save(storage, step)
    before = everything(storage)
    unknown = {"step-000000000003-i000001-0badcafe"}
    lineage = read_lineage(storage)
    assert "fewer than two" in sweep(storage, lineage, 1, unknown=unknown).stopped
    assert everything(storage) == before
    assert len(sweep(storage, lineage, 1).deleted) == 1


@pytest.mark.parametrize("foreign", ["notes.txt", "manifest.json.bak"])
def test_a_foreign_file_stays_and_so_does_its_folder(storage: MemoryStorage, foreign: str) -> None:
    """Spec: C12.7."""
    for step in (1, 2, 3):
        save(storage, step)
    marked = generation_path("step-000000000001-i000001-0badcafe")
    storage.publish(f"{marked}/{foreign}", b"mine")
    storage.make_folder("generations/my-notes")
    storage.publish("generations/my-notes/rank-00000-of-00001.json", b"mine")
    save(storage, 4)
    assert [entry.name for entry in storage.list(marked)] == [foreign]
    assert storage.read("generations/my-notes/rank-00000-of-00001.json", limit_bytes=99) == b"mine"


def test_an_object_that_a_remaining_manifest_names_stays(storage: MemoryStorage) -> None:
    """A later checkpoint refers to a chunk of an ancestor that is itself due to go.

    Spec: C12.4.
    """
    base = write_generation(storage, 1, chain=CHAIN, items={"model": {"w": floats(1.0, 2.0)}})
    items = borrowing_from(storage, base)
    for step in (2, 3):
        write_generation(storage, step, chain=CHAIN, items=items)
    save(storage, 4)
    save(storage, 5, keep(last=3))
    report = save(storage, 6, keep(last=3))
    assert base in report.swept.retained
    assert [entry.name for entry in storage.list(generation_path(base))] == ["deleted.json", "manifest.json", DATA]
    assert 3 not in steps(storage)
    report = save(storage, 7, keep(last=3))
    assert base in report.swept.deleted
    assert steps(storage) == [5, 6, 7]


@pytest.mark.parametrize("count", range(5))
def test_a_sweep_that_was_cut_short_is_taken_up_again(storage: MemoryStorage, count: int) -> None:
    """It dies at each deletion in turn; readers never see more than a marked or an uncompleted save.

    Spec: C8.3, C12.4.
    """
    for step in (1, 2, 3):
        save(storage, step)
    write_generation(storage, 4, chain=CHAIN)
    dying = FaultyStorage(storage, FaultScript((Fault(Effect.STOP, verb="delete*", occurrence=count, lasts=True),)))
    with pytest.raises(SimulatedCrash):
        after_save(dying)
    assert [verb for _, verb, _ in dying.operations].count("delete") == min(count + 1, 4)
    state = examine_all(storage, read_lineage(storage))[-1].state
    assert state in (GenerationState.DELETED, GenerationState.PENDING)
    chain = (*CHAIN, LineageLink(2, "step-000000000004-i000001-0badcafe", 4))
    write_incarnation(storage, 2, chain=chain)
    save(storage, 5, chain=chain)
    assert 1 not in folders(storage)


def test_records_of_starts_are_never_deleted(storage: MemoryStorage) -> None:
    """Spec: C12.7."""
    chain = (*CHAIN, LineageLink(2, write_generation(storage, 1, chain=CHAIN), 1))
    write_incarnation(storage, 2, chain=chain)
    before = {path: data for path, data in everything(storage).items() if not path.startswith("generations/")}
    for step in range(2, 8):
        save(storage, step, chain=chain)
    after = {path: data for path, data in everything(storage).items() if not path.startswith("generations/")}
    assert after == before


def test_on_a_file_system_the_folders_of_swept_ones_are_gone(tmp_path: Path) -> None:
    storage = LocalStorage(tmp_path / "run")
    write_run(storage)
    write_incarnation(storage, 1, chain=CHAIN)
    for step in range(1, 7):
        save(storage, step)
    assert sorted(path.name[5:17] for path in (tmp_path / "run/generations").iterdir()) == [
        "000000000004",
        "000000000005",
        "000000000006",
    ]
