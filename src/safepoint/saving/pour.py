"""Pour: the one way in which the bytes of a data file reach the storage.

1. The file goes piece by piece. While one piece is filled and digested, those before it are written.
2. Each digest is taken from the memory that is written, before it is handed to the storage.

Spec: F3.10.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Protocol

import xxhash

from safepoint.format.digest import digest_bytes, running_digest
from safepoint.saving.conveyor import Conveyor
from safepoint.saving.form import FileForm
from safepoint.storage.base import ObjectWriter

# What was just copied is digested while it is still in the processor's cache.
_STEP_BYTES = 1 << 20


class Origin(Protocol):
    """Give the bytes of a data file from front to back."""

    @property
    def piece_bytes(self) -> int:
        """Return the size of a piece; the last one of a file is smaller."""

    @property
    def depth(self) -> int:
        """Return how many pieces stay as they are while the next one is filled."""

    def piece(self, begin: int, end: int) -> memoryview:
        """Return the memory of a piece of the file, which begins on a page."""

    def fill(self, view: memoryview) -> None:
        """Bring the next bytes of the file into this part of the piece, if they are not there."""

    def leave_boundary(self) -> None:
        """Return when the training may go on, beside the thread that fills; what optimizers own stays as it is."""

    def settle(self) -> None:
        """Return when all live memory may change."""

    def end(self) -> None:
        """Let go of whoever waits: nothing more is filled."""


@dataclass(slots=True)
class Spent:
    """Count what the thread that fills a file does with its time, in seconds.

    `copy_s` is for the next bytes to be there, `digest_s` for digests, `storage_s` for room among the pieces that are
    on their way, and at the end until all is durable.
    """

    copy_s: float = 0.0
    digest_s: float = 0.0
    storage_s: float = 0.0


def pour(
    writer: ObjectWriter,
    form: FileForm,
    origin: Origin,
    *,
    clock: Callable[[], float],
    spent: Spent,
    meanwhile: Callable[[list[str]], None] = lambda digests: None,
) -> list[str]:
    """Write a data file and make it durable; return the digests of its extents, the header's first.

    Args:
        writer: What writes it.
        form: What it looks like.
        origin: Where its bytes come from.
        clock: The seconds of a clock that never goes back.
        spent: What the time went to is added here.
        meanwhile: Called with the digests when all bytes were handed to the storage, and are on their way.

    Raises:
        StorageError: It could not be written or synced; the writer is abandoned.
        TornSnapshotError: The state changed while it was read.
    """
    digests = _Digests(form.extents)
    # A file of one piece has nothing to overlap with.
    depth = origin.depth if form.size_bytes > origin.piece_bytes else 0
    now = clock()
    with Conveyor(writer, depth=depth) as conveyor:
        for begin, end in pairwise(_bounds(form.size_bytes, origin.piece_bytes)):
            piece = origin.piece(begin, end)
            for start in range(0, len(piece), _STEP_BYTES):
                view = piece[start : start + _STEP_BYTES]
                origin.fill(view)
                filled = clock()
                digests.update(view)
                digested = clock()
                spent.copy_s += filled - now
                spent.digest_s += digested - filled
                now = digested
            conveyor.put(piece)
            put = clock()
            spent.storage_s += put - now
            now = put
        meanwhile(digests.found)
        now = clock()
    spent.storage_s += clock() - now
    return digests.found


def _bounds(size_bytes: int, piece_bytes: int) -> Iterator[int]:
    """Yield where the pieces of a file begin, and its end; the first of several goes in ever larger parts.

    The disk has nothing to do until it has a part.
    """
    yield 0
    bound = _STEP_BYTES
    while bound < piece_bytes < size_bytes:
        yield bound
        bound *= 2
    yield from range(piece_bytes, size_bytes, piece_bytes)
    yield size_bytes


class _Digests:
    """Take the digest of each extent of a file that is seen from front to back, in views that end anywhere."""

    def __init__(self, sizes: Sequence[int]) -> None:
        self.found: list[str] = []
        self._ends = list(accumulate(sizes))
        self._seen_bytes = 0
        # Of an extent that the last view ended in.
        self._begun: xxhash.xxh3_128 | None = None

    def update(self, view: memoryview) -> None:
        begin, first = self._seen_bytes, len(self.found)
        self._seen_bytes = begin + len(view)
        stop = bisect_right(self._ends, self._seen_bytes, first)
        ends = [end - begin for end in self._ends[first:stop]]
        starts = [0, *ends]
        if self._begun is not None:
            self._begun.update(view[: ends[0]] if ends else view)
            if not ends:
                return
            self.found.append(self._begun.hexdigest())
            self._begun = None
            del starts[0], ends[0]
        # Small ones are many in a view, and a loop over them would take longer than their digests.
        self.found += map(digest_bytes, map(view.__getitem__, map(slice, starts, ends)))
        if starts[-1] < len(view):
            self._begun = running_digest()
            self._begun.update(view[starts[-1] :])
