"""Landing: two pieces of host memory through which a large box comes from an accelerator, some rows at a time.

While one piece is read, the next rows are on their way to the other.
"""

from __future__ import annotations

import mmap
from collections.abc import Callable, Iterator

from safepoint.saving.form import ALIGNMENT_BYTES, Entry
from safepoint.state.far import Carrier, Trip, pinned
from safepoint.state.item import Divisible, Source
from safepoint.storage.aligned import paged_memory

_PIECE_BYTES = 8 << 20


class Landing:
    """Keep the pieces, which are made when they are first needed; owned by one save at a time.

    Args:
        piece_bytes: The size of each; a single row may take more.
    """

    def __init__(self, *, piece_bytes: int = _PIECE_BYTES) -> None:
        self._piece_bytes = piece_bytes
        self._memory: mmap.mmap | None = None
        self._unpin: Callable[[], object] = lambda: None

    def parts(self, entry: Entry, source: Source, carrier: Carrier) -> Iterator[memoryview]:
        """Yield the bytes of a box from front to back; each part is read before the next one is asked for.

        Raises:
            TornSnapshotError: It was written to since the boundary.
        """
        under_way: tuple[Trip, memoryview] | None = None
        for turn, (part, size_bytes) in enumerate(self._cut(entry, source)):
            memory = self._piece(turn % 2, size_bytes, entry, carrier)
            following = carrier.fetch([part], memory, [0]), memory
            if under_way is not None:
                yield _arrived(*under_way)
            under_way = following
        if under_way is not None:
            yield _arrived(*under_way)
        source.check()

    def _cut(self, entry: Entry, source: Source) -> Iterator[tuple[Source, int]]:
        """Yield the parts of a source, with their sizes."""
        row_bytes, count = entry.box.row_bytes, entry.box.row_count
        if not isinstance(source, Divisible) or entry.size_bytes <= self._piece_bytes:
            yield source, entry.size_bytes
            return
        step = max(1, self._piece_bytes // row_bytes)
        for start in range(0, count, step):
            stop = min(start + step, count)
            yield source.rows(start, stop), (stop - start) * row_bytes

    def _piece(self, number: int, size_bytes: int, entry: Entry, carrier: Carrier) -> memoryview:
        """Return a piece; both are made anew where a row of this box is larger: nothing is on its way to them then."""
        widest = max(self._piece_bytes, entry.box.row_bytes if entry.box.shape else 0, size_bytes)
        each = -(-widest // ALIGNMENT_BYTES) * ALIGNMENT_BYTES
        if self._memory is None or len(self._memory) < 2 * each:
            self._unpin()
            self._memory = None
            self._memory = paged_memory(2 * each)
            self._unpin = pinned(self, carrier, memoryview(self._memory))
        begin = number * (len(self._memory) // 2)
        return memoryview(self._memory)[begin : begin + size_bytes]


def _arrived(trip: Trip, memory: memoryview) -> memoryview:
    trip.wait()
    return memory
