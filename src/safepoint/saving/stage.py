"""Stage: give the state memory of our own, laid out as the data file will lie on disk.

1. What lies in the image of a file is written from there, and never copied again.
2. One buffer serves all saves of a manager: it grows to the largest file and is used again.

Spec: F3.
"""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import threading
from collections.abc import Callable

from safepoint.errors import StorageError
from safepoint.saving.crossing import Copier
from safepoint.saving.form import ALIGNMENT_BYTES
from safepoint.saving.transfer import address_of
from safepoint.state.far import Carrier, pinned
from safepoint.storage.aligned import paged_memory

# MADV_POPULATE_WRITE, since Linux 5.14.
_POPULATE_WRITE = 23
_TOUCHED_BYTES = 8 << 20
# Less memory than this costs the first save nothing that is noticed.
_SPARE_BYTES = 32 << 20


class StagingBuffer:
    """Keep page-aligned memory that grows to what is asked for and is reused; owned by one save at a time.

    `turn` counts the uses.
    """

    def __init__(self) -> None:
        self._memory: mmap.mmap | None = None
        self._pinned_bytes = 0
        self._unpin: Callable[[], object] = lambda: None
        self.turn = 0

    def view(self, size_bytes: int, carrier: Carrier | None = None) -> memoryview:
        """Return writable memory of this size; its former content is void.

        Args:
            size_bytes: How much is wanted.
            carrier: What will bring bytes into it from accelerators, if any will come from there.

        Raises:
            StorageError: The system gives no such memory.
        """
        self.turn += 1
        if self._memory is None or len(self._memory) < size_bytes:
            self._end_pinning()
            # The smaller one is let go first, so that there are never two.
            self._memory = None
            self._memory = paged_memory(max(size_bytes, ALIGNMENT_BYTES))
        view = memoryview(self._memory)[:size_bytes]
        if carrier is not None and size_bytes > self._pinned_bytes:
            self._end_pinning()
            # Whether it was granted or not: to ask for much memory takes a second.
            self._unpin, self._pinned_bytes = pinned(self, carrier, view), size_bytes
        return view

    def prepare(self, size_bytes: int) -> None:
        """Have the system give so much memory, in a thread: the first save then finds pages that are there.

        Does nothing once there is any, or where the system gives none: the save asks for what it needs.
        """
        if self._memory is not None or size_bytes < _SPARE_BYTES:
            return
        # The file holds more than could be counted. What is never written to takes no memory.
        with contextlib.suppress(StorageError):
            self._memory = paged_memory(size_bytes + size_bytes // 2)
        if self._memory is None:
            return
        # What is not there by the time of the first copy, the copy asks for itself.
        thread = threading.Thread(target=_touch, args=(self._memory, size_bytes), name="safepoint-touch", daemon=True)
        with contextlib.suppress(RuntimeError):
            thread.start()

    def _end_pinning(self) -> None:
        self._unpin()
        self._unpin, self._pinned_bytes = lambda: None, 0


class ImageOrigin:
    """Give the bytes of a data file from its image in memory, as they get there.

    Args:
        image: The whole file.
        copying: What brings the state into it.
        piece_bytes: How much is written at once.
    """

    def __init__(self, image: memoryview, copying: Copier, *, piece_bytes: int) -> None:
        self.piece_bytes = piece_bytes
        self._image = image
        self._copying = copying
        self._end = 0

    @property
    def depth(self) -> int:
        """Return the number of pieces: the copy never waits for the disk."""
        return -(-len(self._image) // self.piece_bytes)

    def piece(self, begin: int, end: int) -> memoryview:
        """Return a part of the image."""
        return self._image[begin:end]

    def fill(self, view: memoryview) -> None:
        """Have the next bytes copied, if they are not there.

        Raises:
            TornSnapshotError: The state changed before it was copied.
        """
        self._end += len(view)
        self._copying.advance(self._end)

    def leave_boundary(self) -> None:
        """Return at once: what must not wait was copied before the image was given."""

    def settle(self) -> None:
        """Help to copy what is left, and wait for it."""
        self._copying.settle()

    def end(self) -> None:
        """Let go of whoever waits for the copy."""
        self._copying.end()


def _touch(memory: mmap.mmap, end: int) -> None:
    """Have the system give all pages. No byte is written, so a save may use the memory meanwhile."""
    madvise = ctypes.CDLL(None).madvise
    base = address_of(memoryview(memory))
    for begin in range(0, end, _TOUCHED_BYTES):
        size = min(_TOUCHED_BYTES, end - begin)
        # A system that knows no such request answers so, and gives pages when they are first written to.
        if madvise(ctypes.c_void_p(base + begin), ctypes.c_size_t(size), _POPULATE_WRITE) != 0:
            return
