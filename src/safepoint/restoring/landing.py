"""Landing: the way of stored bytes to targets on accelerators, through a few pieces of host memory.

1. A run is read into a piece and digested there. What has matched goes on to the device, on a stream beside those of
   the training, while the next run is read.
2. A piece is used again when the device has read it.
3. When this is left, nothing is on its way any more, and all that was sent has arrived.
"""

from __future__ import annotations

import mmap
import queue
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import chain
from operator import attrgetter
from types import TracebackType

from safepoint.restoring.arrival import MOST_RANGES
from safepoint.restoring.live import are_in_place
from safepoint.restoring.plan import TensorRead
from safepoint.restoring.runs import RUN_BYTES, Batch, Run
from safepoint.state.far import Carrier, Trip, far_targets, pinned
from safepoint.state.item import is_temporary
from safepoint.storage.aligned import paged_memory

# Two for each thread that reads: one is filled while the device reads the other.
_PIECES = 4

_BOXES, _TARGET = attrgetter("targets"), attrgetter("target")


class Landing:
    """Hold what is read to accelerators, and the pieces of memory on the way; to be used in a ``with`` block.

    Args:
        reads: Tensors, each with one target that lies on an accelerator.
        others: What else is to be read.
        carrier: What brings bytes to the accelerators.
    """

    def __init__(self, reads: Sequence[TensorRead], others: Sequence[TensorRead], carrier: Carrier) -> None:
        self.reads, self.others = reads, others
        self._carrier = carrier
        largest = max(chunk.size_bytes for read in reads for chunk in read.chunks)
        self._piece_bytes = -(-max(largest, RUN_BYTES) // mmap.PAGESIZE) * mmap.PAGESIZE
        self._unpin: Callable[[], object] = lambda: None
        # Each piece, and the trip on which its bytes were sent.
        self._pieces: queue.SimpleQueue[tuple[memoryview, Trip | None]] = queue.SimpleQueue()

    def __enter__(self) -> Landing:
        memory = memoryview(paged_memory(_PIECES * self._piece_bytes))
        self._unpin = pinned(self, self._carrier, memory)
        for number in range(_PIECES):
            self._pieces.put((memory[number * self._piece_bytes : (number + 1) * self._piece_bytes], None))
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._carrier.wait()
        self._unpin()

    @contextmanager
    def piece(self, run: Run, batch: Batch) -> Iterator[list[memoryview]]:
        """Give memory for each part of a run, and send what is in it on when the block ends without an error."""
        piece, trip = self._pieces.get()
        try:
            if trip is not None:
                trip.wait()
            end, parts = 0, []
            for _, chunk in run.parts:
                parts.append(piece[end : end + chunk.size_bytes])
                end += chunk.size_bytes
            yield parts
            targets = [batch.tensors[number].targets[0].target for number, _ in run.parts]
            begins = [chunk.begin or 0 for _, chunk in run.parts]
            trip = self._carrier.put(targets, begins, parts)
        finally:
            self._pieces.put((piece, trip))


def landing_of(reads: Sequence[TensorRead]) -> Landing | None:
    """Return how what lies on accelerators is read; None where nothing does that can be filled there part by part.

    New tensors are made here. To be called in the thread of the training.
    """
    if are_in_place(map(_TARGET, chain.from_iterable(map(_BOXES, reads)))):
        return None
    may_land = [read for read in reads if _may_land(read)]
    far = far_targets([read.targets[0].target for read in may_land])
    if far is None:
        return None
    landed = [may_land[number] for number in far.numbers]
    chosen = set(map(id, landed))
    return Landing(landed, [read for read in reads if id(read) not in chosen], far.carrier)


def _may_land(read: TensorRead) -> bool:
    """Return whether each chunk of a tensor lies in one run in its one target, which has no memory of the host."""
    return (
        len(read.targets) == 1
        and 0 < len(read.chunks) <= MOST_RANGES
        and is_temporary(read.targets[0].target)
        and all(chunk.begin is not None for chunk in read.chunks)
    )
