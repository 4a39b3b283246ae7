"""Saves on real ext4 and xfs that are full, turn read-only or lose their device: nothing older is harmed.

Source: the file systems are those of this machine's kernel, in image files on loop devices.
"""

from __future__ import annotations

import errno
import random
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from safepoint.catalog import read_lineage
from safepoint.errors import OutcomeUnknownError, StorageError
from safepoint.storage.base import Storage
from safepoint.storage.local import LocalStorage
from tests.crash.damage import files_of
from tests.crash.file_systems import (
    MIB,
    Image,
    fail_as_ext4_does,
    filled,
    lose_the_device,
    make_image,
)
from tests.crash.job import Job, Weights, whole_state
from tests.crash.processes import own_job

KINDS = ("ext4", "xfs")
BALLAST_BYTES = MIB // 2


class Meeting:
    """Pass everything on to a storage; something happens once, before a verb is used for the n-th time."""

    def __init__(self, inner: Storage, verb: str, *, count: int, act: Callable[[], None]) -> None:
        self._inner, self._verb, self._left, self._act = inner, verb, count, act

    def __getattr__(self, verb: str) -> Any:
        self._left -= verb == self._verb
        if self._left == 0:
            self._left = -1
            self._act()
        return getattr(self._inner, verb)


class Unasked(LocalStorage):
    """A folder that does not tell its room, so that a save begins and meets the full disk."""

    def free_bytes(self) -> int | None:
        return None


def heavy_job(root: Path, *, asks: bool = False) -> Job:
    """Return a job that has more to save than a few blocks, and may ask for room before it saves."""
    job = own_job(root, takeover=True)
    if not asks:
        job.saver._storage = Unasked(root)
    job.items["ballast"] = Weights("ballast", data=bytearray(random.Random(0).randbytes(BALLAST_BYTES)))
    return job


def lasting_files(root: Path) -> dict[str, bytes]:
    """Return all files but those that change in place, with the folders of saves."""
    found = files_of(LocalStorage(root))
    folders = {entry.name: b"" for entry in LocalStorage(root).list("generations")}
    return folders | {path: data for path, data in found.items() if not path.endswith((".alive", ".jsonl"))}


def check_resumes_heavy(root: Path, *allowed: int) -> None:
    """Start on what is there, which must be whole and of one of these steps, and save."""
    job = heavy_job(root)
    try:
        report = job.start()
        assert report.step in allowed
        assert [text for text in map(str, report.refused) if "never completed" not in text] == []
        assert job.state() == whole_state(report.step)
        job.live(report.step + 1)
    finally:
        job.end()


@pytest.fixture(params=KINDS)
def image(request: pytest.FixtureRequest, tmp_path: Path) -> Image:
    return make_image(request.param, tmp_path / "disk.img")


@pytest.fixture
def folder(image: Image) -> Iterator[Path]:
    with image.mounted(skips=True) as path:
        yield path


def save_without_room(job: Job, folder: Path, step: int, *, leave_bytes: int) -> bool:
    """Save on a disk with so little room, by schedule, and return whether it failed; then save with room."""
    root = folder / "run"
    before = lasting_files(root)
    job.train_to(step)
    with filled(folder, leave_bytes=leave_bytes), warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        handle = job.save(is_scheduled=True)
        if handle.error is not None:
            assert isinstance(handle.error, StorageError), handle.error
            assert handle.error.errno == errno.ENOSPC
            (warned,) = (str(one.message) for one in caught)
            assert "the disk is full" in warned and "training goes on" in warned
            assert lasting_files(root) == before, "what a failed save wrote stays, or it touched what was there"
    job.live(step + 1)
    return handle.error is not None


def fill_many(folder: Path, rooms: list[int]) -> int:
    """Save with each of these rooms, and return how many saves failed."""
    job = heavy_job(folder / "run")
    try:
        job.start()
        job.live(1, 2, 3)
        failed = [save_without_room(job, folder, 10 * n, leave_bytes=room) for n, room in enumerate(rooms, 1)]
    finally:
        job.end()
    check_resumes_heavy(folder / "run", 10 * len(rooms) + 1)
    assert failed[0], "a full disk was not felt"
    return sum(failed)


def test_a_save_on_a_full_disk_warns_takes_its_objects_away_and_the_next_one_succeeds(
    folder: Path, chance: random.Random
) -> None:
    """Spec: C3.3"""
    near = BALLAST_BYTES + chance.randrange(6 << 10, 12 << 10)
    rooms = [0, chance.randrange(8 << 10), chance.randrange(BALLAST_BYTES), near]
    print(f"counted: {len(rooms)} rooms, {fill_many(folder, rooms)} failed saves")


@pytest.mark.soak
def test_a_save_on_a_disk_with_any_little_room_is_made_or_leaves_nothing(folder: Path, chance: random.Random) -> None:
    """Spec: C3.3"""
    near = range(BALLAST_BYTES, BALLAST_BYTES + (512 << 10), 8 << 10)
    rooms = [*range(0, 32 << 10, 1 << 10), *(chance.randrange(BALLAST_BYTES) for _ in range(16)), *near]
    failed = fill_many(folder, rooms)
    print(f"counted: {len(rooms)} rooms, {failed} failed saves")
    assert failed < len(rooms), "no save had just enough room"


def test_a_save_that_was_asked_for_on_a_full_disk_raises(folder: Path) -> None:
    job = heavy_job(folder / "run")
    try:
        job.start()
        job.live(1)
        with filled(folder, leave_bytes=0), pytest.raises(StorageError, match="the disk is full"):
            job.live(2)
        job.live(3)
    finally:
        job.end()
    check_resumes_heavy(folder / "run", 3)


@pytest.mark.parametrize("kind", ["ext4", pytest.param("xfs", marks=pytest.mark.soak)])
def test_a_save_that_cannot_fit_on_a_real_disk_is_not_begun(tmp_path: Path, kind: str) -> None:
    with make_image(kind, tmp_path / "disk.img").mounted(skips=True) as folder:
        job = heavy_job(folder / "run", asks=True)
        try:
            job.start()
            job.live(1)
            before = lasting_files(folder / "run")
            job.train_to(2)
            with filled(folder, leave_bytes=BALLAST_BYTES // 2):
                with pytest.raises(StorageError, match=r"was not begun.*predicted for one rank.*kB free") as caught:
                    job.save()
                assert caught.value.errno == errno.ENOSPC
                assert lasting_files(folder / "run") == before
            job.live(3)
        finally:
            job.end()
        check_resumes_heavy(folder / "run", 3)


def lose_in_the_middle(image: Image, act: Callable[[Path], None], verb: str, count: int) -> None:
    """Save two steps, let the third meet this, and go on after the file system was mounted anew."""
    with image.mounted(skips=True) as folder:
        job = heavy_job(folder / "run")
        job.start()
        job.live(1, 2)
        job.saver._storage = Meeting(job.storage, verb, count=count, act=lambda: act(folder))  # type: ignore[assignment]
        job.train_to(3)
        allowed = {2}
        try:
            job.save()
            raise AssertionError(f"a save without a disk was reported done, at {verb} {count}")
        except OutcomeUnknownError:
            allowed = {2, 3}
        except StorageError as exc:
            assert exc.errno in (errno.EROFS, errno.EIO, getattr(errno, "EUCLEAN", None)), exc
        with pytest.raises((StorageError, OutcomeUnknownError)):
            job.save()
        job.session._heartbeat._stop.set()  # type: ignore[union-attr]
        job.membership.require().journal.close()
        job.saver.close()
    image.repair()
    with image.mounted() as folder:
        check_resumes_heavy(folder / "run", *allowed)
    print("counted: 1 disk that was lost, 2 mounts")


def test_a_start_on_a_read_only_mount_is_refused_and_goes_on_once_it_is_writable(image: Image) -> None:
    """Readers need no right to write: the newest checkpoint is found all the same."""
    with image.mounted(skips=True) as folder:
        job = heavy_job(folder / "run")
        job.start()
        job.live(1, 2)
        job.end()
        with image.read_only():
            with pytest.raises(StorageError, match="the file system is read-only"):
                heavy_job(folder / "run").start()
            assert read_lineage(LocalStorage(folder / "run")).newest == 1
        check_resumes_heavy(folder / "run", 2)


# The folder is made; the data file and the index are created; the manifest is published and its name synced.
MOMENTS = [("make_folder", 1), ("create", 1), ("create", 2), ("sync_folder", 2), ("publish", 1), ("sync_folder", 3)]


@pytest.mark.parametrize(("verb", "count"), MOMENTS[1::3])
def test_a_file_system_that_turns_read_only_in_a_save_keeps_what_was_committed(
    tmp_path: Path, verb: str, count: int
) -> None:
    lose_in_the_middle(make_image("ext4", tmp_path / "disk.img"), fail_as_ext4_does, verb, count)


@pytest.mark.parametrize(("verb", "count"), MOMENTS[2::3])
def test_a_device_that_goes_away_in_a_save_keeps_what_was_committed(image: Image, verb: str, count: int) -> None:
    lose_in_the_middle(image, lose_the_device, verb, count)


@pytest.mark.soak
@pytest.mark.parametrize(("verb", "count"), MOMENTS)
def test_a_device_that_goes_away_at_any_step_of_a_save_keeps_what_was_committed(
    image: Image, verb: str, count: int
) -> None:
    lose_in_the_middle(image, lose_the_device, verb, count)


@pytest.mark.soak
@pytest.mark.parametrize(("verb", "count"), MOMENTS)
def test_a_file_system_that_turns_read_only_at_any_step_of_a_save_keeps_what_was_committed(
    tmp_path: Path, verb: str, count: int
) -> None:
    lose_in_the_middle(make_image("ext4", tmp_path / "disk.img"), fail_as_ext4_does, verb, count)
