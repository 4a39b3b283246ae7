"""Stored: the boxes that indexes list, kept in columns, and made into records tensor by tensor.

The indexes of thousands of ranks name millions of chunks; as records they would not fit into memory.

Spec: F3.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import repeat
from operator import attrgetter
from typing import Any

import msgspec
import numpy

from safepoint.format.chunks import DIGEST_BYTES, Chunks, IndexColumns, frame_of
from safepoint.format.columns import WIDE, Columns, Frame, HeldTensor, Table, columns_from, narrowed
from safepoint.format.index import Index, ObjectReference, Tensor
from safepoint.format.names import generation_path
from safepoint.restoring.boxes import StoredBox
from safepoint.state.item import TensorSpec

Key = tuple[str, str]

# Boxes of which records take some megabytes.
_FEW = 1 << 14


@dataclass(frozen=True, slots=True)
class StoredIndex:
    """Hold what one rank's index says of its files, its boxes and their chunks.

    `records` are the boxes as records, where they are few: to make them anew of columns takes longer than all else that
    a plan does.
    """

    rank: int
    generation: str
    header_bytes: int
    header_digest: str
    objects: tuple[ObjectReference, ...]
    paths: tuple[str, ...]
    columns: IndexColumns
    records: tuple[Tensor, ...] = ()

    @classmethod
    def of(cls, index: Index, columns: IndexColumns, *, keeps_records: bool = False) -> StoredIndex:
        """Return an index without its plain trees."""
        head = index.rank, index.generation, index.header_bytes, index.header_digest, index.objects
        records = index.tensors if keeps_records and len(index.tensors) <= _FEW else ()
        return cls(*head, _paths(index.objects), columns, records)

    @property
    def boxes(self) -> Columns:
        """Return the boxes."""
        return self.columns.boxes

    def box(self, number: int) -> StoredBox:
        """Return one box."""
        tensor = self.records[number] if self.records else self.columns.tensor(number)
        return StoredBox(tensor, self.paths, self.rank)


class StoredBoxes(Mapping[Key, tuple[StoredBox, ...]]):
    """Give the stored boxes by item and name of their tensors, in the order of ranks.

    Boxes are made when they are asked for, and not kept. Of a tensor of which no box is known here, none is needed: it
    is given as one box without elements.

    Args:
        specs: The whole tensors, by item and name.
        indexes: Where they are listed; a box that is listed by several of one rank is given once.
        per_rank: Items of which each rank has its own.
        owner: The rank whose own boxes are given of those; None for no rank.
    """

    def __init__(
        self,
        specs: Mapping[str, Mapping[str, TensorSpec]],
        indexes: Sequence[StoredIndex],
        per_rank: frozenset[str],
        owner: int | None,
    ) -> None:
        self._specs = specs
        self._indexes = sorted(indexes, key=lambda index: index.rank)
        self._per_rank = per_rank
        self._owner = owner
        # Where one index lists each tensor once, its place there, by tensor.
        self._alone = _places_alone(self._indexes, per_rank)
        # By tensor, the frames that name it, each with its place there; by frame, the indexes that have it.
        self._places: dict[Key, list[tuple[str, int]]] = {}
        self._members: dict[str, list[int]] = {}
        for number, index in enumerate(() if self._alone else self._indexes):
            frame = index.boxes.frame
            members = self._members.setdefault(frame.digest, [])
            members.append(number)
            if len(members) == 1:
                self._note(frame)

    def __getitem__(self, key: Key) -> tuple[StoredBox, ...]:
        alone = self._alone.get(key)
        if alone is not None:
            return (self._indexes[0].box(alone),)
        places = self._places.get(key, ())
        found: dict[tuple[int, tuple[int, ...]], StoredBox] = {}
        for number, place in sorted((number, place) for frame, place in places for number in self._members[frame]):
            index = self._indexes[number]
            if key[0] in self._per_rank and index.rank != self._owner:
                continue
            box = index.box(place)
            found.setdefault((box.rank, box.tensor.offset), box)
        if not found:
            spec = self._specs[key[0]][key[1]]
            nothing = (0,) * len(spec.global_shape)
            tensor = Tensor(*key, spec.dtype, spec.global_shape, nothing, nothing, ())
            return (StoredBox(tensor, ()),)
        return tuple(found.values())

    def __iter__(self) -> Iterator[Key]:
        return ((item, name) for item, by_name in self._specs.items() for name in by_name)

    def __len__(self) -> int:
        return sum(len(by_name) for by_name in self._specs.values())

    def only_boxes(self, item: str, names: Iterable[str]) -> tuple[list[Tensor], tuple[str, ...]] | None:
        """Return the one box of each of an item's tensors; see `safepoint.restoring.plan.ListingOnce`."""
        found = list(map(self._alone.get, zip(repeat(item), names)))
        places = [place for place in found if place is not None]
        if not places or len(places) < len(found) or not self._indexes[0].records:
            return None
        index = self._indexes[0]
        return list(map(index.records.__getitem__, places)), index.paths

    def _note(self, frame: Frame) -> None:
        for place, tensor in enumerate(frame.tensors):
            self._places.setdefault((tensor.item, tensor.name), []).append((frame.digest, place))


class Excerpt(msgspec.Struct, frozen=True, array_like=True):
    """Hold some boxes of an index on their way to another rank."""

    rank: int
    generation: str
    header_bytes: int
    header_digest: str
    objects: tuple[ObjectReference, ...]
    tensors: bytes
    table: bytes
    ends: bytes
    stops: bytes
    places: bytes
    offsets: bytes
    digests: bytes


def excerpt_of(index: StoredIndex, numbers: Sequence[int]) -> Excerpt:
    """Return some boxes of an index."""
    columns = index.columns.only(numbers)
    chunks = columns.chunks
    return Excerpt(
        rank=index.rank,
        generation=index.generation,
        header_bytes=index.header_bytes,
        header_digest=index.header_digest,
        objects=index.objects,
        tensors=zlib.compress(msgspec.msgpack.encode(columns.boxes.frame.tensors), 1),
        table=_packed(columns.boxes.table),
        ends=_packed(chunks.ends),
        stops=_packed(chunks.stops),
        places=_packed(chunks.objects),
        offsets=_packed(chunks.offsets),
        digests=chunks.digests.tobytes(),
    )


def index_from(excerpt: Excerpt) -> StoredIndex:
    """Return an index that holds the boxes of an excerpt, and no other."""
    tensors = msgspec.msgpack.decode(zlib.decompress(excerpt.tensors), type=tuple[HeldTensor, ...])
    ends, stops, places, offsets = map(_unpacked, (excerpt.ends, excerpt.stops, excerpt.places, excerpt.offsets))
    digests = numpy.frombuffer(excerpt.digests, numpy.uint8).reshape(-1, DIGEST_BYTES)
    boxes = columns_from(frame_of(tensors, {}), _unpacked(excerpt.table).reshape(2, -1))
    columns = IndexColumns(boxes, Chunks(ends, stops, places, offsets, digests))
    head = excerpt.rank, excerpt.generation, excerpt.header_bytes, excerpt.header_digest, excerpt.objects
    return StoredIndex(*head, _paths(excerpt.objects), columns)


def _places_alone(indexes: Sequence[StoredIndex], per_rank: frozenset[str]) -> dict[Key, int]:
    """Return the place of each tensor in the one index; nothing where there are several, of it or of its boxes."""
    if len(indexes) != 1:
        return {}
    tensors = indexes[0].boxes.frame.tensors
    places = dict(zip(map(attrgetter("item", "name"), tensors), range(len(tensors)), strict=True))
    is_alone = len(places) == len(tensors) and per_rank.isdisjoint(map(attrgetter("item"), tensors))
    return places if is_alone else {}


def _paths(objects: Sequence[ObjectReference]) -> tuple[str, ...]:
    return tuple(generation_path(one.generation, one.name) for one in objects)


def _packed(numbers: Table) -> bytes:
    return zlib.compress(numbers.astype(WIDE).tobytes(), 1)


def _unpacked(data: bytes) -> Any:
    return narrowed(numpy.frombuffer(zlib.decompress(data), WIDE))
