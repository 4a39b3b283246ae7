"""Large files pass by the system's cache where the file system takes that, and are ordinary files where it does not."""

from __future__ import annotations

import ctypes
import errno
import fcntl
import functools
import mmap
import os
import tempfile
import threading
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest

from safepoint.errors import StorageError
from safepoint.storage import local_direct, local_files
from safepoint.storage.local import LocalStorage

PIECE = 1 << 20
# A little more than what counts as large, and no whole number of blocks.
SIZE = (9 << 20) + 12_345
PATTERN = bytes(range(251))


@pytest.fixture
def storage(tmp_path: Path) -> LocalStorage:
    made = LocalStorage(tmp_path / "run")
    made.make_root()
    return made


def content() -> memoryview:
    """Return bytes in memory that begins on a page."""
    memory = mmap.mmap(-1, SIZE)
    memory.write((PATTERN * (SIZE // len(PATTERN) + 1))[:SIZE])
    return memoryview(memory)


def write(storage: LocalStorage, data: memoryview, *, piece: int = PIECE) -> None:
    writer = storage.create("object", size_bytes=len(data))
    for start in range(0, len(data), piece):
        writer.write(data[start : start + piece])
    writer.finish()


def kinds_of_writes(monkeypatch: pytest.MonkeyPatch, *, most: int | None = None) -> list[tuple[bool, int]]:
    """Note of each write of this thread whether it passes by the cache, and its length; `most` cuts each short."""
    found: list[tuple[bool, int]] = []
    own = threading.get_ident()
    real = os.pwrite

    def noted(descriptor: int, data: memoryview, offset: int) -> int:
        if threading.get_ident() != own:
            return real(descriptor, data, offset)
        passes = bool(fcntl.fcntl(descriptor, fcntl.F_GETFL) & os.O_DIRECT)
        found.append((passes, len(data)))
        return real(descriptor, data[:most], offset)

    monkeypatch.setattr(os, "pwrite", noted)
    return found


def test_whole_blocks_pass_by_the_cache_and_the_rest_does_not(
    storage: LocalStorage, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = kinds_of_writes(monkeypatch)
    data = content()
    write(storage, data)
    if not found[0][0]:
        pytest.skip("this file system takes nothing past the cache")
    assert found == [(True, PIECE)] * 9 + [(True, 12_288), (False, 57)]
    assert storage.read("object", limit_bytes=SIZE) == data


def test_small_files_go_through_the_cache(storage: LocalStorage, monkeypatch: pytest.MonkeyPatch) -> None:
    found = kinds_of_writes(monkeypatch)
    write(storage, content()[: 1 << 20])
    assert found == [(False, 1 << 20)]


@pytest.mark.parametrize(
    ("size", "told", "begins"), [(1 << 20, True, True), (1 << 20, False, False), (100, True, False)]
)
def test_the_device_begins_with_a_small_file_once_it_is_whole(
    storage: LocalStorage, monkeypatch: pytest.MonkeyPatch, size: int, told: bool, begins: bool
) -> None:
    seen: list[int] = []
    monkeypatch.setattr(local_files, "begin_write_back", lambda descriptor: seen.append(os.fstat(descriptor).st_size))
    writer = storage.create("object", size_bytes=size if told else 0)
    data = content()[:size]
    writer.write(data[:50])
    writer.write(data[50:])
    assert seen == ([size] if begins else [])
    writer.finish()


@pytest.mark.parametrize(("number", "is_final"), [(errno.ENOSPC, True), (errno.EIO, True), (errno.ESPIPE, False)])
def test_what_the_device_cannot_begin_with_is_final_for_the_file(
    storage: LocalStorage, monkeypatch: pytest.MonkeyPatch, number: int, is_final: bool
) -> None:
    """The system may tell of it this one time only. Spec: C3.2."""

    def fail(*arguments: object) -> int:
        ctypes.set_errno(number)
        return -1

    monkeypatch.setattr(local_direct, "_sync_range", fail)
    writer = storage.create("object", size_bytes=1 << 20)
    with pytest.raises(StorageError) if is_final else nullcontext():
        writer.write(content()[: 1 << 20])
    with pytest.raises(StorageError) if is_final else nullcontext():
        writer.finish()


@pytest.mark.parametrize(("shift", "piece"), [(1, PIECE), (0, PIECE + 1), (0, 4095)])
def test_bytes_that_do_not_suit_are_written_all_the_same(storage: LocalStorage, shift: int, piece: int) -> None:
    data = content()[shift:]
    write(storage, data, piece=piece)
    assert storage.read("object", limit_bytes=SIZE) == data


@pytest.mark.parametrize("most", [4096 * 100, 4096 * 3 + 1])
def test_short_writes_are_completed(storage: LocalStorage, monkeypatch: pytest.MonkeyPatch, most: int) -> None:
    data = content()
    kinds_of_writes(monkeypatch, most=most)
    write(storage, data)
    assert storage.read("object", limit_bytes=SIZE) == data


def test_a_file_system_that_takes_the_flag_and_no_write_gets_ordinary_ones(
    storage: LocalStorage, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = os.pwrite

    def write_once(descriptor: int, data: memoryview, offset: int) -> int:
        if fcntl.fcntl(descriptor, fcntl.F_GETFL) & os.O_DIRECT:
            raise OSError(errno.EINVAL, "no")
        return real(descriptor, data, offset)

    monkeypatch.setattr(os, "pwrite", write_once)
    data = content()
    write(storage, data)
    assert storage.read("object", limit_bytes=SIZE) == data


def test_a_file_system_that_refuses_flag_and_room_is_written_like_any_other(
    storage: LocalStorage, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = fcntl.fcntl

    def refuse(descriptor: int, command: int, argument: int = 0) -> int:
        if command == fcntl.F_SETFL:
            raise OSError(errno.EINVAL, "no")
        return real(descriptor, command, argument)

    monkeypatch.setattr(local_direct.fcntl, "fcntl", refuse)
    monkeypatch.setattr(local_direct.ctypes, "CDLL", fallocate_fails_with(errno.EOPNOTSUPP))
    data = content()
    write(storage, data)
    assert storage.read("object", limit_bytes=SIZE) == data


def test_a_file_system_in_memory_takes_large_files() -> None:
    if not os.access("/dev/shm", os.W_OK):
        pytest.skip("needs a file system in memory")
    data = content()
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
        storage = LocalStorage(folder)
        write(storage, data)
        assert storage.read("object", limit_bytes=SIZE) == data


def test_where_there_is_no_room_the_first_write_says_so(storage: LocalStorage, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(local_direct.ctypes, "CDLL", fallocate_fails_with(errno.ENOSPC))
    writer = storage.create("object", size_bytes=SIZE)
    with pytest.raises(StorageError, match="disk is full"):
        writer.write(content()[:PIECE])
    with pytest.raises(StorageError):
        writer.finish()


def test_room_that_is_set_aside_does_not_count_as_written(storage: LocalStorage) -> None:
    """A file that was cut off must not have the size that was voted for."""
    writer = storage.create("object", size_bytes=SIZE)
    writer.write(content()[:PIECE])
    assert storage.size("object") == PIECE
    writer.finish()
    assert storage.size("object") == PIECE


@pytest.mark.parametrize("order", [(0, 1, 2), (2, 1, 0), (1, 2, 0)])
def test_parts_may_be_written_in_any_order_by_any_thread(storage: LocalStorage, order: tuple[int, ...]) -> None:
    data = content()
    writer = storage.create("object", size_bytes=SIZE)
    for number in order:
        begin = number * 4 * PIECE
        work = functools.partial(writer.write_at, data[begin : begin + 4 * PIECE], begin)
        thread = threading.Thread(target=work)
        thread.start()
        thread.join()
    writer.finish()
    assert storage.read("object", limit_bytes=SIZE) == data


def test_two_parts_that_are_written_at_a_time_do_not_wait_for_the_size_of_the_file(storage: LocalStorage) -> None:
    """Two writes that make a file longer would wait for each other."""
    writer = storage.create("object", size_bytes=SIZE)
    writer.write_at(content()[:PIECE], 0)
    assert storage.size("object") == SIZE
    writer.finish()
    assert storage.size("object") == PIECE


@pytest.mark.parametrize("size_bytes", [0, SIZE])
def test_a_missing_part_is_noticed_before_the_file_counts_as_durable(storage: LocalStorage, size_bytes: int) -> None:
    writer = storage.create("object", size_bytes=size_bytes)
    writer.write_at(content()[:PIECE], 0)
    writer.write_at(content()[2 * PIECE :], 2 * PIECE)
    with pytest.raises(StorageError, match=f"expected {SIZE}; found {SIZE - PIECE}"):
        writer.finish()


def test_a_part_that_fails_leaves_the_file_open_for_the_thread_beside(
    storage: LocalStorage, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, found = os.pwrite, []

    def fails_at_0(descriptor: int, data: memoryview, offset: int) -> int:
        found.append(descriptor)
        if offset == 0:
            raise OSError(errno.EIO, "no")
        return real(descriptor, data, offset)

    monkeypatch.setattr(os, "pwrite", fails_at_0)
    writer = storage.create("object", size_bytes=SIZE)
    with pytest.raises(StorageError, match="device failed"):
        writer.write_at(content()[:PIECE], 0)
    (descriptor,) = found
    assert os.path.samestat(os.fstat(descriptor), os.stat(os.path.join(storage.url, "object")))
    with pytest.raises(StorageError):
        writer.write_at(content()[PIECE:], PIECE)
    writer.abandon()
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(descriptor)
    with pytest.raises(StorageError):
        writer.finish()


def test_a_failure_past_the_cache_is_final(storage: LocalStorage, monkeypatch: pytest.MonkeyPatch) -> None:
    writer = storage.create("object", size_bytes=SIZE)
    with monkeypatch.context() as patch:
        patch.setattr(os, "pwrite", failing)
        with pytest.raises(StorageError, match="device failed"):
            writer.write(content()[:PIECE])
    for call in (writer.finish, lambda: writer.write(content())):
        with pytest.raises(StorageError):
            call()


def failing(descriptor: int, data: memoryview, offset: int) -> int:
    raise OSError(errno.EIO, "no")


def fallocate_fails_with(number: int) -> Callable[..., Any]:
    class Library:
        def __init__(self, name: None, *, use_errno: bool) -> None:
            assert use_errno

        def fallocate(self, *arguments: object) -> int:
            local_direct.ctypes.set_errno(number)
            return -1

    return Library
