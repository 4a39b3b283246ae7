"""Desks: an object stays open from one read of it to the next, and none is open afterwards."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import pytest

from safepoint.storage.memory import MemoryStorage
from safepoint.storage.reading import ObjectReader, PlainReader, Streaming, desks


class Noting(MemoryStorage):
    """Note what is opened and closed."""

    def __init__(self) -> None:
        super().__init__()
        self.noted: list[str] = []
        self.buffers: list[memoryview] = []

    @contextlib.contextmanager
    def opened(self, path: str, buffer: memoryview, *, is_past_cache: bool = False) -> Iterator[ObjectReader]:
        if path == "absent":
            raise FileNotFoundError(path)
        self.noted.append(f"open {path}")
        self.buffers.append(buffer)
        yield PlainReader(self, path)
        self.noted.append(f"close {path}")


def test_an_object_is_opened_again_only_after_another_one() -> None:
    storage = Noting()
    assert isinstance(storage, Streaming)
    with desks(storage, 1, 4096) as free:
        for path in ("a", "a", "b", "b", "a"):
            reader = free[0].reader_of(path)
            assert isinstance(reader, PlainReader)
            assert reader.path == path
        assert storage.noted == ["open a", "close a", "open b", "close b", "open a"]
    assert storage.noted[5:] == ["close a"]
    assert set(map(len, storage.buffers)) == {4096}


def test_each_desk_has_memory_and_an_open_object_of_its_own() -> None:
    storage = Noting()
    with desks(storage, 2, 4096) as free:
        for desk in free:
            desk.reader_of("a")
        first, second = storage.buffers
        first[:5], second[:5] = b"first", b"other"
        assert bytes(first[:5]) == b"first"
    assert sorted(storage.noted) == ["close a", "close a", "open a", "open a"]


def test_what_is_open_is_closed_when_the_block_fails() -> None:
    storage = Noting()
    with pytest.raises(KeyError), desks(storage, 2, 4096) as free:
        free.popleft().reader_of("a")
        raise KeyError
    assert storage.noted == ["open a", "close a"]


def test_an_object_that_cannot_be_opened_leaves_none_open() -> None:
    storage = Noting()
    with desks(storage, 1, 4096) as free:
        free[0].reader_of("a")
        with pytest.raises(FileNotFoundError):
            free[0].reader_of("absent")
        assert storage.noted == ["open a", "close a"]
        free[0].reader_of("a")
    assert storage.noted == ["open a", "close a", "open a", "close a"]
