"""An index's boxes and chunks in columns of numbers, and whether they hold together.

1. What is sound here, `safepoint.format.index` finds sound as well, which looks at boxes one by one and can name what
   is wrong with them. What is in doubt is left to that.
2. No number of a file is multiplied or added before it is known to be bounded.

Spec: F3.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain
from operator import attrgetter

import msgspec
import numpy

from safepoint.format.columns import Columns, Frame, HeldTensor, Table, columns_from, narrowed
from safepoint.format.digest import HEX_LENGTH, digest_bytes, digest_of_parts
from safepoint.format.dtypes import DTYPES
from safepoint.format.extent import MAX_AXES, MAX_BYTES, Shape
from safepoint.format.index import Chunk, Index, Tensor

DIGEST_BYTES = HEX_LENGTH // 2

# Products of floats are off by less than this part of them.
_CERTAIN = 1 - 2**-20

_chunks_of, _rows_of, _digest_of = attrgetter("chunks"), attrgetter("rows"), attrgetter("digest")


@dataclass(frozen=True, slots=True)
class Chunks:
    """Hold the chunks of all boxes of an index, one box after the other.

    `ends` tell, by box, where its chunks end in the other columns; `stops` are the ends of their rows, which begin
    where those of the one before end; `digests` has a row of bytes for each.
    """

    ends: Table
    stops: Table
    objects: Table
    offsets: Table
    digests: numpy.typing.NDArray[numpy.uint8]


@dataclass(frozen=True, slots=True)
class IndexColumns:
    """Hold boxes and chunks of an index."""

    boxes: Columns
    chunks: Chunks

    def tensor(self, number: int) -> Tensor:
        """Return one box with its chunks."""
        held, end = self.boxes.frame.tensors[number], self.boxes.frame.ends[number]
        offset, shape = self.boxes.table[:, end - len(held.global_shape) : end].tolist()
        row_bytes = DTYPES[held.dtype].size_bytes
        for length in shape[1:]:
            row_bytes *= length
        chunks = self.chunks
        first, last = int(chunks.ends[number - 1]) if number else 0, int(chunks.ends[number])
        digests = chunks.digests[first:last].tobytes().hex()
        found, start = [], 0
        for place, stop, owner, begin in zip(
            range(0, len(digests), HEX_LENGTH),
            chunks.stops[first:last].tolist(),
            chunks.objects[first:last].tolist(),
            chunks.offsets[first:last].tolist(),
            strict=True,
        ):
            digest = digests[place : place + HEX_LENGTH]
            found.append(Chunk((start, stop), owner, begin, (stop - start) * row_bytes, digest))
            start = stop
        return Tensor(held.item, held.name, held.dtype, held.global_shape, tuple(offset), tuple(shape), tuple(found))

    def only(self, numbers: Sequence[int]) -> IndexColumns:
        """Return the columns of some boxes, in this order."""
        frame = self.boxes.frame
        places = list(
            chain.from_iterable(
                range(frame.ends[number] - len(frame.tensors[number].global_shape), frame.ends[number])
                for number in numbers
            )
        )
        ends = self.chunks.ends
        begins = numpy.concatenate([ends[:0], ends[:1] * 0, ends[:-1]])
        which = numpy.asarray(numbers, numpy.int64)
        rows = numpy.array(
            list(chain.from_iterable(map(range, begins[which].tolist(), ends[which].tolist()))), numpy.int64
        )
        chunks = Chunks(
            numpy.cumsum(ends[which] - begins[which]),
            self.chunks.stops[rows],
            self.chunks.objects[rows],
            self.chunks.offsets[rows],
            self.chunks.digests[rows],
        )
        tensors = tuple(frame.tensors[number] for number in numbers)
        return IndexColumns(columns_from(frame_of(tensors, {}), self.boxes.table[:, places]), chunks)


@dataclass(frozen=True, slots=True)
class _Listed:
    """Hold what an index lists of all boxes and chunks, column by column.

    `axes` counts those of each tensor. `lengths` are the whole tensors', and `table` has two rows, the offsets of the
    boxes and their lengths, all axis after axis; it is None where these are not equally many. `counts` tells how many
    chunks each box has, `rows` has two columns, and `digests` are rows of bytes, None where one is none.
    """

    dtypes: Sequence[str]
    shapes: Sequence[Shape]
    axes: Table
    lengths: Table
    table: Table | None
    counts: Table
    rows: Table
    objects: Table
    offsets: Table
    sizes_bytes: Table
    digests: numpy.typing.NDArray[numpy.uint8] | None

    @classmethod
    def of(cls, tensors: Sequence[Tensor]) -> _Listed:
        """Return the columns of some boxes, of which nothing is known but their types."""
        shapes, *placed = (list(map(attrgetter(name), tensors)) for name in ("global_shape", "offset", "shape"))
        axes = list(map(len, shapes))
        is_each_alike = all(list(map(len, column)) == axes for column in placed)
        chunks = list(chain.from_iterable(map(_chunks_of, tensors)))

        def column(name: str) -> Table:
            return numpy.fromiter(map(attrgetter(name), chunks), numpy.int64, len(chunks))

        return cls(
            list(map(attrgetter("dtype"), tensors)),
            shapes,
            numpy.array(axes, numpy.int64),
            _joined_numbers(shapes),
            numpy.stack(list(map(_joined_numbers, placed))) if is_each_alike else None,
            numpy.fromiter(map(len, map(_chunks_of, tensors)), numpy.int64, len(tensors)),
            numpy.fromiter(chain.from_iterable(map(_rows_of, chunks)), numpy.int64, 2 * len(chunks)).reshape(-1, 2),
            column("object"),
            column("offset_bytes"),
            column("size_bytes"),
            _joined_digests(list(map(_digest_of, chunks))),
        )


class IndexReader:
    """Make columns of indexes, and what names their boxes only once for all indexes that name them alike."""

    def __init__(self) -> None:
        self._frames: dict[str, Frame] = {}
        # The columns of the index that was looked at last: whoever looks whether it is sound asks for them next.
        self._last: tuple[Index, _Listed] | None = None

    def are_boxes_sound(self, index: Index) -> bool:
        """Return what `are_boxes_sound` does."""
        return _are_sound(index, self._listed(index))

    def columns_of(self, index: Index) -> IndexColumns:
        """Return the columns of an index that is sound."""
        tensors, listed = index.tensors, self._listed(index)
        items, names = (map(attrgetter(name), tensors) for name in ("item", "name"))
        held = tuple(map(HeldTensor, items, names, listed.dtypes, listed.shapes))
        assert listed.digests is not None and listed.table is not None
        return IndexColumns(
            columns_from(frame_of(held, self._frames), listed.table),
            Chunks(
                narrowed(numpy.cumsum(listed.counts)),
                narrowed(listed.rows[:, 1]),
                narrowed(listed.objects),
                narrowed(listed.offsets),
                listed.digests,
            ),
        )

    def _listed(self, index: Index) -> _Listed:
        if self._last is None or self._last[0] is not index:
            self._last = index, _Listed.of(index.tensors)
        return self._last[1]


def frame_of(tensors: tuple[HeldTensor, ...], known: dict[str, Frame]) -> Frame:
    """Return the frame of these tensors, a known one where there is one, and know it."""
    digest = digest_bytes(msgspec.msgpack.encode(tensors))
    if digest not in known:
        known[digest] = Frame.of(tensors, digest)
    return known[digest]


def are_boxes_sound(index: Index) -> bool:
    """Return whether each box lies in its tensor and its chunks make it whole, and chunks fill the rank's own files.

    Spec: F3.6, F3.8, F3.9, F3.10.
    """
    return _are_sound(index, _Listed.of(index.tensors))


def _are_sound(index: Index, listed: _Listed) -> bool:
    sizes = _sizes(listed)
    if sizes is None:
        return False
    rows, row_bytes = sizes
    objects, offsets, sizes_bytes = listed.objects, listed.offsets, listed.sizes_bytes
    if listed.digests is None or (objects >= len(index.objects)).any():
        return False
    counts = listed.counts
    ends = numpy.cumsum(counts)
    starts, stops = listed.rows.T
    owners = numpy.repeat(numpy.arange(len(counts)), counts)
    before = numpy.zeros(len(stops), numpy.int64)
    before[1:] = stops[:-1]
    is_filled = counts > 0
    before[(ends - counts)[is_filled]] = 0
    if not ((starts == before) & (stops > starts) & (stops <= rows[owners])).all():
        return False
    if not (stops[ends[is_filled] - 1] == rows[is_filled]).all() or rows[~is_filled].any():
        return False
    if not (sizes_bytes == (stops - starts) * row_bytes[owners]).all():
        return False
    limits = numpy.array([reference.size_bytes for reference in index.objects], numpy.int64)
    if not (offsets <= limits[objects] - sizes_bytes).all():
        return False
    return _are_files_filled(index, objects, offsets, sizes_bytes, listed.digests)


def _sizes(listed: _Listed) -> tuple[Table, Table] | None:
    """Return the number of rows of each box, none for one without elements, and the bytes of a row; None in doubt."""
    dtypes, axes, table = listed.dtypes, listed.axes, listed.table
    sizes_bytes = {dtype: DTYPES[dtype].size_bytes for dtype in set(dtypes) if dtype in DTYPES}
    if not sizes_bytes.keys() >= set(dtypes) or axes.max(initial=0) > MAX_AXES or table is None:
        return None
    row_bytes = numpy.fromiter(map(sizes_bytes.__getitem__, dtypes), numpy.int64, len(dtypes))
    rows = numpy.ones(len(dtypes), numpy.int64)
    begins = numpy.cumsum(axes) - axes
    for count in set(axes.tolist()) - {0}:
        numbers = numpy.flatnonzero(axes == count)
        places = begins[numbers, None] + numpy.arange(count)
        whole, (offset, shape) = listed.lengths[places], table[:, places]
        element_bytes = row_bytes[numbers]
        for lengths in (whole, shape):
            filled = numpy.maximum(lengths, 1).astype(float).prod(axis=1) * element_bytes
            if (lengths > MAX_BYTES).any() or (filled > MAX_BYTES * _CERTAIN).any():
                return None
        if (offset > whole - shape).any():
            return None
        rows[numbers] = numpy.where(shape.prod(axis=1) > 0, shape[:, 0], 0)
        row_bytes[numbers] = shape[:, 1:].prod(axis=1) * element_bytes
    return rows, row_bytes


def _joined_numbers(shapes: Sequence[Shape]) -> Table:
    return numpy.array(list(chain.from_iterable(shapes)), numpy.int64)


def _joined_digests(texts: Sequence[str]) -> numpy.typing.NDArray[numpy.uint8] | None:
    """Return the digests as rows of bytes; None where one is none."""
    if not {HEX_LENGTH}.issuperset(map(len, texts)):
        return None
    joined = "".join(texts)
    try:
        data = bytes.fromhex(joined)
    except ValueError:
        return None
    # Spaces and capital letters would have been taken as well.
    if data.hex() != joined:
        return None
    return numpy.frombuffer(data, numpy.uint8).reshape(len(texts), DIGEST_BYTES)


def _are_files_filled(
    index: Index, objects: Table, offsets: Table, sizes_bytes: Table, digests: numpy.typing.NDArray[numpy.uint8]
) -> bool:
    """Return whether chunks fill this generation's files from the header's end to the file's, once, by their digest."""
    order = numpy.lexsort((offsets, objects))
    objects, offsets, sizes_bytes = objects[order], offsets[order], sizes_bytes[order]
    for number, reference in enumerate(index.objects):
        if reference.generation != index.generation:
            continue
        first, last = (int(numpy.searchsorted(objects, number, side)) for side in ("left", "right"))
        begins = offsets[first:last]
        ends = begins + sizes_bytes[first:last]
        bounds = numpy.concatenate([[index.header_bytes], ends]), numpy.concatenate([begins, [reference.size_bytes]])
        if not (bounds[0] == bounds[1]).all():
            return False
        if digest_of_parts(index.header_digest, digests[order[first:last]].tobytes()) != reference.digest:
            return False
    return True
