"""Memory that a disk writes from and reads into without the system's cache.

A device is handed memory as stretches that lie in one piece in the machine, of which one request takes a few hundred.
Where pages are small and lie anywhere, 8 MiB are many requests; where they are huge, it is one or a few.
"""

from __future__ import annotations

import contextlib
import mmap
import sys

from safepoint.errors import StorageError

_HUGE_PAGES = getattr(mmap, "MADV_HUGEPAGE", None)
# MADV_WIPEONFORK, since Linux 4.14.
_WIPE_ON_FORK = 18 if sys.platform == "linux" else None


def aligned_memory(size_bytes: int) -> mmap.mmap:
    """Return fresh memory that begins on a page, of huge pages as far as the system has them to give.

    A child that is forked off finds zeroes there. If it had the content, each page would be copied when it is next
    written to here, into a small one.

    Raises:
        StorageError: The system gives no such memory.
    """
    # Of memory that processes share, huge pages are given only where whoever runs the system has asked for it.
    memory = paged_memory(size_bytes, is_shared=False)
    for advice in (_HUGE_PAGES, _WIPE_ON_FORK):
        # A system that does not know the advice says so, and the memory serves all the same.
        with contextlib.suppress(OSError):
            if advice is not None:
                memory.madvise(advice)
    return memory


def paged_memory(size_bytes: int, *, is_shared: bool = True) -> mmap.mmap:
    """Return fresh memory that begins on a page, shared with children or not.

    Raises:
        StorageError: The system gives no such memory.
    """
    flags = mmap.MAP_ANONYMOUS | (mmap.MAP_SHARED if is_shared else mmap.MAP_PRIVATE)
    try:
        return mmap.mmap(-1, size_bytes, flags=flags)
    except OSError as exc:
        raise StorageError(
            "there is no memory to write from or to read into",
            where="memory of this process",
            expected=f"{size_bytes} bytes",
            found=exc.strerror,
            remedy="Free memory of this machine, or raise the limit of this process (`ulimit -v`).",
            errno=exc.errno,
            retryable=True,
        ) from exc
