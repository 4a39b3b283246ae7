"""Pinned checkpoints stay: whatever retention decides, wherever the folder lies, and whenever we die."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from safepoint.catalog import GenerationState
from safepoint.errors import CorruptionError, NotFoundError, RequestError
from safepoint.faults.disk import SimulatedDisk
from safepoint.faults.script import Effect, Fault, FaultScript, SimulatedCrash
from safepoint.faults.storage import FaultyStorage
from safepoint.format.names import generation_path
from safepoint.format.records import LineageLink
from safepoint.notes import UNREADABLE_PIN, Pin, read_pin
from safepoint.retention.pins import pin, unpin
from safepoint.retention.policy import keep
from safepoint.storage.local import LocalStorage
from safepoint.storage.memory import MemoryStorage
from tests.build import begin, floats, write_generation, write_incarnation
from tests.retention.saves import CHAIN, DATA, after_save, borrowing_from, everything, save, steps

FIRST = "step-000000000001-i000001-0badcafe"
DIES_AFTER_THE_PIN = Fault(Effect.STOP, verb="sync_folder", path="generations/*", lasts=True)


class Interleaved(MemoryStorage):
    """A storage in which something happens right before a file of one name is given it."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self._meets = name
        self.happens: Callable[[], object] = lambda: None

    def publish(self, path: str, data: bytes) -> None:
        if path.endswith(self._meets):
            happens, self.happens = self.happens, lambda: None
            happens()
        super().publish(path, data)


def swept_before_the_pin() -> Interleaved:
    """Return a storage of three checkpoints, which retention marks right before one of them is pinned."""
    racing = Interleaved("pinned.json")
    begin(racing)
    for step in (1, 2, 3):
        write_generation(racing, step, chain=CHAIN)
    racing.happens = lambda: after_save(racing)
    return racing


def test_a_pinned_one_is_neither_marked_nor_deleted(storage: MemoryStorage) -> None:
    """Spec: C12.8."""
    save(storage, 1)
    assert pin("", 1, reason="for the paper", storage=storage) == FIRST
    for step in range(2, 8):
        report = save(storage, step)
    assert steps(storage) == [1, 6, 7]
    decision = next(entry for entry in report.decisions if entry.step == 1)
    assert decision.reasons == ("pinned: for the paper",)


def test_an_unpinned_one_is_decided_on_again(storage: MemoryStorage) -> None:
    save(storage, 1)
    pin("", 1, reason="for a week", storage=storage)
    save(storage, 2)
    save(storage, 3)
    assert unpin("", 1, storage=storage) == [FIRST]
    assert steps(storage) == [1, 2, 3]
    save(storage, 4)
    save(storage, 5)
    assert steps(storage) == [4, 5]
    assert "generations/" + FIRST not in {path.rsplit("/", 1)[0] for path in everything(storage)}


def test_a_pinned_one_of_a_branch_that_was_left_stays(storage: MemoryStorage) -> None:
    first = save(storage, 1)
    assert not first.marked
    save(storage, 5)
    pin("", 5, reason="the other branch", storage=storage)
    second = (*CHAIN, LineageLink(2, FIRST, 1))
    write_incarnation(storage, 2, chain=second)
    for step in (6, 7, 8, 9):
        save(storage, step, chain=second)
    assert steps(storage, GenerationState.SUPERSEDED) == [5]


def test_an_ancestor_object_that_a_pinned_one_names_stays_with_it(storage: MemoryStorage) -> None:
    """Spec: C12.4, C12.8."""
    base = write_generation(storage, 1, chain=CHAIN, items={"model": {"w": floats(1.0, 2.0)}})
    write_generation(storage, 2, chain=CHAIN, items=borrowing_from(storage, base))
    pin("", 2, reason="kept", storage=storage)
    for step in range(3, 9):
        save(storage, step)
    assert steps(storage) == [2, 7, 8]
    assert storage.size(generation_path(base, DATA)) > 0


def test_a_mark_beside_a_pin_is_void() -> None:
    """A job had decided before the pin, and marks after it.

    Spec: C12.8.
    """
    racing = Interleaved("deleted.json")
    begin(racing)
    for step in (1, 2, 3):
        write_generation(racing, step, chain=CHAIN)
    racing.happens = lambda: pin("", 1, reason="just in time", storage=racing)
    assert after_save(racing).marked == (FIRST,)
    assert racing.size(generation_path(FIRST, "deleted.json")) > 0
    assert steps(racing) == [1, 2, 3]
    save(racing, 4)
    save(racing, 5)
    assert steps(racing) == [1, 4, 5]


def test_a_mark_beside_a_pin_goes_with_the_pin() -> None:
    """The policy decides anew: it may want now what it let go then."""
    racing = Interleaved("deleted.json")
    begin(racing)
    for step in (1, 2, 3):
        write_generation(racing, step, chain=CHAIN)
    racing.happens = lambda: pin("", 1, reason="just in time", storage=racing)
    after_save(racing)
    unpin("", 1, storage=racing)
    assert steps(racing) == [1, 2, 3]
    after_save(racing, keep(last=3))
    assert steps(racing) == [1, 2, 3]


def test_a_pin_is_refused_where_a_mark_came_first() -> None:
    """The sweep may have looked for a pin already.

    Spec: C12.8.
    """
    racing = swept_before_the_pin()
    with pytest.raises(RequestError, match="marked for deletion"):
        pin("", 1, reason="too late", storage=racing)
    assert read_pin(racing, FIRST) is None
    assert steps(racing) == [2, 3]
    with pytest.raises(RequestError, match="marked for deletion"):
        pin("", 1, reason="too late", storage=racing)


def test_a_pin_that_is_found_beside_a_mark_is_not_confirmed() -> None:
    """Who set it died before the look for a mark, which a sweep may have seen before the pin.

    Spec: C12.8.
    """
    racing = swept_before_the_pin()
    with pytest.raises(SimulatedCrash):
        pin("", 1, reason="mine", storage=FaultyStorage(racing, FaultScript((DIES_AFTER_THE_PIN,))))
    assert read_pin(racing, FIRST) is not None
    before = everything(racing)
    with pytest.raises(RequestError, match=r"came first is not to be seen.*stays"):
        pin("", 1, reason="mine", storage=racing)
    assert everything(racing) == before
    save(racing, 4)
    assert 1 in steps(racing), "the pin protects from what begins after it"
    unpin("", 1, storage=racing)
    assert pin("", 1, reason="mine", storage=racing) == FIRST


def test_a_pin_of_somebody_else_is_never_taken_back() -> None:
    """Two pin the same one at once. The first is confirmed, and so the mark that comes then is void.

    Spec: C12.8.
    """
    marking, racing = Interleaved("deleted.json"), Interleaved("pinned.json")
    racing._entries = marking._entries
    begin(racing)
    for step in (1, 2, 3):
        write_generation(racing, step, chain=CHAIN)

    def first_pins_and_retention_marks() -> None:
        marking.happens = lambda: pin("", 1, reason="mine", storage=marking)
        after_save(marking)

    racing.happens = first_pins_and_retention_marks
    with pytest.raises(RequestError, match="came first is not to be seen"):
        pin("", 1, reason="mine", storage=racing)
    assert read_pin(racing, FIRST) is not None
    save(racing, 4)
    save(racing, 5)
    assert steps(racing) == [1, 4, 5]


def test_a_pin_that_is_found_is_made_durable_before_it_is_confirmed() -> None:
    """Spec: C12.8."""
    disk = SimulatedDisk()
    begin(disk)
    save(disk, 1)
    for folder in ("", "incarnations", "generations", generation_path(FIRST)):
        disk.sync_folder(folder)
    unsynced = Fault(Effect.STOP, verb="sync_folder", lasts=True)
    with pytest.raises(SimulatedCrash):
        pin("", 1, reason="mine", storage=FaultyStorage(disk, FaultScript((unsynced,))))
    assert pin("", 1, reason="mine", storage=disk) == FIRST
    assert all(read_pin(state, FIRST) is not None for state in disk.crash_states(1, 16))


def test_a_pin_is_set_again_with_the_same_reason_only(storage: MemoryStorage) -> None:
    save(storage, 1)
    pin("", 1, reason="mine", storage=storage)
    before = everything(storage)
    assert pin("", 1, reason="mine", storage=storage) == FIRST
    with pytest.raises(RequestError, match="another reason"):
        pin("", 1, reason="yours", storage=storage)
    assert everything(storage) == before


def test_what_is_no_good_checkpoint_is_not_pinned(storage: MemoryStorage) -> None:
    save(storage, 1)
    write_generation(storage, 2, chain=CHAIN, is_committed=False)
    storage.put(generation_path(write_generation(storage, 3, chain=CHAIN), DATA), b"cut")
    before = everything(storage)
    with pytest.raises(NotFoundError, match="steps 3, 2, 1"):
        pin("", 2, reason="x", storage=storage)
    with pytest.raises(CorruptionError, match="damaged"):
        pin("", 3, reason="x", storage=storage)
    with pytest.raises(NotFoundError):
        unpin("", 1, storage=storage)
    with pytest.raises(NotFoundError, match="no run"):
        pin("", 1, reason="x", storage=MemoryStorage())
    assert everything(storage) == before


@pytest.mark.parametrize("reason", ["", "  ", "two\nlines", "x" * 501, "\ud800", 7])
def test_a_pin_has_a_reason_of_one_line(storage: MemoryStorage, reason: str) -> None:
    save(storage, 1)
    with pytest.raises(RequestError, match="a pin has a reason"):
        pin("", 1, reason=reason, storage=storage)


@pytest.mark.parametrize("data", [b"", b"{}", b'{"digest":"' + b"0" * 32 + b'","format":9}'])
def test_a_pin_that_cannot_be_read_protects_all_the_same(storage: MemoryStorage, data: bytes) -> None:
    """Spec: C12.8."""
    save(storage, 1)
    storage.put(generation_path(FIRST, "pinned.json"), data)
    for step in (2, 3, 4):
        save(storage, step)
    assert read_pin(storage, FIRST) == Pin(UNREADABLE_PIN)
    assert steps(storage) == [1, 3, 4]


def test_a_pinned_folder_whose_manifest_is_gone_is_not_swept(storage: MemoryStorage) -> None:
    save(storage, 1)
    pin("", 1, reason="evidence", storage=storage)
    storage.delete(generation_path(FIRST, "manifest.json"))
    save(storage, 2)
    second = (*CHAIN, LineageLink(2, "step-000000000002-i000001-0badcafe", 2))
    write_incarnation(storage, 2, chain=second)
    for step in (3, 4, 5):
        save(storage, step, chain=second)
    assert storage.size(generation_path(FIRST, DATA)) > 0


def test_a_pin_moves_with_the_folder(tmp_path: Path) -> None:
    storage = LocalStorage(tmp_path / "here")
    begin(storage)
    save(storage, 1)
    pin(tmp_path / "here", 1, reason="kept for ever")
    shutil.move(tmp_path / "here", tmp_path / "there")
    moved = LocalStorage(tmp_path / "there")
    for step in (2, 3, 4, 5):
        save(moved, step)
    assert steps(moved) == [1, 4, 5]


def test_a_crash_at_any_operation_of_a_pin_leaves_it_pinned_or_not(seed: int) -> None:
    """In whatever state the disk is then, the checkpoint is whole, and what was reported pinned is."""
    for operation in range(40):
        disk = SimulatedDisk()
        begin(disk)
        save(disk, 1)
        for folder in ("", "incarnations", "generations", generation_path(FIRST)):
            disk.sync_folder(folder)
        script = FaultScript((Fault(Effect.STOP, operation=operation, lasts=True),), seed=seed)
        try:
            pin("", 1, reason="kept", storage=FaultyStorage(disk, script))
            is_done = True
        except SimulatedCrash:
            is_done = False
        for state in disk.crash_states(seed, 8):
            assert steps(state) == [1]
            assert not is_done or read_pin(state, FIRST) == read_pin(disk, FIRST)
            pin("", 1, reason="kept", storage=state)
            assert read_pin(state, FIRST) is not None
        if is_done:
            break
    assert operation > 5
