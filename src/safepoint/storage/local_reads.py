"""Read a file at the disk's rate when it is cold, and at the memory's when it is warm.

1. What the system's cache holds is read in place. What it does not hold is read past it into a buffer, and copied from
   there: that costs less than to let the cache take it up first.
2. Support is tried, never assumed: where one of the two is not offered, the other one is taken.

numpy is imported when it is first needed.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator, Sequence

from safepoint.errors import CorruptionError
from safepoint.storage.failures import translated_for_reader
from safepoint.storage.local_direct import BLOCK_BYTES, pass_cache

# What is copied and looked at in one go: small enough for a processor's cache, large enough for the price of a call.
_STEP_BYTES = 1 << 20
# A single read is kept below what every system takes in one call.
_LARGEST_READ_BYTES = 1 << 30
# The system takes no more buffers in one call (IOV_MAX).
_MOST_VIEWS = 1024
# Below this size a copy is done before another thread could take over the interpreter.
_SMALL_BYTES = 1 << 16

_WITHOUT_WAITING = getattr(os, "RWF_NOWAIT", 0)
_NOT_CACHED = frozenset({errno.EAGAIN, errno.EOPNOTSUPP, errno.ENOTSUP, errno.EINVAL})

Piece = tuple[int, memoryview]


class LocalReader:
    """Read one open file.

    Args:
        descriptor: The file. Whether its reads pass by the cache is this reader's to set.
        size_bytes: Its size.
        buffer: Memory of whole blocks that begins on a block's line; what passes by the cache arrives there.
        where: Its name for messages.
        is_past_cache: Never answer from the cache, as far as the system lets itself be asked.
    """

    def __init__(
        self, descriptor: int, size_bytes: int, buffer: memoryview, where: str, *, is_past_cache: bool = False
    ) -> None:
        self._descriptor = descriptor
        self._size_bytes = size_bytes
        self._buffer = buffer
        self._where = where
        self._is_past_cache = is_past_cache
        self._passes_cache = False

    def fill(self, offset_bytes: int, parts: Sequence[memoryview]) -> Iterator[Piece]:
        """Fill the parts; see `safepoint.storage.reading.ObjectReader`."""
        size_bytes = sum(map(len, parts))
        if offset_bytes + size_bytes > self._size_bytes:
            raise self._ended(offset_bytes + size_bytes)
        with translated_for_reader("read", self._where):
            if self._passes_cache and not self._is_past_cache:
                # The cache, which may hold this, cannot be asked while reads pass by it.
                self._passes_cache = pass_cache(self._descriptor, is_on=False)
            if not self._passes_cache and (
                self._is_past_cache or not is_cached(self._descriptor, offset_bytes, size_bytes)
            ):
                self._passes_cache = pass_cache(self._descriptor, is_on=True)
            if self._passes_cache:
                yield from self._through_buffer(offset_bytes, parts)
            else:
                self._empty_cache(offset_bytes, size_bytes)
                yield from self._in_place(offset_bytes, parts)

    def _empty_cache(self, offset_bytes: int, size_bytes: int) -> None:
        """Have the cache give up a range, where it is not to answer and cannot be passed by."""
        if self._is_past_cache and hasattr(os, "posix_fadvise"):
            os.posix_fadvise(self._descriptor, offset_bytes, size_bytes, os.POSIX_FADV_DONTNEED)

    def _in_place(self, offset_bytes: int, parts: Sequence[memoryview]) -> Iterator[Piece]:
        for group in _groups(parts, _STEP_BYTES, _STEP_BYTES, most_views=_MOST_VIEWS):
            views = [view for _, view in group]
            size_bytes = sum(map(len, views))
            self._read(views, offset_bytes, size_bytes)
            offset_bytes += size_bytes
            yield from group

    def _through_buffer(self, offset_bytes: int, parts: Sequence[memoryview]) -> Iterator[Piece]:
        skipped = offset_bytes % BLOCK_BYTES
        for group in _groups(parts, len(self._buffer) - skipped, len(self._buffer)):
            needed_bytes = skipped + sum(len(view) for _, view in group)
            self._read_blocks(offset_bytes - skipped, needed_bytes)
            offset_bytes += needed_bytes - skipped
            begin, skipped = skipped, 0
            for number, view in group:
                for start in range(0, len(view), _STEP_BYTES):
                    piece = view[start : start + _STEP_BYTES]
                    _copy(self._buffer[begin : begin + len(piece)], piece)
                    begin += len(piece)
                    yield number, piece

    def _read_blocks(self, offset_bytes: int, needed_bytes: int) -> None:
        """Read whole blocks into the buffer, so many that they hold the needed bytes; the file may end in the last."""
        blocks = self._buffer[: -(-needed_bytes // BLOCK_BYTES) * BLOCK_BYTES]
        if not self._passes_cache:
            self._empty_cache(offset_bytes, needed_bytes)
        try:
            self._read([blocks], offset_bytes, needed_bytes)
        except OSError as exc:
            if exc.errno != errno.EINVAL:
                raise
            # The system took the flag, and does not offer what it means for this file or these blocks.
            self._passes_cache = pass_cache(self._descriptor, is_on=False)
            self._empty_cache(offset_bytes, needed_bytes)
            self._read([blocks], offset_bytes, needed_bytes)

    def _read(self, views: list[memoryview], offset_bytes: int, needed_bytes: int) -> None:
        """Fill views that follow each other, at least with as many bytes as are needed."""
        filled_bytes = 0
        while filled_bytes < needed_bytes:
            count = os.preadv(self._descriptor, views, offset_bytes + filled_bytes)
            if count == 0:
                raise self._ended(offset_bytes + needed_bytes)
            filled_bytes += count
            views = _behind(views, count)

    def _ended(self, needed_bytes: int) -> CorruptionError:
        return CorruptionError(
            "an object ends too early",
            where=self._where,
            expected=f"at least {needed_bytes} bytes",
            found=f"{self._size_bytes} bytes",
        )


def read_whole(descriptor: int, size_bytes: int) -> bytes:
    """Return so many bytes from the begin of a file, or fewer where it ends before; not copied where one read suffices.

    For a large object, a copy into memory that is new takes longer than to decode a good part of it.
    """
    pieces: list[bytes] = []
    left_bytes = size_bytes
    while left_bytes > 0:
        piece = os.pread(descriptor, min(left_bytes, _LARGEST_READ_BYTES), size_bytes - left_bytes)
        if not piece:
            break
        pieces.append(piece)
        left_bytes -= len(piece)
    return b"".join(pieces)


def fill_from(descriptor: int, view: memoryview, offset_bytes: int) -> int:
    """Fill a view from a range of a file, and return its size, or a smaller one where the file ends before."""
    filled_bytes = 0
    while filled_bytes < len(view):
        piece = view[filled_bytes : filled_bytes + _LARGEST_READ_BYTES]
        count = os.preadv(descriptor, [piece], offset_bytes + filled_bytes)
        if count == 0:
            break
        filled_bytes += count
    return filled_bytes


def bring_near(descriptor: int, offset_bytes: int, size_bytes: int) -> None:
    """Have the system's cache take up a range of a file, and wait for that; what it holds is left alone.

    The bytes are read, and thrown away: the system takes an advice to read ahead for a few of them only.
    """
    # After each question to the system the interpreter may be long away: one byte answers for all.
    if size_bytes <= 0 or is_cached(descriptor, offset_bytes + size_bytes - 1, 1):
        return
    # One call for all of it, into the same memory again and again: between two calls the interpreter may be long away.
    thrown_away = memoryview(bytearray(min(size_bytes, _STEP_BYTES)))
    end_bytes = offset_bytes + size_bytes
    while offset_bytes < end_bytes:
        times, rest = divmod(end_bytes - offset_bytes, len(thrown_away))
        count = os.preadv(descriptor, [thrown_away] * min(times, _MOST_VIEWS) or [thrown_away[:rest]], offset_bytes)
        if count == 0:
            return
        offset_bytes += count


def is_cached(descriptor: int, offset_bytes: int, size_bytes: int) -> bool:
    """Return whether the cache has the first, the middle and the last byte; False where it cannot be asked."""
    try:
        for place in sorted({0, size_bytes // 2, max(size_bytes, 1) - 1}):
            os.preadv(descriptor, [bytearray(1)], offset_bytes + place, _WITHOUT_WAITING)
    except OSError as exc:
        if exc.errno in _NOT_CACHED:
            return False
        raise
    return True


def _groups(
    parts: Sequence[memoryview], first_bytes: int, most_bytes: int, *, most_views: int = 1 << 62
) -> Iterator[list[Piece]]:
    """Yield the parts' bytes in groups for one call each; of the first group `first_bytes` is the limit."""
    group: list[Piece] = []
    room = first_bytes
    for number, part in enumerate(parts):
        begin, length = 0, len(part)
        while begin < length:
            view = part if begin == 0 and length <= room else part[begin : begin + room]
            group.append((number, view))
            begin += len(view)
            room -= len(view)
            if room == 0 or len(group) == most_views:
                yield group
                group, room = [], most_bytes
    if group:
        yield group


def _behind(views: list[memoryview], count: int) -> list[memoryview]:
    """Return what is left of views when so many bytes have been taken off their begin."""
    for number, view in enumerate(views):
        if count < len(view):
            return [view[count:], *views[number + 1 :]]
        count -= len(view)
    return []


def _copy(source: memoryview, target: memoryview) -> None:
    if len(source) < _SMALL_BYTES:
        target[:] = source
    else:
        # An assignment of views would keep other threads waiting for the interpreter.
        import numpy

        numpy.copyto(numpy.frombuffer(target, dtype=numpy.uint8), numpy.frombuffer(source, dtype=numpy.uint8))
