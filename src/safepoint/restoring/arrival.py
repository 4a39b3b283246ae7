"""Arrival: what a target was filled with, to compare the live state with when the restore ends.

What lies in live memory was digested over that very memory. It is what arrived as long as it lies there, has not been
written to by torch's count, and still has the sampled bytes; else it is digested again. So is all that is small, at the
price of a sample.

Spec: C11.
"""

from __future__ import annotations

from collections.abc import Iterable

import msgspec

from safepoint.format.digest import digest_bytes
from safepoint.restoring.plan import ChunkRead
from safepoint.state.item import Place

# What a box of a tensor holds: by item, tensor name, offset and shape.
BoxKey = tuple[str, str, tuple[int, ...], tuple[int, ...]]

# About 64 bytes of each MiB, and of a smaller box; a prime, so that every byte of an element has its turn.
_SAMPLE_STEP_BYTES = 16381
_LEAST_SAMPLES = 64
# To digest so many bytes takes as long as to take two samples of them.
_SMALL_BYTES = 64 << 10
# A box that more chunks than these fed is digested once more as a whole, rather than to keep a digest for each of them.
_MOST_RANGES = 512


class Arrival(msgspec.Struct, frozen=True):
    """Hold the digests of ranges (begin, end) that make up a box's bytes, and its place in live memory, if it has one.

    `memory` is that memory, and `sample` holds some of the bytes in it, none of a small one.
    """

    ranges: tuple[tuple[int, int, str], ...]
    place: Place | None = None
    sample: bytes = b""
    memory: memoryview = memoryview(b"")

    def is_at(self, place: Place) -> bool:
        """Return whether what arrived still lies at a place, by all that tells without reading it whole."""
        if self.place != place:
            return False
        if len(self.memory) <= _SMALL_BYTES:
            return self.differing(self.memory) is None
        return self.sample == sample_of(self.memory)

    def differing(self, data: memoryview) -> tuple[str, str] | None:
        """Return (expected, found) of the first range whose digest the bytes of a box do not have; None for none."""
        size_bytes = self.ranges[-1][1] if self.ranges else 0
        if len(data) != size_bytes:
            return f"{size_bytes} bytes", f"{len(data)} bytes"
        for begin, end, expected in self.ranges:
            found = digest_bytes(data if end - begin == size_bytes else data[begin:end])
            if found != expected:
                return expected, found
        return None


def arrival_of(place: Place | None, memory: memoryview, chunks: Iterable[ChunkRead]) -> Arrival:
    """Return what a target was filled with; it has been committed.

    Args:
        place: What its `commit` told.
        memory: What its memory was, filled.
        chunks: Those that fed it, all of which have matched.
    """
    ranges: list[tuple[int, int, str]] = []
    for chunk in chunks:
        if chunk.begin is None or len(ranges) == _MOST_RANGES:
            ranges = [(0, len(memory), digest_bytes(memory))]
            break
        ranges.append((chunk.begin, chunk.begin + chunk.size_bytes, chunk.digest))
    if len(ranges) > 1:
        ranges.sort()
    if place is None:
        return Arrival(tuple(ranges))
    sample = b"" if len(memory) <= _SMALL_BYTES else sample_of(memory)
    return Arrival(tuple(ranges), place, sample, memory)


def sample_of(memory: memoryview) -> bytes:
    """Return bytes from all over a memory."""
    if not memory:
        return b""
    # The command line verifies without it.
    import numpy

    step = max(1, min(_SAMPLE_STEP_BYTES, len(memory) // _LEAST_SAMPLES))
    return numpy.frombuffer(memory, numpy.uint8)[::step].tobytes()
