"""Re-read: bytes that have a digest, from where they lie, and nothing of them kept.

1. They are read past the operating system's cache, where the storage has a way past it: what was written a moment ago
   is not answered from memory.
2. Several threads read, each with buffers of its own, which are all the memory that is taken.

Spec: C8.4.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import CancelledError, Future
from dataclasses import dataclass
from functools import partial

from safepoint.format.digest import running_digest
from safepoint.restoring.read import READERS, TRANSFER_BYTES
from safepoint.restoring.runs import RUN_BYTES
from safepoint.restoring.workers import Workers
from safepoint.storage.base import Storage
from safepoint.storage.reading import ObjectReader, Streaming, aligned_buffer, opened

BUFFER_BYTES = RUN_BYTES
_MOST_RUNS = 16

# A part, and the digest that its bytes have instead of its own.
Differing = tuple["Part", str]
# What an object's bytes arrive in on their way past the cache, and what they are digested in.
_Buffers = tuple[memoryview, memoryview]


@dataclass(frozen=True, slots=True)
class Part:
    """Name bytes that have a digest: an index, a header or a chunk."""

    path: str
    offset_bytes: int
    size_bytes: int
    digest: str
    what: str
    tensor: str = ""
    rows: tuple[int, int] | None = None

    @property
    def end_bytes(self) -> int:
        """Return the offset behind the last byte."""
        return self.offset_bytes + self.size_bytes


def reread(storage: Storage, parts: Sequence[Part]) -> Iterator[tuple[int, list[Differing]]]:
    """Read parts, ordered as they lie in their files; yield, stretch by stretch, its size and what differs.

    Raises:
        StorageError: The storage does not answer.
        CorruptionError: A file ends before a part of it does.
    """
    begun: deque[tuple[int, Future[list[Differing]]]] = deque()
    count = READERS if isinstance(storage, Streaming) else 0
    with Workers(count) as workers:
        # The last one is for a task that is carried out by whoever starts it, beside readers that are there.
        buffers = deque((aligned_buffer(TRANSFER_BYTES), aligned_buffer(BUFFER_BYTES)) for _ in range(count + 1))
        for run in _runs_of(parts):
            if len(begun) == _MOST_RUNS:
                size_bytes, task = begun.popleft()
                yield size_bytes, workers.result_of(task)
            task = workers.start(partial(_read_run, storage, run, buffers, workers))
            begun.append((sum(part.size_bytes for part in run), task))
        for size_bytes, task in begun:
            yield size_bytes, workers.result_of(task)


def _runs_of(parts: Sequence[Part]) -> Iterator[list[Part]]:
    """Yield parts that follow each other in a file and fit into a buffer together, or a single one of any size."""
    run: list[Part] = []
    for part in parts:
        follows = run and (part.path, part.offset_bytes) == (run[-1].path, run[-1].end_bytes)
        if follows and part.end_bytes - run[0].offset_bytes <= BUFFER_BYTES:
            run.append(part)
            continue
        if run:
            yield run
        run = [part]
    if run:
        yield run


def _read_run(storage: Storage, run: list[Part], buffers: deque[_Buffers], workers: Workers) -> list[Differing]:
    differing: list[Differing] = []
    transfer, buffer = pair = buffers.popleft()
    try:
        with opened(storage, run[0].path, transfer, is_past_cache=True) as reader:
            state, arrived_bytes = running_digest(), 0
            for part, piece in _pieces(reader, run, buffer):
                if workers.is_stopped:
                    raise CancelledError
                state.update(piece)
                arrived_bytes += len(piece)
                if arrived_bytes == part.size_bytes:
                    differing += [(part, state.hexdigest())] if state.hexdigest() != part.digest else []
                    state.reset()
                    arrived_bytes = 0
    finally:
        buffers.append(pair)
    return differing


def _pieces(reader: ObjectReader, run: list[Part], buffer: memoryview) -> Iterator[tuple[Part, memoryview]]:
    """Yield the bytes of each part in turn, in pieces that are good until the next one."""
    if len(run) == 1:
        (part,) = run
        for start in range(0, part.size_bytes, len(buffer)):
            memory = buffer[: min(len(buffer), part.size_bytes - start)]
            for _, piece in reader.fill(part.offset_bytes + start, [memory]):
                yield part, piece
        return
    first = run[0].offset_bytes
    memories = [buffer[part.offset_bytes - first : part.end_bytes - first] for part in run]
    for number, piece in reader.fill(first, memories):
        yield run[number], piece
