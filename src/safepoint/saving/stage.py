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
from safepoint.format.index import Index, IndexedItem, ObjectReference, Tensor
from safepoint.format.manifest import ItemSummary
from safepoint.format.names import data_name
from safepoint.format.state_digest import item_digest
from safepoint.state.item import CapturedTensor
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
class StagedRank:
    """Hold one rank's part of a generation: the bytes of its data file and its index; refers to no live memory."""

    data: memoryview
    index: Index
    summaries: dict[str, ItemSummary]
    layout: str


def stage(
    items: Sequence[SnapshotItem], *, generation: str, rank: int, world_size: int, buffer: StagingBuffer
) -> StagedRank:
    """Copy a snapshot and describe the copy.

    Args:
        items: The snapshot's items; their tensors are read here.
        generation: The name of the generation that this becomes.
        buffer: Where to copy to; it must not be used until the returned value is done with.

    Spec: F3.
    """
    placed = _place([(item.name, tensor) for item in items for tensor in item.tensors])
    header = encode_header([(item, tensor, start) for item, tensor, start in placed])
    size_bytes = len(header) + sum(tensor.source.nbytes for _, tensor, _ in placed)
    data = buffer.view(size_bytes)
    data[: len(header)] = header
    tensors = []
    for item, tensor, start in placed:
        begin = len(header) + start
        tensor.source.copy_into(data[begin : begin + tensor.source.nbytes])
        tensors.append(_describe(item, tensor, data, begin))
    header_digest = digest_bytes(header)
    digest = digest_file(header_digest, (chunk.digest for tensor in tensors for chunk in tensor.chunks))
    index = Index(
        generation=generation,
        rank=rank,
        world_size=world_size,
        header_bytes=len(header),
        header_digest=header_digest,
        objects=(ObjectReference(generation, data_name(rank, world_size), size_bytes, digest),),
        items={item.name: IndexedItem(item.type, item.plain) for item in items},
        tensors=tuple(tensors),
    )
    return StagedRank(data, index, summarise(index), layout_digest(index))


def encode_header(placed: Iterable[tuple[str, CapturedTensor, int]]) -> bytes:
    """Return the safetensors header of a data file, padded so that data starts on a 4,096-byte line.

    Spec: F3.
    """
    entries: dict[str, object] = {"__metadata__": {"format": "pt"}}
    for item, tensor, start in placed:
        dtype = DTYPES[tensor.spec.dtype]
        shape = list(tensor.spec.shape)
        if dtype.safetensors is None:
            shape.append(dtype.size_bytes)
        offsets = [start, start + tensor.source.nbytes]
        entries[f"{item}/{tensor.spec.name}"] = {
            "dtype": dtype.safetensors or "U8",
            "shape": shape,
            "data_offsets": offsets,
        }
    text = json.dumps(entries, separators=(",", ":"), ensure_ascii=True).encode("ascii")
    padding = -(8 + len(text)) % ALIGNMENT_BYTES
    return (len(text) + padding).to_bytes(8, "little") + text + b" " * padding


def summarise(index: Index) -> dict[str, ItemSummary]:
    """Return what the manifest says of each item: type, number and bytes of tensors, and the digest of its state."""
    by_item: dict[str, list[Tensor]] = {name: [] for name in index.items}
    for tensor in index.tensors:
        by_item[tensor.item].append(tensor)
    return {
        name: ItemSummary(
            type=item.type,
            kind="global",
            tensors=len(by_item[name]),
            size_bytes=sum(chunk.size_bytes for tensor in by_item[name] for chunk in tensor.chunks),
            digest=item_digest(item, by_item[name]),
        )
        for name, item in index.items.items()
    }


def layout_digest(index: Index) -> str:
    """Return the digest of how the tensors are cut: names, types, shapes and boxes, without any content.

    Spec: C4.
    """
    rows = [[t.item, t.name, t.dtype, t.global_shape, t.offset, t.shape] for t in index.tensors]
    return digest_bytes(msgspec.json.encode(rows))


def _place(tensors: list[tuple[str, CapturedTensor]]) -> list[tuple[str, CapturedTensor, int]]:
    """Order tensors by falling item size, then name, and give each its offset behind the header; no holes."""
    tensors.sort(key=lambda pair: (-DTYPES[pair[1].spec.dtype].size_bytes, pair[0], pair[1].spec.name))
    placed, end = [], 0
    for item, tensor in tensors:
        placed.append((item, tensor, end))
        end += tensor.source.nbytes
    return placed


def _describe(item: str, tensor: CapturedTensor, data: memoryview, begin: int) -> Tensor:
    spec = tensor.spec
    chunks = digest_chunks(spec, data[begin : begin + tensor.source.nbytes], begin=begin)
    return Tensor(item, spec.name, spec.dtype, spec.global_shape, spec.offset, spec.shape, chunks)
