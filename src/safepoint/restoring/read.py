"""Read: fill the targets, checking each chunk's digest over the memory that it arrived in.

1. The caller's thread asks the targets for their memory and commits them, batch after batch; threads of their own read,
   copy and digest. A storage that cannot be read in runs is read by the caller's thread, one chunk after the other.
2. A chunk is digested over its destination, piece by piece as they arrive there. A chunk that is needed in part comes
   through a buffer, some rows at a time.
3. A batch is committed when all its chunks have matched. The first that does not match stops everything.
4. What lands on an accelerator goes there through pieces of host memory (`landing`), each of them read again by the
   device before it is used again; it has arrived when this ends, and is read back when the restore ends.
5. Beside the targets' own memory there are the threads' buffers, and temporary memory of at most `_MOST_HELD_BYTES` or
   one batch.

Spec: C11.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from itertools import chain, islice
from operator import attrgetter
from types import MappingProxyType

from safepoint.format.extent import Box
from safepoint.restoring.arrival import Arrival, BoxKey, arrivals_of
from safepoint.restoring.boxes import copy_overlap
from safepoint.restoring.checking import check_run
from safepoint.restoring.landing import Landing, landing_of
from safepoint.restoring.live import are_in_place, commit, memories_of
from safepoint.restoring.plan import ChunkRead, TensorRead
from safepoint.restoring.runs import RUN_BYTES, Batch, Run, batches_of
from safepoint.restoring.workers import Workers
from safepoint.state.item import Target, is_temporary
from safepoint.storage.base import Storage
from safepoint.storage.reading import Desk, ObjectReader, Streaming, desks

# Two for the disk, so that it does not rest while the third one copies and digests.
READERS = 3
# What a device transfers at a time: large enough for its full rate, small enough to be copied from a processor's cache.
TRANSFER_BYTES = 2 << 20

_MOST_BATCHES = 16
_MOST_HELD_BYTES = 32 << 20

_BOXES, _TARGET = attrgetter("targets"), attrgetter("target")


@dataclass(frozen=True, slots=True)
class _Begun:
    """Hold a batch under way: all its targets and their memory, tensor by tensor, and how much of it is temporary."""

    batch: Batch
    targets: list[Target]
    memories: list[memoryview]
    held_bytes: int
    tasks: list[Future[int]]


def read(
    storage: Storage,
    reads: Sequence[TensorRead],
    *,
    arrivals: dict[BoxKey, Arrival] | None = None,
    near: Mapping[str, int] = MappingProxyType({}),
) -> int:
    """Fill all targets and return the number of bytes read and checked.

    A target whose bytes do not match is never committed; targets that were filled before it hold new bytes, so the
    caller must restore something else over them, or give the live objects up.

    Args:
        storage: Where the run lies.
        reads: The plan.
        arrivals: Takes what each target was filled with, if given.
        near: Up to which byte files have been read ahead, by path; these tensors come first.

    Raises:
        CorruptionError: A chunk's bytes contradict its digest; names file, tensor, rows, expected and found.

    Spec: C11.
    """
    count = READERS if isinstance(storage, Streaming) else 0
    landing = landing_of(reads)
    if landing is not None:
        with landing:
            total = _read_far(storage, landing, count, arrivals, near)
        return total + _read_near(storage, landing.others, count, arrivals, near)
    return _read_near(storage, reads, count, arrivals, near)


def _read_near(
    storage: Storage,
    reads: Sequence[TensorRead],
    count: int,
    arrivals: dict[BoxKey, Arrival] | None,
    near: Mapping[str, int],
) -> int:
    """Fill targets by way of their own memory."""
    # The desk beyond the readers' is for a task that is carried out by whoever starts it, for want of a thread.
    total, begun = 0, deque[_Begun]()
    with desks(storage, count + 1, TRANSFER_BYTES) as free, Workers(count) as workers:
        for batch in batches_of(reads, near=near):
            targets = list(map(_TARGET, chain.from_iterable(map(_BOXES, batch.tensors))))
            held_bytes = 0 if are_in_place(targets) else sum(one.nbytes for one in targets if is_temporary(one))
            while begun and (len(begun) == _MOST_BATCHES or _sum_of(begun) + held_bytes > _MOST_HELD_BYTES):
                total += _finish(begun.popleft(), workers, arrivals)
            memories = memories_of(targets)
            left = iter(memories)
            of_tensors = [tuple(islice(left, len(tensor.targets))) for tensor in batch.tensors]
            tasks = [workers.start(partial(_read_run, run, batch, of_tensors, free, workers)) for run in batch.runs()]
            begun.append(_Begun(batch, targets, memories, held_bytes, tasks))
        while begun:
            total += _finish(begun.popleft(), workers, arrivals)
    return total


def _read_far(
    storage: Storage,
    landing: Landing,
    count: int,
    arrivals: dict[BoxKey, Arrival] | None,
    near: Mapping[str, int],
) -> int:
    """Fill targets on accelerators."""
    total = 0
    with desks(storage, count + 1, TRANSFER_BYTES) as free, Workers(count) as workers:
        batches = list(batches_of(landing.reads, near=near))
        tasks = [
            [workers.start(partial(_land, run, batch, landing, free, workers)) for run in batch.runs()]
            for batch in batches
        ]
        for batch, begun in zip(batches, tasks, strict=True):
            total += sum(workers.result_of(task) for task in begun)
            targets = list(map(_TARGET, chain.from_iterable(map(_BOXES, batch.tensors))))
            places = commit(targets)
            if arrivals is not None:
                nowhere = [memoryview(b"")] * len(targets)
                arrivals.update(arrivals_of(batch.tensors, places, nowhere))
    return total


def _land(run: Run, batch: Batch, landing: Landing, free: deque[Desk], workers: Workers) -> int:
    """Read a run into a piece of host memory, check each of its chunks, and send them on."""
    desk = free.popleft()
    try:
        reader = desk.reader_of(run.path)
        with landing.piece(run, batch) as parts:
            return check_run(run, batch, reader.fill(run.offset_bytes, parts), workers)
    finally:
        free.append(desk)


def _sum_of(begun: Sequence[_Begun]) -> int:
    return sum(one.held_bytes for one in begun)


def _finish(begun: _Begun, workers: Workers, arrivals: dict[BoxKey, Arrival] | None) -> int:
    """Wait for a batch, commit its targets, note what arrived in them, and return its size."""
    size_bytes = sum(workers.result_of(task) for task in begun.tasks)
    places = commit(begun.targets)
    if arrivals is not None:
        arrivals.update(arrivals_of(begun.batch.tensors, places, begun.memories))
    return size_bytes


def _read_run(
    run: Run, batch: Batch, memories: Sequence[Sequence[memoryview]], free: deque[Desk], workers: Workers
) -> int:
    """Fill what a run feeds, check each of its chunks, and return its size."""
    desk = free.popleft()
    try:
        reader = desk.reader_of(run.path)
        number, chunk = run.parts[0]
        if chunk.begin is None:
            pieces = _in_rows(reader, batch.tensors[number], chunk, memories[number])
        else:
            pieces = reader.fill(run.offset_bytes, [_part_of(memories[number], one) for number, one in run.parts])
        return check_run(run, batch, pieces, workers)
    finally:
        free.append(desk)


def _part_of(memories: Sequence[memoryview], chunk: ChunkRead) -> memoryview:
    """Return where a chunk that is read in place has its place."""
    assert chunk.begin is not None
    memory = memories[chunk.feeds[0]]
    # Most chunks are a whole tensor, and a view of each would take longer than its digest.
    return memory if len(memory) == chunk.size_bytes else memory[chunk.begin : chunk.begin + chunk.size_bytes]


def _in_rows(
    reader: ObjectReader, tensor: TensorRead, chunk: ChunkRead, memories: Sequence[memoryview]
) -> Iterator[tuple[int, memoryview]]:
    """Read a chunk that is needed in part, some rows at a time, and copy from them what the targets take."""
    row_count = chunk.box.shape[0] if chunk.box.shape else 1
    row_bytes = chunk.size_bytes // row_count
    step = max(1, RUN_BYTES // row_bytes)
    buffer = memoryview(bytearray(min(step * row_bytes, chunk.size_bytes)))
    for start in range(0, row_count, step):
        count = min(step, row_count - start)
        rows = buffer[: count * row_bytes]
        for _, piece in reader.fill(chunk.offset_bytes + start * row_bytes, [rows]):
            yield 0, piece
        box = _rows_of(chunk.box, start, count)
        for number in chunk.feeds:
            copy_overlap(rows, box, memories[number], tensor.targets[number].box, tensor.element_bytes)


def _rows_of(box: Box, start: int, count: int) -> Box:
    if not box.shape:
        return box
    return Box((box.offset[0] + start, *box.offset[1:]), (count, *box.shape[1:]))
