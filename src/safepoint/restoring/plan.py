"""Plan: which byte ranges of which files fill which targets. Pure.

1. Each chunk is read at most once, however many boxes it feeds.
2. A chunk that lies whole and in one run in a target is read in place. Any other one is read whole all the same,
   through a buffer, because its digest is that of all its bytes, and what the targets need of it is copied.
3. Tensors follow each other as they lie on disk, and so do the chunks of each.
4. Tensors that one target takes from one chunk, as nearly all are, are planned in columns: a call for each takes longer
   than its digest.
5. What is planned of a tensor that lies in very many boxes is not kept, but made again when it is asked for: the chunks
   that thousands of ranks stored would not fit into the memory of one process.

Spec: C11.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import chain, compress, repeat
from operator import attrgetter, eq
from typing import Any, Protocol, overload, runtime_checkable

import msgspec

from safepoint.errors import CorruptionError, InternalError
from safepoint.format.dtypes import DTYPES
from safepoint.format.extent import Box, element_count
from safepoint.format.index import Chunk, Tensor
from safepoint.restoring.boxes import StoredBox, element_bytes_of, overlap, run_in
from safepoint.state.item import BoxTarget, Target, TensorTarget

Key = tuple[str, str]

_place = attrgetter("path", "offset_bytes")
_CHUNKS, _OFFSET, _SHAPE, _WHOLE = map(attrgetter, ("chunks", "offset", "shape", "global_shape"))
_ROWS, _OBJECT, _BEGIN, _SIZE_BYTES, _DIGEST = map(
    attrgetter, ("rows", "object", "offset_bytes", "size_bytes", "digest")
)
_DTYPE, _NBYTES = attrgetter("dtype"), attrgetter("nbytes")

# One chunk, the box is the whole tensor, it begins at its begin, and the target takes it in one box.
_IS_PLAIN = (1, True, False, False)

# Chunks of one tensor that are not kept from here on.
_MANY = 512


class TargetBox(msgspec.Struct, frozen=True):
    """Pair a target with the box of the tensor that it takes."""

    target: Target
    box: Box


class ChunkRead(msgspec.Struct, frozen=True, gc=False):
    """Name one chunk: where it lies in its file and in its tensor, and which targets it feeds.

    With `begin` it is read in place, from that byte of its one target on; without, it is read through a buffer,
    and `feeds` names the targets that take a part of it, by number.
    """

    path: str
    offset_bytes: int
    size_bytes: int
    rows: tuple[int, int]
    digest: str
    box: Box
    feeds: tuple[int, ...]
    begin: int | None


class TensorRead(msgspec.Struct, frozen=True):
    """Name all chunks that this rank needs of one tensor, as they lie on disk."""

    item: str
    name: str
    element_bytes: int
    targets: tuple[TargetBox, ...]
    chunks: Sequence[ChunkRead]


@runtime_checkable
class ListingOnce(Protocol):
    """Be stored boxes that may be known to be one for each tensor."""

    def only_boxes(self, item: str, names: Iterable[str]) -> tuple[list[Tensor], tuple[str, ...]] | None:
        """Return the one box of each of an item's tensors, and the paths that chunks are numbered by; None in doubt."""


def plan_reads(
    stored: Mapping[Key, Sequence[StoredBox]], targets: Mapping[str, Mapping[str, TensorTarget]]
) -> tuple[TensorRead, ...]:
    """Return what to read, in the order in which it lies on disk.

    Args:
        stored: The boxes of each tensor, by item and name; they do not overlap.
        targets: For each item, its targets by tensor name; tensors without a target are not read.

    Raises:
        CorruptionError: What is stored does not hold all of a target; names the tensor and the box.
    """
    reads: list[TensorRead] = []
    for item, by_name in targets.items():
        plain = _plan_plain(item, stored, by_name)
        reads += plain.values()
        reads += [_plan_tensor((item, name), stored, one) for name, one in by_name.items() if name not in plain]
    return tuple(sorted(reads, key=_begin_of))


def paths_of(reads: Sequence[TensorRead]) -> set[str]:
    """Return the files that a plan reads."""
    return {chunk.path for read in reads for chunk in read.chunks}


def target_boxes(target: TensorTarget, whole: tuple[int, ...], where: str) -> tuple[TargetBox, ...]:
    """Return the boxes of a target of a tensor of this shape, each with what takes it."""
    # For a hundred thousand tensors, asking isinstance() of a protocol takes longer than all else that is done here.
    if not hasattr(target, "boxes"):
        return (TargetBox(target, Box((0,) * len(whole), whole)),)
    parts: Sequence[BoxTarget] = target.boxes()
    boxes = tuple(TargetBox(one, Box(tuple(one.offset), tuple(one.shape))) for one in parts)
    for box in (one.box for one in boxes):
        is_filled = element_count(box.shape) > 0
        has_axes = len(box.offset) == len(box.shape) == len(whole)
        if not has_axes or (is_filled and any(map(_is_outside, box.offset, box.shape, whole))):
            raise InternalError("a target lies outside its tensor", where=where, expected=whole, found=box)
    return boxes


class _MadeAnew(Sequence[ChunkRead]):
    """Be the chunks of a tensor, which are made each time that more than the first is asked for.

    Args:
        make: Makes them.
        chunks: Those that it made just now.
    """

    def __init__(self, make: Callable[[], tuple[ChunkRead, ...]], chunks: Sequence[ChunkRead]) -> None:
        self._make = make
        self._first = chunks[0]
        self._count = len(chunks)

    def __len__(self) -> int:
        return self._count

    def __iter__(self) -> Iterator[ChunkRead]:
        return iter(self._make())

    @overload
    def __getitem__(self, place: int) -> ChunkRead: ...
    @overload
    def __getitem__(self, place: slice) -> Sequence[ChunkRead]: ...
    def __getitem__(self, place: int | slice) -> ChunkRead | Sequence[ChunkRead]:
        return self._first if place == 0 else self._make()[place]


def _begin_of(read: TensorRead) -> tuple[str, int]:
    """Return where the first chunk of a tensor lies; one without any comes first."""
    return _place(read.chunks[0]) if read.chunks else ("", 0)


def _plan_plain(
    item: str, stored: Mapping[Key, Sequence[StoredBox]], targets: Mapping[str, TensorTarget]
) -> dict[str, TensorRead]:
    """Return what is read of those tensors of an item that one target takes whole from one chunk, by name."""
    known = stored.only_boxes(item, targets) if isinstance(stored, ListingOnce) else None
    if known is None:
        return {}
    tensors, paths = known
    shapes, offsets, chunks = (list(map(fact, tensors)) for fact in (_SHAPE, _OFFSET, _CHUNKS))
    facts = zip(
        map(len, chunks),
        map(eq, shapes, map(_WHOLE, tensors)),
        map(any, offsets),
        map(hasattr, targets.values(), repeat("boxes")),
        strict=True,
    )
    flags = list(map(_IS_PLAIN.__eq__, facts))
    takers: list[Any] = list(compress(targets.values(), flags))
    parts = list(chain.from_iterable(compress(chunks, flags)))
    sizes_bytes = list(map(_SIZE_BYTES, parts))
    if list(map(_NBYTES, takers)) != sizes_bytes:
        # One of them is wrong, and the look at single ones tells which.
        return {}
    boxes = list(map(Box, compress(offsets, flags), compress(shapes, flags)))
    names, dtypes = list(compress(targets, flags)), list(map(_DTYPE, compress(tensors, flags)))
    element_bytes = {dtype: DTYPES[dtype].size_bytes for dtype in set(dtypes)}
    columns = map(paths.__getitem__, map(_OBJECT, parts)), map(_BEGIN, parts), sizes_bytes
    reads = map(ChunkRead, *columns, map(_ROWS, parts), map(_DIGEST, parts), boxes, repeat((0,)), repeat(0))
    taken = zip(map(TargetBox, takers, boxes)), zip(reads)
    planned = map(TensorRead, repeat(item), names, map(element_bytes.__getitem__, dtypes), *taken)
    return dict(zip(names, planned, strict=True))


def _plan_tensor(key: Key, stored: Mapping[Key, Sequence[StoredBox]], target: TensorTarget) -> TensorRead:
    parts = stored.get(key, ())
    where = "/".join(key)
    if not parts:
        raise InternalError("an item asks for a tensor that is not stored", where=where)
    element_bytes = element_bytes_of(parts[0].tensor)
    boxes = target_boxes(target, parts[0].tensor.global_shape, where)
    if len(parts) == len(boxes) == 1 and boxes[0].box == parts[0].box:
        _check_target(boxes[0], 0, element_bytes, where)
        return TensorRead(*key, element_bytes, boxes, _chunks_in_place(parts[0]))
    chunks, missing = _plan_chunks(parts, boxes, element_bytes)
    for one, count in zip(boxes, missing, strict=True):
        _check_target(one, count, element_bytes, where)
    if len(chunks) < _MANY:
        return TensorRead(*key, element_bytes, boxes, chunks)
    anew = _MadeAnew(lambda: _plan_chunks(stored[key], boxes, element_bytes)[0], chunks)
    return TensorRead(*key, element_bytes, boxes, anew)


def _plan_chunks(
    parts: Sequence[StoredBox], boxes: Sequence[TargetBox], element_bytes: int
) -> tuple[tuple[ChunkRead, ...], list[int]]:
    """Return the chunks that feed some boxes, and how many elements of each box none of them does."""
    chunks: list[ChunkRead] = []
    missing = [element_count(one.box.shape) for one in boxes]
    for part in parts:
        if not any(overlap(part.box, one.box) for one in boxes):
            continue
        for chunk in part.tensor.chunks:
            read, taken = _plan_chunk(part, chunk, boxes, element_bytes)
            for number, count in taken.items():
                missing[number] -= count
            if taken:
                chunks.append(read)
    chunks.sort(key=_place)
    return tuple(chunks), missing


def _chunks_in_place(part: StoredBox) -> tuple[ChunkRead, ...]:
    """Return the chunks of a box that one target takes as it is: the case of one process, and of ranks that stay."""
    chunks, begin = [], 0
    for chunk in part.tensor.chunks:
        box = part.box if len(part.tensor.chunks) == 1 else part.box_of(chunk)
        where = part.paths[chunk.object], chunk.offset_bytes, chunk.size_bytes
        chunks.append(ChunkRead(*where, chunk.rows, chunk.digest, box, (0,), begin))
        begin += chunk.size_bytes
    return tuple(chunks) if len(chunks) < 2 else tuple(sorted(chunks, key=_place))


def _is_outside(start: int, length: int, whole: int) -> bool:
    return start < 0 or start + length > whole


def _plan_chunk(
    part: StoredBox, chunk: Chunk, boxes: Sequence[TargetBox], element_bytes: int
) -> tuple[ChunkRead, dict[int, int]]:
    """Return how one chunk is read, and how many elements of which target it gives."""
    box = part.box_of(chunk)
    common = {number: found for number, found in _overlaps(box, boxes)}
    begin = None
    if len(common) == 1:
        ((number, found),) = common.items()
        first = run_in(box, boxes[number].box) if found == box else None
        begin = None if first is None else first * element_bytes
    path = part.paths[chunk.object]
    feeds = tuple(common)
    read = ChunkRead(path, chunk.offset_bytes, chunk.size_bytes, chunk.rows, chunk.digest, box, feeds, begin)
    return read, {number: element_count(found.shape) for number, found in common.items()}


def _overlaps(box: Box, boxes: Sequence[TargetBox]) -> Iterator[tuple[int, Box]]:
    for number, one in enumerate(boxes):
        found = overlap(box, one.box)
        if found is not None:
            yield number, found


def _check_target(one: TargetBox, missing: int, element_bytes: int, where: str) -> None:
    count = element_count(one.box.shape)
    if missing:
        raise CorruptionError(
            "what is stored does not hold all of a tensor's part that is to be restored",
            where=where,
            expected=f"{count} elements of the box at {list(one.box.offset)} of shape {list(one.box.shape)}",
            found=f"{count - missing}",
        )
    if one.target.nbytes != count * element_bytes:
        raise InternalError(
            "a target has another size than its tensor",
            where=where,
            expected=count * element_bytes,
            found=one.target.nbytes,
        )
