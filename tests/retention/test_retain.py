"""What stays in a run over many saves and starts."""

from __future__ import annotations

import math
from pathlib import Path

from safepoint.ambient import SystemAmbient
from safepoint.catalog import GenerationState, examine_all, read_lineage
from safepoint.errors import StorageError
from safepoint.format.encoding import seal
from safepoint.format.names import generation_path
from safepoint.format.records import LineageLink, VerifiedRecord
from safepoint.retention.policy import keep
from safepoint.retention.retain import retain
from safepoint.storage.local import LocalStorage
from safepoint.storage.memory import MemoryStorage
from tests.build import RUN, begin, flip, write_generation, write_incarnation
from tests.retention.saves import CHAIN, DATA, after_save, everything, folders, save, steps


def test_kept_files_are_counted_from_disk_over_two_starts(storage: MemoryStorage) -> None:
    """A list of kept files held in memory is lost on resume, and more than the limit pile up."""
    for step in (1, 2, 3):
        save(storage, step, keep(last=3))
    resumed = read_lineage(storage)
    chain = (*CHAIN, LineageLink(2, str(examine_all(storage, resumed)[0].name), 3))
    write_incarnation(storage, 2, chain=chain)
    for step in (4, 5, 6, 7):
        save(storage, step, keep(last=3), chain=chain)
    assert steps(storage) == [3, 5, 6, 7]
    write_generation(storage, 8, chain=chain)
    chain = (*chain, LineageLink(3, "step-000000000007-i000002-0badcafe", 7))
    write_incarnation(storage, 3, chain=chain)
    save(storage, 8, keep(last=3), chain=chain)
    assert 3 in steps(storage), "the newest two starts name it"


def test_many_preemptions_leave_no_more_than_the_limit_and_one(storage: MemoryStorage) -> None:
    """Saves made on being preempted once lay outside of every limit, until the disk was full."""
    chain = CHAIN
    save(storage, 1, keep(last=3))
    for number in range(2, 12):
        newest = examine_all(storage, read_lineage(storage))[0]
        chain = (*chain, LineageLink(number, newest.text, newest.name.step))
        write_incarnation(storage, number, chain=chain)
        save(storage, 10 * number, keep(last=3), chain=chain)
        assert len(folders(storage)) <= 4
    assert steps(storage) == [90, 100, 110]


def test_a_new_run_leaves_the_folder_that_it_came_from_as_it_was(storage: MemoryStorage) -> None:
    """Resuming into another folder once deleted the checkpoint that was resumed from."""
    source = MemoryStorage()
    begin(source)
    write_generation(source, 100, chain=CHAIN, run=RUN)
    before = everything(source)
    for step in range(101, 110):
        save(storage, step)
    assert everything(source) == before


def test_what_another_run_left_in_the_folder_is_neither_marked_nor_deleted(storage: MemoryStorage) -> None:
    """The folders of an old run once made a new run's first checkpoint the one to go."""
    for step in (500, 600, 700):
        write_generation(storage, step, chain=CHAIN, run="another")
    before = {path: data for path, data in everything(storage).items() if "step-000000000" in path}
    for step in (100, 101, 102, 103):
        save(storage, step)
    assert steps(storage) == [102, 103]
    assert before.items() <= everything(storage).items()


def test_a_restart_in_an_old_folder_keeps_its_first_checkpoint() -> None:
    storage = MemoryStorage()
    begin(storage)
    for step in (500, 600, 700):
        write_generation(storage, step, chain=CHAIN)
    chain = (LineageLink(2, None, 0),)
    write_incarnation(storage, 2, chain=chain)
    save(storage, 100, chain=chain)
    save(storage, 200, chain=chain)
    assert steps(storage) == [100, 200]
    assert steps(storage, GenerationState.SUPERSEDED) == [500, 600, 700]


def test_damaged_newest_ones_do_not_cost_the_good_old_one(storage: MemoryStorage) -> None:
    names = [write_generation(storage, step, chain=CHAIN) for step in (1, 2, 3)]
    for name in names[1:]:
        storage.put(generation_path(name, DATA), b"cut")
    save(storage, 4)
    save(storage, 5)
    assert 1 in [*steps(storage), *steps(storage, GenerationState.DELETED)]
    assert steps(storage) == [4, 5]


def test_a_good_old_one_stays_while_the_newer_ones_are_damaged(storage: MemoryStorage) -> None:
    names = [write_generation(storage, step, chain=CHAIN) for step in (1, 2, 3)]
    for name in names[1:]:
        storage.put(generation_path(name, DATA), b"cut")
    report = save(storage, 4)
    assert steps(storage) == [1, 4]
    assert report.marked == ()


def test_the_one_that_was_read_back_stays_while_newer_ones_hide_their_damage(storage: MemoryStorage) -> None:
    """A flipped bit shows only to who reads every byte; the one that was read is worth more than its age says."""
    names = [write_generation(storage, step, chain=CHAIN) for step in (1, 2, 3)]
    manifest = storage.read(generation_path(names[0], "manifest.json"), limit_bytes=1 << 20)
    digest = manifest[len('{"digest":"') :][:32].decode("ascii")
    note = VerifiedRecord(1, RUN, names[0], digest, "2025-03-01T12:00:00+00:00", "00")
    storage.publish(generation_path(names[0], "verified.json"), seal(note))
    for name in names[1:]:
        flip(storage, generation_path(name, DATA))
    for step in (4, 5, 6):
        save(storage, step)
    assert steps(storage) == [1, 5, 6]


def test_a_kept_older_one_is_chosen_when_the_newest_three_are_damaged(storage: MemoryStorage) -> None:
    for step in range(100, 1100, 100):
        save(storage, step, keep(last=3, every=500))
    assert steps(storage) == [500, 800, 900, 1000]
    for entry in examine_all(storage, read_lineage(storage)):
        if entry.name.step > 500:
            storage.put(generation_path(entry.text, DATA), b"")
    assert steps(storage) == [500]


def test_what_the_newest_two_starts_resumed_from_is_not_marked(storage: MemoryStorage) -> None:
    """Spec: C12.2."""
    names = [write_generation(storage, step, chain=CHAIN) for step in (1, 2, 3)]
    second = (*CHAIN, LineageLink(2, names[0], 1))
    write_incarnation(storage, 2, chain=second)
    third = (*CHAIN, LineageLink(3, names[1], 2))
    write_incarnation(storage, 3, chain=third)
    for step in (4, 5, 6, 7):
        save(storage, step, chain=third)
    assert steps(storage) == [1, 2, 6, 7]


def test_the_best_one_survives_restarts_moves_of_the_folder_and_values_that_are_no_number(tmp_path: Path) -> None:
    """Who is the best is told by the manifests alone: no start, place or NaN changes it. The last start resumed 8, the
    one before it 7.
    """
    policy, chain = keep(last=2, best=("loss", "min")), CHAIN
    begin(LocalStorage(tmp_path / "0"))
    losses = {1: 3.0, 2: 0.5, 3: math.nan, 4: 2.0, 5: -math.inf, 6: math.nan, 7: 0.5, 8: 0.6, 9: math.nan}
    for step, loss in losses.items():
        storage = LocalStorage(tmp_path / str(step - 1))
        if step > 1:
            chain = (*chain, LineageLink(step, examine_all(storage, read_lineage(storage))[0].text, step - 1))
            write_incarnation(storage, step, chain=chain)
        told = {"loss": {"$float": "nan" if math.isnan(loss) else loss.hex()}}
        write_generation(storage, step, chain=chain, metrics=told)
        after_save(storage, policy, step)
        (tmp_path / str(step - 1)).rename(tmp_path / str(step))
    assert steps(LocalStorage(tmp_path / "9")) == [2, 7, 8, 9]


def test_no_policy_marks_nothing(storage: MemoryStorage) -> None:
    for step in range(1, 9):
        write_generation(storage, step, chain=CHAIN)
    assert retain(storage, run=RUN, incarnation=1, policy=None, ambient=SystemAmbient()).marked == ()
    assert len(steps(storage)) == 8


def test_a_storage_that_does_not_answer_is_reported_and_not_raised(storage: MemoryStorage) -> None:
    class Silent:
        def __getattr__(self, verb: str) -> object:
            return getattr(storage, verb)

        def list(self, path: str) -> object:
            raise StorageError("could not list", where=path, errno=5)

    report = after_save(Silent())  # type: ignore[arg-type]  # all other verbs are the storage's own
    assert "could not list" in report.stopped
