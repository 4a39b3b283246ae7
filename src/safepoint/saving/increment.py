"""Increment: which chunks of a save lie in an ancestor's file already, so that they are named and not written again.

1. A chunk is compared, by its digest, with that of the same rows of the same box at the last save of this start that
   was seen to be committed. What is named is the file in which it lies, however long ago that was written.
2. Live memory is digested where it lies, before anything of it is copied or written.
3. One save of every so many is full, and so is the first of a start, and the one after a save that failed.

Spec: C13.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import groupby

from safepoint.format.digest import digest_bytes
from safepoint.format.extent import Shape
from safepoint.format.index import Index, ObjectReference, Tensor
from safepoint.saving.form import ChunkForm, Entry, FileForm, encode_header
from safepoint.saving.layout import LayoutBox
from safepoint.saving.parts import Share, cut_box
from safepoint.saving.spans import Spans
from safepoint.state.item import Divisible, Source

_THREADS = 2
# What a thread digests in one go: enough to be worth the handing over.
_TASK_BYTES = 8 << 20

# Rows of a box: item, name, type, global shape, offset, shape, and which rows.
ChunkKey = tuple[str, str, str, Shape, Shape, Shape, tuple[int, int]]


@dataclass(frozen=True, slots=True)
class StoredChunk:
    """Say where the bytes of a chunk lie."""

    reference: ObjectReference
    offset_bytes: int
    digest: str


@dataclass(frozen=True, slots=True)
class Base:
    """Hold what a committed save of this rank stored, or named, and how many saves after a full one it was made."""

    incarnation: int
    chunks: Mapping[ChunkKey, StoredChunk]
    since_full: int


@dataclass(frozen=True, slots=True)
class Increment:
    """Hold the form that a file would have with every chunk in it, and for each chunk, in order, where it lies instead.

    None stands for a chunk that is written.
    """

    whole: FileForm
    kept: tuple[StoredChunk | None, ...]

    @property
    def is_full(self) -> bool:
        """Return whether every chunk is written."""
        return not any(self.kept)

    @property
    def referenced_bytes(self) -> int:
        """Return the size of what is not written."""
        if self.is_full:
            return 0
        sizes = (chunk.size_bytes for entry in self.whole.entries for chunk in entry.chunks)
        return sum(size for size, stored in zip(sizes, self.kept, strict=True) if stored is not None)


class Increments:
    """Keep what the next save may refer to.

    Args:
        full_every: Of so many saves one is full; 1 for all.
    """

    def __init__(self, full_every: int = 1) -> None:
        self._full_every = full_every
        self._base: Base | None = None

    def base(self, incarnation: int) -> Base | None:
        """Return what a save of a start may refer to; None where it has to be full."""
        base = self._base
        if base is None or base.incarnation != incarnation or base.since_full + 1 >= self._full_every:
            return None
        return base

    def take(self) -> Base | None:
        """Return what the last save left, and forget it: a save that fails leaves nothing to refer to."""
        base, self._base = self._base, None
        return base

    def note(self, index: Callable[[], Index], before: Base | None, *, incarnation: int, is_full: bool) -> None:
        """Keep what a committed save stored.

        Args:
            index: Makes this rank's.
            before: What was taken when it began.
            incarnation: The start that saved.
            is_full: Whether it referred to nothing.
        """
        if self._full_every == 1:
            return
        since_full = 0 if is_full or before is None else before.since_full + 1
        self._base = Base(incarnation, dict(_stored(index())), since_full)


def full(form: FileForm) -> Increment:
    """Return that every chunk of a file is written."""
    return Increment(form, (None,) * (len(form.extents) - 1))


def find_kept(form: FileForm, sources: Sequence[Source], base: Base) -> Increment:
    """Return which chunks of a file lie in an ancestor's already.

    Args:
        form: The file with every chunk in it.
        sources: Where its boxes come from, in the order in which the form was given them.
        base: What may be referred to.

    Raises:
        TornSnapshotError: A tensor was written to since the boundary.

    Spec: C13.
    """
    kept: list[StoredChunk | None] = []
    views: list[tuple[int, memoryview]] = []
    found: dict[int, str] = {}
    for entry in form.entries:
        source = sources[entry.number]
        memory: memoryview | None = None
        for chunk in entry.chunks:
            stored = base.chunks.get(_key(entry.box, chunk.rows))
            if stored is not None:
                memory = source.in_place() if memory is None else memory
                begin = chunk.rows[0] * entry.box.row_bytes
                if memory is not None:
                    views.append((len(kept), memory[begin : begin + chunk.size_bytes]))
                elif isinstance(source, Divisible):
                    # Not in a thread: what runs on an accelerator keeps to the streams of the thread that asks.
                    found[len(kept)] = _digest_of_rows(source, chunk)
            kept.append(stored)
    found |= _digests(views)
    for entry in form.entries:
        sources[entry.number].check()
    same = [one if one is not None and found.get(place) == one.digest else None for place, one in enumerate(kept)]
    return Increment(form, tuple(_by_whole_sources(form, sources, same)))


def without_kept(increment: Increment, sources: Sequence[Source]) -> tuple[FileForm, tuple[Source, ...]]:
    """Return what the file looks like that holds the chunks to be written, and where its bytes come from.

    A box of which some chunks are written is one entry of its header, and as many of the form as there are stretches
    of rows.

    Spec: F3.3.
    """
    whole = increment.whole
    left = iter(increment.kept)
    written = [[chunk for chunk in entry.chunks if next(left) is None] for entry in whole.entries]
    rows = [sum(stop - start for start, stop in (chunk.rows for chunk in chunks)) for chunks in written]
    header = encode_header([entry.box for entry in whole.entries], rows=rows)
    entries: list[Entry] = []
    origins: list[Source] = []
    end = len(header)
    for entry, chunks in zip(whole.entries, written, strict=True):
        for stretch in _stretches(chunks):
            share = Share(0, stretch[0].rows[0], stretch[-1].rows[1])
            box = cut_box(entry.box, share)
            entries.append(_entry(len(origins), box, end, stretch, first=share.start))
            origins.append(_rows_of(sources[entry.number], share, is_whole=box == entry.box))
            end += box.size_bytes
    sizes = (chunk.size_bytes for entry in entries for chunk in entry.chunks)
    spans = Spans.of(entries)
    return FileForm(header, tuple(entries), spans, (len(header), *sizes), end, whole.layout), tuple(origins)


def _by_whole_sources(
    form: FileForm, sources: Sequence[Source], kept: Sequence[StoredChunk | None]
) -> Iterator[StoredChunk | None]:
    """Yield what is kept; of a source that cannot be read in part, all chunks or none."""
    left = iter(kept)
    for entry in form.entries:
        own = [next(left) for _ in entry.chunks]
        is_cut = any(own) and not all(own)
        yield from [None] * len(own) if is_cut and not isinstance(sources[entry.number], Divisible) else own


def _entry(number: int, box: LayoutBox, begin: int, chunks: Sequence[ChunkForm], *, first: int) -> Entry:
    moved = begin - chunks[0].offset_bytes
    return Entry(
        number,
        box,
        begin,
        box.size_bytes,
        tuple(
            ChunkForm((chunk.rows[0] - first, chunk.rows[1] - first), chunk.offset_bytes + moved, chunk.size_bytes)
            for chunk in chunks
        ),
    )


def _rows_of(source: Source, share: Share, *, is_whole: bool) -> Source:
    if is_whole:
        return source
    assert isinstance(source, Divisible)
    return source.rows(share.start, share.stop)


def _stretches(chunks: Sequence[ChunkForm]) -> Iterator[list[ChunkForm]]:
    """Yield chunks in groups that follow each other."""
    ends = [chunk.rows[1] for chunk in chunks]
    breaks = [int(end != chunk.rows[0]) for end, chunk in zip(ends, chunks[1:], strict=False)]
    numbers = [0]
    for one in breaks:
        numbers.append(numbers[-1] + one)
    for _, group in groupby(zip(numbers, chunks, strict=False), key=lambda pair: pair[0]):
        yield [chunk for _, chunk in group]


def _digest_of_rows(source: Divisible, chunk: ChunkForm) -> str:
    memory = memoryview(bytearray(chunk.size_bytes))
    source.rows(*chunk.rows).copy_into(memory)
    return digest_bytes(memory)


def _digests(views: Sequence[tuple[int, memoryview]]) -> dict[int, str]:
    """Return the digest of each view by its number."""
    tasks: list[list[tuple[int, memoryview]]] = [[]]
    size_bytes = 0
    for number, view in views:
        if size_bytes >= _TASK_BYTES:
            tasks.append([])
            size_bytes = 0
        tasks[-1].append((number, view))
        size_bytes += len(view)
    if len(tasks) == 1:
        return dict(_digested(tasks[0]))
    try:
        with ThreadPoolExecutor(_THREADS, thread_name_prefix="safepoint-digest") as pool:
            found = list(pool.map(_digested, tasks))
    except RuntimeError:
        # At a limit of the system, or at the end of the interpreter, a save is made all the same.
        found = [_digested(task) for task in tasks]
    return {number: digest for task in found for number, digest in task}


def _digested(views: Iterable[tuple[int, memoryview]]) -> list[tuple[int, str]]:
    return [(number, digest_bytes(view)) for number, view in views]


def _stored(index: Index) -> Iterator[tuple[ChunkKey, StoredChunk]]:
    for tensor in index.tensors:
        for chunk in tensor.chunks:
            stored = StoredChunk(index.objects[chunk.object], chunk.offset_bytes, chunk.digest)
            yield _key(tensor, chunk.rows), stored


def _key(box: LayoutBox | Tensor, rows: tuple[int, int]) -> ChunkKey:
    return (box.item, box.name, box.dtype, box.global_shape, box.offset, box.shape, rows)
