"""Reading an object in runs of bytes, each piece handed on as it arrives.

A storage may offer a way of its own (`Streaming`). Any other one is read through `Storage.read_into`.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Generator, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from safepoint.storage.aligned import aligned_memory
from safepoint.storage.base import Storage


class ObjectReader(Protocol):
    """Read one object that is open, for one thread at a time."""

    def fill(self, offset_bytes: int, parts: Sequence[memoryview]) -> Iterator[tuple[int, memoryview]]:
        """Fill parts that follow each other in the object, the first from an offset on, while the result is iterated.

        Yields (number of the part, the bytes of it that have arrived), in order and without a gap; each is a view of
        the part's own memory, small enough to be looked at while a processor's cache holds it, where that can be had.

        Raises:
            CorruptionError: The object ends too early.
            StorageError: It cannot be read.
        """


@runtime_checkable
class Streaming(Protocol):
    """A storage that can read an object in runs of bytes, by several threads at once."""

    def opened(
        self, path: str, buffer: memoryview, *, is_past_cache: bool = False
    ) -> AbstractContextManager[ObjectReader]:
        """Open an object for reading.

        Args:
            path: The object.
            buffer: Memory of `aligned_buffer`, which is the reader's as long as the object is open.
            is_past_cache: Ask the medium, not the memory of the system, as far as it lets itself be asked.
        """


@runtime_checkable
class Foreseeing(Protocol):
    """A storage that can be told what will be read soon."""

    def foresee(self, path: str, step_bytes: int) -> Generator[int, None, None]:
        """Bring an object near, step by step: each time yield where the step will end, then take it.

        A step waits until its bytes are near. Whatever it does, what is read later is the same. Whoever goes no further
        closes the iterator.

        Raises:
            CorruptionError: What stands there is no object.
            StorageError: It cannot be opened.
        """


@dataclass(frozen=True, slots=True)
class PlainReader:
    """Read an object through the verb that every storage has."""

    storage: Storage
    path: str

    def fill(self, offset_bytes: int, parts: Sequence[memoryview]) -> Iterator[tuple[int, memoryview]]:
        """Read each part with one call."""
        for number, part in enumerate(parts):
            self.storage.read_into(self.path, offset_bytes, part)
            offset_bytes += len(part)
            yield number, part


class Desk:
    """Hold memory to read with, and the object open that was read from last, for one thread at a time.

    To open a file takes ten calls to the system, after each of which a thread may have to wait for the interpreter.

    Args:
        storage: Where the objects lie.
        buffer_bytes: How much memory.
    """

    def __init__(self, storage: Storage, buffer_bytes: int) -> None:
        self._storage = storage
        self._buffer = aligned_buffer(buffer_bytes)
        self._open: tuple[str, ObjectReader] | None = None
        self._stack = ExitStack()

    def reader_of(self, path: str) -> ObjectReader:
        """Return what reads an object, good until another one is asked for; see `Streaming.opened`."""
        if self._open is None or self._open[0] != path:
            self.close()
            self._open = path, self._stack.enter_context(opened(self._storage, path, self._buffer))
        return self._open[1]

    def close(self) -> None:
        """Close what is open."""
        self._open = None
        self._stack.close()


@contextmanager
def desks(storage: Storage, count: int, buffer_bytes: int) -> Iterator[deque[Desk]]:
    """Give so many desks, and close them when the block ends; nobody may be using one then."""
    made = [Desk(storage, buffer_bytes) for _ in range(count)]
    with ExitStack() as stack:
        for desk in made:
            stack.callback(desk.close)
        yield deque(made)


def opened(
    storage: Storage, path: str, buffer: memoryview, *, is_past_cache: bool = False
) -> AbstractContextManager[ObjectReader]:
    """Open an object in the storage's own way, where it has one; see `Streaming.opened`."""
    if isinstance(storage, Streaming):
        return storage.opened(path, buffer, is_past_cache=is_past_cache)
    return nullcontext(PlainReader(storage, path))


def aligned_buffer(size_bytes: int) -> memoryview:
    """Return fresh memory as reading past the cache needs it."""
    return memoryview(aligned_memory(size_bytes))
