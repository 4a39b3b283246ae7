"""Arrival: what a target was filled with, to compare the live state with when the restore ends.

What lies in live memory was digested over that very memory. It is what arrived as long as it lies there, has not been
written to by torch's count, and still has the sampled bytes; else it is digested again. So is all that is small, at the
price of a sample.

Spec: C11.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import chain, compress, islice
from operator import attrgetter

import msgspec

from safepoint.format.digest import digest_bytes
from safepoint.restoring.live import places_of
from safepoint.restoring.plan import ChunkRead, TensorRead
from safepoint.state.item import Place, Source

# What a box of a tensor holds: by item, tensor name, offset and shape.
BoxKey = tuple[str, str, tuple[int, ...], tuple[int, ...]]

# About 64 bytes of each MiB, and of a smaller box; a prime, so that every byte of an element has its turn.
_SAMPLE_STEP_BYTES = 16381
_LEAST_SAMPLES = 64
# To digest so many bytes takes as long as to take two samples of them.
_SMALL_BYTES = 64 << 10
# A box that more chunks than these fed is digested once more as a whole, rather than to keep a digest for each of them.
MOST_RANGES = 512

_BOXES, _BOX, _OFFSET, _SHAPE = map(attrgetter, ("targets", "box", "offset", "shape"))
_CHUNKS, _BEGIN, _SIZE_BYTES, _DIGEST = map(attrgetter, ("chunks", "begin", "size_bytes", "digest"))
_ITEM, _NAME = attrgetter("item"), attrgetter("name")
_PLACE, _MEMORY, _RANGES = map(attrgetter, ("place", "memory", "ranges"))


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


def arrivals_of(
    tensors: Sequence[TensorRead], places: Sequence[Place | None], memories: Sequence[memoryview]
) -> Iterable[tuple[BoxKey, Arrival]]:
    """Return what targets were filled with, each with its key; they have been committed.

    Args:
        tensors: What was read, every chunk of which has matched.
        places: What the `commit` of each target told, tensor by tensor.
        memories: What the memory of each target was, filled.
    """
    boxes = list(map(_BOX, chain.from_iterable(map(_BOXES, tensors))))
    feeding = list(map(_CHUNKS, tensors))
    if len(boxes) == len(tensors) and set(map(len, feeding)) == {1} and None not in places:
        # Nearly all are one target each that one chunk feeds; a call for each takes longer than its digest.
        chunks = list(chain.from_iterable(feeding))
        begins = list(map(_BEGIN, chunks))
        if not any(begins) and None not in begins:
            ranges = zip(zip(begins, map(_SIZE_BYTES, chunks), map(_DIGEST, chunks), strict=True))
            samples = [b"" if len(memory) <= _SMALL_BYTES else sample_of(memory) for memory in memories]
            keys = zip(map(_ITEM, tensors), map(_NAME, tensors), map(_OFFSET, boxes), map(_SHAPE, boxes), strict=True)
            return zip(keys, map(Arrival, ranges, places, samples, memories), strict=True)
    each = iter(zip(boxes, places, memories, strict=True))
    return [
        (
            (tensor.item, tensor.name, box.offset, box.shape),
            _arrival_of(place, memory, (chunk for chunk in tensor.chunks if number in chunk.feeds)),
        )
        for tensor in tensors
        for number, (box, place, memory) in enumerate(islice(each, len(tensor.targets)))
    ]


def are_there(arrivals: Sequence[Arrival], sources: Sequence[Source]) -> bool:
    """Return whether all that arrived lies still where it did, in the memory of these sources; see `Arrival.is_at`.

    Where it is not certain without asking each, no.
    """
    places = places_of(sources)
    if None in places or list(map(_PLACE, arrivals)) != places:
        return False
    memories = list(map(_MEMORY, arrivals))
    are_small = list(map(_SMALL_BYTES.__ge__, map(len, memories)))
    small = list(compress(arrivals, are_small))
    if set(map(len, map(_RANGES, small))) - {1}:
        return False
    found = list(map(digest_bytes, compress(memories, are_small)))
    expected = [(0, len(one.memory), digest) for one, digest in zip(small, found, strict=True)]
    if list(chain.from_iterable(map(_RANGES, small))) != expected:
        return False
    large = [one for one, is_small in zip(arrivals, are_small, strict=True) if not is_small]
    return all(one.sample == sample_of(one.memory) for one in large)


def sample_of(memory: memoryview) -> bytes:
    """Return bytes from all over a memory."""
    if not memory:
        return b""
    # The command line verifies without it.
    import numpy

    step = max(1, min(_SAMPLE_STEP_BYTES, len(memory) // _LEAST_SAMPLES))
    return numpy.frombuffer(memory, numpy.uint8)[::step].tobytes()


def _arrival_of(place: Place | None, memory: memoryview, chunks: Iterable[ChunkRead]) -> Arrival:
    ranges: list[tuple[int, int, str]] = []
    for chunk in chunks:
        if chunk.begin is None or len(ranges) == MOST_RANGES:
            ranges = [(0, len(memory), digest_bytes(memory))]
            break
        ranges.append((chunk.begin, chunk.begin + chunk.size_bytes, chunk.digest))
    if len(ranges) > 1:
        ranges.sort()
    if place is None:
        return Arrival(tuple(ranges))
    sample = b"" if len(memory) <= _SMALL_BYTES else sample_of(memory)
    return Arrival(tuple(ranges), place, sample, memory)
