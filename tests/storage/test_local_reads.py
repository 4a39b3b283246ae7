"""Files that are read in runs: the bytes are those of the file, whichever way they come."""

from __future__ import annotations

import contextlib
import errno
import os
import random
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from safepoint.errors import CorruptionError, StorageError
from safepoint.storage import local_reads
from safepoint.storage.local import LocalStorage
from safepoint.storage.memory import MemoryStorage
from safepoint.storage.reading import aligned_buffer, opened

SIZE = 100_003
BUFFER = 16_384


class System:
    """Note whether reads were to pass by the cache, and what the cache was told to give up."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *, offers_direct: bool = True) -> None:
        self.passes: list[bool] = []
        self.given_up: list[tuple[int, int]] = []
        self._offers_direct = offers_direct
        self._pass_cache = local_reads.pass_cache
        monkeypatch.setattr(local_reads, "pass_cache", self.pass_cache)
        advise = os.posix_fadvise

        def noted(descriptor: int, offset: int, length: int, advice: int) -> None:
            if advice == os.POSIX_FADV_DONTNEED:
                self.given_up.append((offset, length))
            advise(descriptor, offset, length, advice)

        monkeypatch.setattr(os, "posix_fadvise", noted)

    def pass_cache(self, descriptor: int, *, is_on: bool) -> bool:
        self.passes.append(is_on)
        return self._offers_direct and self._pass_cache(descriptor, is_on=is_on)


@pytest.fixture
def content(chance: random.Random) -> bytes:
    return chance.randbytes(SIZE)


@pytest.fixture
def storage(tmp_path: Path, content: bytes) -> LocalStorage:
    return stored(tmp_path, content)


def stored(folder: Path, content: bytes) -> LocalStorage:
    storage = LocalStorage(folder)
    writer = storage.create("file")
    writer.write(memoryview(content))
    writer.finish()
    return storage


def cool(folder: Path) -> None:
    """Have the cache give up a file, which is synced."""
    descriptor = os.open(folder / "file", os.O_RDONLY)
    os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
    os.close(descriptor)


def filled(storage: LocalStorage | MemoryStorage, offset: int, sizes: Sequence[int], *, past: bool = False) -> bytes:
    """Fill parts of these sizes; check that their bytes are told in order, part by part, each once."""
    parts = [memoryview(bytearray(size)) for size in sizes]
    told = [bytearray() for _ in parts]
    with opened(storage, "file", aligned_buffer(BUFFER), is_past_cache=past) as reader:
        for number, piece in reader.fill(offset, parts):
            assert not any(told[number + 1 :])
            told[number] += piece
    assert told == [bytearray(part) for part in parts]
    return b"".join(told)


def cuts(chance: random.Random) -> tuple[int, list[int]]:
    """Return an offset and sizes of parts behind it, some of them empty."""
    offset = chance.choice([0, 1, 4095, 4096, 4097, chance.randrange(SIZE)])
    left, sizes = SIZE - offset, []
    for _ in range(chance.randint(1, 12)):
        sizes.append(min(left, chance.choice([0, 1, 511, 4096, 16_384, 16_385, chance.randrange(40_000)])))
        left -= sizes[-1]
    return offset, sizes


@pytest.mark.parametrize("way", ["warm", "cold", "past", "not offered", "past, not offered"])
def test_parts_of_any_size_hold_what_lies_in_the_file(
    way: str,
    storage: LocalStorage,
    tmp_path: Path,
    content: bytes,
    chance: random.Random,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    System(monkeypatch, offers_direct="not offered" not in way)
    for _ in range(20):
        if way == "cold":
            cool(tmp_path)
        offset, sizes = cuts(chance)
        found = filled(storage, offset, sizes, past="past" in way)
        assert found == content[offset : offset + sum(sizes)], (offset, sizes)


@pytest.mark.parametrize("missing", [(), (0,), (SIZE // 2,), (SIZE - 1,)])
def test_what_the_cache_holds_is_read_from_it_and_what_it_does_not_hold_past_it(
    missing: tuple[int, ...], storage: LocalStorage, content: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    system, preadv = System(monkeypatch), os.preadv

    def answering(descriptor: int, views: list[memoryview], offset: int, flags: int = 0) -> int:
        if flags == os.RWF_NOWAIT:
            if offset in missing:
                raise BlockingIOError(errno.EAGAIN, "not in the cache")
            return 1
        return preadv(descriptor, views, offset)

    monkeypatch.setattr(os, "preadv", answering)
    assert filled(storage, 0, [SIZE]) == content
    assert system.passes == ([True] if missing else [])


def test_a_reader_past_the_cache_never_asks_it(
    storage: LocalStorage, tmp_path: Path, content: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Spec: C8.4"""
    (tmp_path / "file").read_bytes()
    system = System(monkeypatch)
    assert filled(storage, 5, [100, 200], past=True) == content[5:305]
    assert system.passes == [True] and system.given_up == []


def test_where_reads_cannot_pass_by_the_cache_it_gives_the_range_up_first(
    storage: LocalStorage, content: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Spec: C8.4"""
    system = System(monkeypatch, offers_direct=False)
    assert filled(storage, 5, [100, 200], past=True) == content[5:305]
    assert system.given_up == [(5, 300)]
    assert filled(storage, 5, [100, 200]) == content[5:305]
    assert system.given_up == [(5, 300)]


def test_a_system_that_takes_the_flag_and_refuses_the_read_is_read_through_the_cache(
    storage: LocalStorage, content: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    system, preadv = System(monkeypatch), os.preadv

    def refusing(descriptor: int, views: list[memoryview], offset: int, flags: int = 0) -> int:
        if system.passes[-1:] == [True]:
            raise OSError(errno.EINVAL, "not aligned enough")
        return preadv(descriptor, views, offset, flags)

    monkeypatch.setattr(os, "preadv", refusing)
    assert filled(storage, 7, [50_000, 100], past=True) == content[7:50_107]
    assert system.passes == [True, False]
    assert system.given_up == [(0, BUFFER), (BUFFER, BUFFER), (2 * BUFFER, BUFFER), (3 * BUFFER, 50_107 - 3 * BUFFER)]


@pytest.mark.parametrize("way", ["warm", "past"])
def test_a_system_that_gives_less_than_it_was_asked_for_is_asked_again(
    way: str, storage: LocalStorage, content: bytes, chance: random.Random, monkeypatch: pytest.MonkeyPatch
) -> None:
    preadv = os.preadv

    def short(descriptor: int, views: list[memoryview], offset: int, flags: int = 0) -> int:
        # As the system does, at the end of a block where it reads blocks.
        return preadv(descriptor, [views[0][: 4096 if way == "past" else 777]], offset, flags)

    monkeypatch.setattr(os, "preadv", short)
    for _ in range(10):
        offset, sizes = cuts(chance)
        found = filled(storage, offset, sizes, past=way == "past")
        assert found == content[offset : offset + sum(sizes)], (offset, sizes)


def test_a_file_that_ends_too_early_is_damage_that_names_it(storage: LocalStorage, tmp_path: Path) -> None:
    with pytest.raises(CorruptionError, match=r"file.*at least 100004 bytes.*found 100003"):
        filled(storage, 3, [SIZE - 3, 1])


@pytest.mark.parametrize("past", [False, True])
def test_a_file_that_shrinks_while_it_is_read_is_damage(past: bool, storage: LocalStorage, tmp_path: Path) -> None:
    part = memoryview(bytearray(SIZE))
    with opened(storage, "file", aligned_buffer(BUFFER), is_past_cache=past) as reader:
        os.truncate(tmp_path / "file", 50_000)
        with pytest.raises(CorruptionError, match="ends too early"):
            list(reader.fill(0, [part]))


def test_a_failing_device_is_a_storage_error(storage: LocalStorage, monkeypatch: pytest.MonkeyPatch) -> None:
    def failing(*arguments: object) -> int:
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(os, "preadv", failing)
    for past in (False, True):
        with pytest.raises(StorageError, match="device failed") as caught:
            filled(storage, 0, [10], past=past)
        assert not isinstance(caught.value, CorruptionError)


@contextlib.contextmanager
def memory_folder() -> Iterator[Path]:
    if not os.access("/dev/shm", os.W_OK):
        pytest.skip("there is no file system in memory")
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
        yield Path(folder)


@pytest.mark.parametrize("past", [False, True])
def test_a_file_system_in_memory_is_read_too(past: bool, content: bytes) -> None:
    with memory_folder() as folder:
        assert filled(stored(folder, content), 9, [60_000, 7], past=past) == content[9:60_016]


def test_a_storage_without_a_way_of_its_own_is_read_part_by_part(content: bytes) -> None:
    storage = MemoryStorage()
    storage.make_root()
    storage.put("file", content)
    assert filled(storage, 9, [60_000, 0, 7]) == content[9:60_016]


def test_a_file_that_stays_open_is_asked_before_each_read_whether_the_cache_holds_it(
    storage: LocalStorage, content: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    cached = iter([False, True, True, False, False])
    passes: list[bool] = []

    def noted(_descriptor: int, *, is_on: bool) -> bool:
        passes.append(is_on)
        return is_on

    monkeypatch.setattr(local_reads, "is_cached", lambda *_place: next(cached))
    monkeypatch.setattr(local_reads, "pass_cache", noted)
    part = memoryview(bytearray(5000))
    with opened(storage, "file", aligned_buffer(BUFFER)) as reader:
        for offset, expected in [
            (3, [True]),
            (9000, [True, False]),
            (0, [True, False]),
            (70_000, [True, False, True]),
            (50_000, [True, False, True, False, True]),
        ]:
            list(reader.fill(offset, [part]))
            assert (part, passes) == (content[offset : offset + 5000], expected)
    assert next(cached, None) is None
