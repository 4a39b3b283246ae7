"""Write past the system's cache or hurry it, and set room for a file aside.

1. Support is tried, never assumed: where a file system refuses, the file is written like any other.
2. Room that is set aside does not show in a file's size, unless that is asked for: writes within a file's size can be
   under way at the same time, those that make it longer wait for each other.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import os
import sys

# What the system takes past its cache begins and ends on such a line, in memory and in the file.
BLOCK_BYTES = 4096

_KEEP_SIZE = 1
_BEGIN_WRITE = 2
_UNSUPPORTED = frozenset({errno.EOPNOTSUPP, errno.ENOTSUP, errno.ENOSYS, errno.EINVAL, errno.ENODEV, errno.EPERM})
_sync_range = getattr(ctypes.CDLL(None, use_errno=True), "sync_file_range", None)


def reserve(descriptor: int, size_bytes: int, *, shows: bool) -> None:
    """Set room aside for a file that is still empty; do nothing where the file system cannot.

    With `shows` the file has this size from then on, and reads as zeroes. Raises `OSError` where there is not so much
    room. `posix_fallocate` will not do: where there is no such call, it writes a byte into every block.
    """
    call = getattr(ctypes.CDLL(None, use_errno=True), "fallocate", None) if sys.platform == "linux" else None
    if call is None:
        return
    if call(descriptor, 0 if shows else _KEEP_SIZE, ctypes.c_int64(0), ctypes.c_int64(size_bytes)) != 0:
        number = ctypes.get_errno()
        if number not in _UNSUPPORTED:
            raise OSError(number, os.strerror(number))


def pass_cache(descriptor: int, *, is_on: bool) -> bool:
    """Let what is written to an open file pass by the cache, or not; return whether it does."""
    flag = getattr(os, "O_DIRECT", 0)
    if not flag:
        return False
    flags = fcntl.fcntl(descriptor, fcntl.F_GETFL)
    with contextlib.suppress(OSError):
        fcntl.fcntl(descriptor, fcntl.F_SETFL, flags | flag if is_on else flags & ~flag)
        return is_on
    return False


def begin_write_back(descriptor: int) -> None:
    """Have the device begin with what the cache holds of a file, and return; do nothing where that cannot be asked.

    Nothing is durable by that. Raises `OSError` where some of it cannot be written.
    """
    if _sync_range is None or _sync_range(descriptor, ctypes.c_int64(0), ctypes.c_int64(0), _BEGIN_WRITE) == 0:
        return
    number = ctypes.get_errno()
    if number not in _UNSUPPORTED | {errno.ESPIPE}:
        raise OSError(number, os.strerror(number))


def write_blocks(descriptor: int, data: memoryview, offset_bytes: int) -> int:
    """Write whole blocks past the cache, as many as the system takes; return how many bytes that was.

    Fewer than the whole blocks of `data` are taken where memory or file do not suit. Raises `OSError`.
    """
    end = len(data) - len(data) % BLOCK_BYTES
    written_bytes = 0
    while written_bytes < end:
        try:
            count = os.pwrite(descriptor, data[written_bytes:end], offset_bytes + written_bytes)
        except OSError as exc:
            if exc.errno == errno.EINVAL:
                break
            raise
        if count == 0:
            raise OSError(errno.EIO, "the system took no bytes")
        written_bytes += count
    return written_bytes
