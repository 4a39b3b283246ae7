"""Runs: what a plan reads, in the portions in which it is read. Pure.

1. A run is a stretch of one file that one thread reads from front to back: chunks that follow each other there and are
   read in place, together no larger than `RUN_BYTES`, or a single chunk of any size.
2. A batch is one large tensor, or small ones that follow each other. Its targets are committed together.
3. The largest tensors come first, so that the last runs are small ones and the threads end together. Those that lie
   where the file has been read ahead stand evenly among the others: the disk does not rest while they are copied.

Spec: C11.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from operator import add, attrgetter
from types import MappingProxyType

from safepoint.restoring.plan import ChunkRead, TensorRead

RUN_BYTES = 8 << 20

_CHUNKS = attrgetter("chunks")
_PATH, _BEGIN, _OFFSET_BYTES, _SIZE_BYTES = map(attrgetter, ("path", "begin", "offset_bytes", "size_bytes"))

# A chunk, and the number of its tensor in the batch.
Part = tuple[int, ChunkRead]


@dataclass(frozen=True, slots=True)
class Run:
    """Name chunks that follow each other in a file, each with the number of its tensor in the batch."""

    path: str
    offset_bytes: int
    parts: tuple[Part, ...]


@dataclass(frozen=True, slots=True)
class Batch:
    """Name tensors that are read and committed together."""

    tensors: tuple[TensorRead, ...]

    def runs(self) -> Iterator[Run]:
        """Yield the stretches of files that hold the tensors' chunks."""
        whole = self._in_one_run()
        if whole is not None:
            yield whole
            return
        open_parts: list[Part] = []
        end, room = -1, 0
        for part in ((number, chunk) for number, tensor in enumerate(self.tensors) for chunk in tensor.chunks):
            chunk = part[1]
            follows = open_parts and chunk.path == open_parts[0][1].path and chunk.offset_bytes == end
            if not (follows and chunk.size_bytes <= room and chunk.begin is not None):
                yield from _closed(open_parts)
                open_parts, room = [], RUN_BYTES
            open_parts.append(part)
            end = chunk.offset_bytes + chunk.size_bytes
            room = room - chunk.size_bytes if chunk.begin is not None else 0
        yield from _closed(open_parts)

    def _in_one_run(self) -> Run | None:
        """Return all chunks as one run where each tensor has one and each follows the one before it; else None."""
        counts = set(map(len, map(_CHUNKS, self.tensors)))
        chunks = list(chain.from_iterable(map(_CHUNKS, self.tensors))) if counts == {1} else []
        if len(set(map(_PATH, chunks))) != 1 or None in map(_BEGIN, chunks):
            return None
        offsets, sizes = list(map(_OFFSET_BYTES, chunks)), list(map(_SIZE_BYTES, chunks))
        if sum(sizes) > RUN_BYTES or list(map(add, offsets, sizes))[:-1] != offsets[1:]:
            return None
        return Run(chunks[0].path, offsets[0], tuple(enumerate(chunks)))


def batches_of(reads: Sequence[TensorRead], *, near: Mapping[str, int] = MappingProxyType({})) -> Iterator[Batch]:
    """Yield all tensors of a plan: large ones first, small ones as they lie on disk; those that are near in between.

    Args:
        reads: The plan.
        near: Up to which byte files are near, by path.
    """
    sizes = [read.chunks[0].size_bytes if len(read.chunks) == 1 else _size_of(read) for read in reads]
    large = [number for number, size in enumerate(sizes) if size >= RUN_BYTES]
    large.sort(key=lambda number: -sizes[number])
    yield from _mixed([Batch((reads[number],)) for number in large], near)
    small = [(read, size) for read, size in zip(reads, sizes, strict=True) if size < RUN_BYTES]
    yield from _mixed(list(_gathered(small)), near)


def _size_of(read: TensorRead) -> int:
    return sum(map(_SIZE_BYTES, read.chunks))


def _gathered(small: Sequence[tuple[TensorRead, int]]) -> Iterator[Batch]:
    """Yield batches of tensors with their sizes, as they lie on disk."""
    gathered: list[TensorRead] = []
    gathered_bytes = 0
    for read, size in small:
        if gathered and gathered_bytes + size > RUN_BYTES:
            yield Batch(tuple(gathered))
            gathered, gathered_bytes = [], 0
        gathered.append(read)
        gathered_bytes += size
    if gathered:
        yield Batch(tuple(gathered))


def _mixed(batches: Sequence[Batch], near: Mapping[str, int]) -> Iterator[Batch]:
    """Yield those that are near evenly among the others: while one thread waits for the disk, another one copies."""
    firsts = [next((chunk for read in batch.tensors for chunk in read.chunks[:1]), None) for batch in batches]
    flags = [first is not None and first.offset_bytes < near.get(first.path, 0) for first in firsts]
    close = [batch for batch, is_near in zip(batches, flags, strict=True) if is_near]
    far = [batch for batch, is_near in zip(batches, flags, strict=True) if not is_near]
    given = 0
    for number, batch in enumerate(far, start=1):
        yield batch
        due = number * len(close) // len(far)
        yield from close[given:due]
        given = due
    yield from close[given:]


def _closed(parts: list[Part]) -> Iterator[Run]:
    if parts:
        first = parts[0][1]
        yield Run(first.path, first.offset_bytes, tuple(parts))
