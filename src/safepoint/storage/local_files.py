"""Write to open files completely, and sync them to the device."""

from __future__ import annotations

import contextlib
import enum
import errno
import fcntl
import os
import sys
import threading

from safepoint.errors import RequestError, StorageError
from safepoint.storage.base import byte_view, check_line
from safepoint.storage.failures import storage_error, translated
from safepoint.storage.local_direct import begin_write_back, pass_cache, reserve, write_blocks

# Below this size the cache costs less than the system calls that avoid it.
_LARGE_BYTES = 8 << 20
# Below this size the device is done with a file before anybody could do anything else.
_TINY_BYTES = 64 << 10
_CLOSED = -1


class _State(enum.Enum):
    OPEN = "open"
    FAILED = "failed"
    CLOSED = "closed"


class LocalWriter:
    """Write one new file; it owns the descriptor.

    A large file gets its room at the first write, and its whole blocks pass by the cache while the system takes them.
    The rest, at least the last part of a block, goes through the cache. A small file goes through it whole, and the
    device begins with it once it is whole, for the caller may have something to do before it asks for the sync.
    """

    def __init__(self, descriptor: int, where: str, *, size_bytes: int = 0) -> None:
        self._descriptor = descriptor
        self._where = where
        self._state = _State.OPEN
        self._lock = threading.Lock()
        self._expected_bytes = size_bytes if size_bytes >= _LARGE_BYTES else 0
        self._hurried_bytes = size_bytes if _TINY_BYTES <= size_bytes < _LARGE_BYTES else 0
        self._passes_cache = False
        self._shown_bytes = 0
        # Where the furthest write ended, and how much was written in all.
        self._end = self._written_bytes = 0

    def write(self, data: memoryview) -> None:
        """Write all bytes behind what was written; a failure is final for this file."""
        self._require_open("write")
        try:
            self._write(data, self._end, shows_room=False)
        except BaseException:
            self._fail()
            raise

    def write_at(self, data: memoryview, offset_bytes: int) -> None:
        """Write all bytes at their place; see `safepoint.storage.base.Placing`."""
        self._require_open("write")
        try:
            self._write(data, offset_bytes, shows_room=True)
        except BaseException:
            # Another thread may be writing: were it closed now, its descriptor might be that of another file by then.
            self._state = _State.FAILED
            raise

    def finish(self) -> None:
        """Sync the file to the device and close it."""
        self._require_open("finish")
        try:
            with translated("sync", self._where):
                self._check_is_whole()
                sync_descriptor(self._descriptor)
        except BaseException:
            # The kernel may have dropped the pages and forgotten the error: a second sync would say yes to nothing.
            self._fail()
            raise
        self._state = _State.FAILED
        with translated("close", self._where):
            self._close()
        self._state = _State.CLOSED

    def abandon(self) -> None:
        """Close without a sync."""
        if self._state is _State.OPEN:
            self._state = _State.CLOSED
        with contextlib.suppress(OSError):
            self._close()

    def _write(self, data: memoryview, offset_bytes: int, *, shows_room: bool) -> None:
        view = byte_view(data)
        with translated("write", self._where):
            with self._lock:
                self._make_room(shows=shows_room)
            done = self._write_blocks(view, offset_bytes) if self._passes_cache else 0
            write_all_at(self._descriptor, view[done:], offset_bytes + done)
            if 0 < self._hurried_bytes == self._written_bytes + len(view):
                begin_write_back(self._descriptor)
        with self._lock:
            self._end = max(self._end, offset_bytes + len(view))
            self._written_bytes += len(view)

    def _make_room(self, *, shows: bool) -> None:
        size_bytes, self._expected_bytes = self._expected_bytes, 0
        if size_bytes:
            self._shown_bytes = size_bytes if shows else 0
            reserve(self._descriptor, size_bytes, shows=shows)
            self._passes_cache = pass_cache(self._descriptor, is_on=True)

    def _write_blocks(self, view: memoryview, offset_bytes: int) -> int:
        written_bytes = write_blocks(self._descriptor, view, offset_bytes)
        if written_bytes < len(view):
            # What is left does not end a block, or does not suit; nothing after it begins one.
            self._passes_cache = pass_cache(self._descriptor, is_on=False)
        return written_bytes

    def _check_is_whole(self) -> None:
        """Have the file end where the furthest write did, and raise `StorageError` where there is a gap before that."""
        if self._written_bytes != self._end:
            raise StorageError(
                "a part of an object was not written", where=self._where, expected=self._end, found=self._written_bytes
            )
        if self._shown_bytes > self._end:
            os.ftruncate(self._descriptor, self._end)

    def _fail(self) -> None:
        self._state = _State.FAILED
        with contextlib.suppress(OSError):
            self._close()

    def _close(self) -> None:
        descriptor, self._descriptor = self._descriptor, _CLOSED
        if descriptor != _CLOSED:
            os.close(descriptor)

    def _require_open(self, doing: str) -> None:
        if self._state is _State.FAILED:
            raise storage_error(errno.EIO, doing=f"{doing} after an earlier failure", where=self._where)
        if self._state is _State.CLOSED:
            raise RequestError(f"could not {doing}: the writer is closed", where=self._where)


class LocalAppender:
    """Keep lines at the end of a file; it owns the descriptor, which is readable and writable."""

    def __init__(self, descriptor: int, where: str) -> None:
        self._descriptor = descriptor
        self._where = where
        self._last_offset: int | None = None
        self._is_open = True
        try:
            with translated("append", where):
                self._end = os.fstat(descriptor).st_size
                if self._end and os.pread(descriptor, 1, self._end - 1) != b"\n":
                    self._end += write_all_at(descriptor, b"\n", self._end)
        except BaseException:
            self.close()
            raise

    def append(self, line: bytes) -> None:
        """Write a line at the end."""
        self._write(line, self._end)
        self._last_offset = None

    def replace_last(self, line: bytes) -> None:
        """Write a line over the one that this method wrote before."""
        offset = self._end if self._last_offset is None else self._last_offset
        self._write(line, offset)
        self._last_offset = offset

    def close(self) -> None:
        """Close the file."""
        if self._is_open:
            self._is_open = False
            with contextlib.suppress(OSError):
                os.close(self._descriptor)

    def _write(self, line: bytes, offset: int) -> None:
        check_line(line)
        if not self._is_open:
            raise RequestError("could not append: the file is closed", where=self._where)
        with translated("append", self._where):
            if offset + len(line) + 1 < self._end:
                # Cut before writing: if we die in between, a line is missing, instead of rubbish behind a whole one.
                os.ftruncate(self._descriptor, offset)
            self._end = offset + write_all_at(self._descriptor, line + b"\n", offset)


def write_all(descriptor: int, data: memoryview) -> None:
    """Write all of `data` at the file's position; raises `OSError` if the system takes no more."""
    written_bytes = 0
    while written_bytes < len(data):
        count = os.write(descriptor, data[written_bytes:])
        if count == 0:
            raise OSError(errno.EIO, "the system took no bytes")
        written_bytes += count


def write_all_at(descriptor: int, data: bytes | memoryview, offset_bytes: int) -> int:
    """Write all of `data` at an offset and return its length; raises `OSError` if the system takes no more."""
    written_bytes = 0
    while written_bytes < len(data):
        count = os.pwrite(descriptor, data[written_bytes:], offset_bytes + written_bytes)
        if count == 0:
            raise OSError(errno.EIO, "the system took no bytes")
        written_bytes += count
    return written_bytes


def sync_descriptor(descriptor: int) -> None:
    """Make a file's bytes, or a folder's names, durable on the device; raises `OSError`."""
    if sys.platform == "darwin":
        # There fsync stops at the drive's cache. Network file systems refuse the stronger call.
        try:
            fcntl.fcntl(descriptor, fcntl.F_FULLFSYNC)
            return
        except OSError as exc:
            if exc.errno not in (errno.ENOTSUP, errno.EINVAL, errno.ENOTTY):
                raise
    os.fsync(descriptor)
