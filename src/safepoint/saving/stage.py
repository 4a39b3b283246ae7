"""Stage: copy the snapshot into memory of our own, laid out as the data file will lie on disk, and take its digests.

1. After this phase nothing of the checkpoint refers to live memory.
2. Digests are taken from the staged bytes, before any of them is written.
3. One buffer serves all saves of a manager: it grows to the largest snapshot and is used again.

Spec: F3.
"""

from __future__ import annotations

import json
import mmap
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import msgspec

from safepoint.format.digest import digest_bytes, digest_file
from safepoint.format.dtypes import DTYPES
from safepoint.format.extent import Shape
from safepoint.format.index import Index, IndexedItem, ObjectReference, Tensor, entry_keys
from safepoint.format.names import data_name
from safepoint.format.state_digest import item_digest, rank_share
from safepoint.saving.layout import LayoutBox, cut_digest
from safepoint.saving.pieces import Piece
from safepoint.state.snapshot import SnapshotItem, digest_chunks

ALIGNMENT_BYTES = 4096


class StagingBuffer:
    """Keep page-aligned memory that grows to what is asked for and is reused; owned by one save at a time."""

    def __init__(self) -> None:
        self._memory: mmap.mmap | None = None

    def view(self, size_bytes: int) -> memoryview:
        """Return writable memory of this size; its former content is void."""
        if self._memory is None or len(self._memory) < size_bytes:
            self._memory = mmap.mmap(-1, max(size_bytes, ALIGNMENT_BYTES))
        return memoryview(self._memory)[:size_bytes]


@dataclass(frozen=True, slots=True)
class Place:
    """Say whose part is staged, for which generation, and of which items this rank stores the plain trees.

    `per_rank` names the items of which each rank stores its own state; `has_own_tree` those of which each rank stores
    its own tree.
    """

    generation: str
    rank: int
    world_size: int
    trees: frozenset[str]
    per_rank: frozenset[str] = frozenset()
    has_own_tree: frozenset[str] = frozenset()


@dataclass(frozen=True, slots=True)
class StagedRank:
    """Hold one rank's part of a generation: the bytes of its data file and its index; refers to no live memory.

    `layout` is the digest of the boxes; `shares` are what this rank adds to the digest of each item, or, of a world of
    one rank, that digest.
    """

    data: memoryview
    index: Index
    shares: dict[str, str]
    layout: str


def stage(items: Sequence[SnapshotItem], pieces: Sequence[Piece], place: Place, *, buffer: StagingBuffer) -> StagedRank:
    """Copy a snapshot and describe the copy.

    Args:
        items: The snapshot's items.
        pieces: What this rank writes of their tensors; they are read here.
        place: Whose part this is.
        buffer: Where to copy to; it must not be used until the returned value is done with.

    Spec: F3.
    """
    placed = _place(pieces)
    header = encode_header(placed)
    size_bytes = len(header) + sum(piece.source.nbytes for piece, _ in placed)
    data = buffer.view(size_bytes)
    data[: len(header)] = header
    tensors = []
    for piece, start in placed:
        begin = len(header) + start
        piece.source.copy_into(data[begin : begin + piece.source.nbytes])
        tensors.append(_describe(piece, data, begin))
    header_digest = digest_bytes(header)
    digest = digest_file(header_digest, (chunk.digest for tensor in tensors for chunk in tensor.chunks))
    name = data_name(place.rank, place.world_size)
    index = Index(
        generation=place.generation,
        rank=place.rank,
        world_size=place.world_size,
        header_bytes=len(header),
        header_digest=header_digest,
        objects=(ObjectReference(place.generation, name, size_bytes, digest),),
        items={item.name: IndexedItem(item.type, item.plain) for item in items if item.name in place.trees},
        tensors=tuple(tensors),
    )
    return StagedRank(data, index, _shares(index, place), _layout(index))


def encode_header(placed: Sequence[tuple[Piece, int]]) -> bytes:
    """Return the safetensors header of a data file, padded so that data starts on a 4,096-byte line.

    Args:
        placed: What the file holds, each with its offset behind the header.

    Spec: F3.
    """
    entries: dict[str, object] = {"__metadata__": {"format": "pt"}}
    keys = entry_keys((piece.item, piece.spec.name, piece.spec.offset) for piece, _ in placed)
    for key, (piece, start) in zip(keys, placed, strict=True):
        dtype = DTYPES[piece.spec.dtype]
        shape = list(piece.spec.shape)
        if dtype.safetensors is None:
            shape.append(dtype.size_bytes)
        offsets = [start, start + piece.source.nbytes]
        entries[key] = {"dtype": dtype.safetensors or "U8", "shape": shape, "data_offsets": offsets}
    text = json.dumps(entries, separators=(",", ":"), ensure_ascii=True).encode("ascii")
    padding = -(8 + len(text)) % ALIGNMENT_BYTES
    return (len(text) + padding).to_bytes(8, "little") + text + b" " * padding


def boxes_digest(boxes: Iterable[Tensor | LayoutBox]) -> str:
    """Return the digest of how the tensors of one process lie: names, types, shapes and boxes in the order of the file.

    Of several ranks `cut_digest` tells that, which a leader can make for thousands.

    Spec: C4.
    """
    ordered = sorted(boxes, key=lambda box: _order(box.item, box.name, box.dtype, box.offset))
    rows = [[box.item, box.name, box.dtype, box.global_shape, box.offset, box.shape] for box in ordered]
    return digest_bytes(msgspec.json.encode(rows))


def _layout(index: Index) -> str:
    return boxes_digest(index.tensors) if index.world_size == 1 else cut_digest(index.tensors)


def _shares(index: Index, place: Place) -> dict[str, str]:
    """Return what this rank adds to the digest of each item that it stored anything of."""
    by_item: dict[str, list[Tensor]] = {name: [] for name in index.items}
    for tensor in index.tensors:
        by_item.setdefault(tensor.item, []).append(tensor)
    if place.world_size == 1:
        return {name: item_digest(index.items[name], tensors) for name, tensors in by_item.items()}
    shares = {}
    for name, tensors in by_item.items():
        tree = (index.items[name].plain,) if name in index.items else None
        tree_of = place.rank if name in place.has_own_tree else None
        boxes_of = place.rank if name in place.per_rank else None
        shares[name] = rank_share(tree, tensors, tree_of=tree_of, boxes_of=boxes_of)
    return shares


def _place(pieces: Sequence[Piece]) -> list[tuple[Piece, int]]:
    """Order pieces by falling item size, then name, and give each its offset behind the header; no holes."""
    ordered = sorted(pieces, key=lambda piece: _order(piece.item, piece.spec.name, piece.spec.dtype, piece.spec.offset))
    placed, end = [], 0
    for piece in ordered:
        placed.append((piece, end))
        end += piece.source.nbytes
    return placed


def _order(item: str, name: str, dtype: str, offset: Shape) -> tuple[int, str, str, Shape]:
    return (-DTYPES[dtype].size_bytes, item, name, offset)


def _describe(piece: Piece, data: memoryview, begin: int) -> Tensor:
    spec = piece.spec
    chunks = digest_chunks(spec, data[begin : begin + piece.source.nbytes], begin=begin)
    return Tensor(piece.item, spec.name, spec.dtype, spec.global_shape, spec.offset, spec.shape, chunks)
