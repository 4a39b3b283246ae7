"""An item at one boundary, and the digest of its state.

Knows nothing of torch: the tensors are seen through their sources.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import msgspec

from safepoint.format.digest import digest_bytes
from safepoint.format.dtypes import DTYPES
from safepoint.format.extent import element_count, split_rows
from safepoint.format.index import Chunk, IndexedItem, Tensor
from safepoint.format.state_digest import item_digest
from safepoint.state.item import CapturedTensor, Item, TensorSpec


@dataclass(frozen=True, slots=True)
class SnapshotItem:
    """Hold one item: its type, the text of its plain tree, and the tensors that still lie in live memory.

    `division` and `leaders` are as in `CapturedItem`.
    """

    name: str
    type: str
    tree: bytes
    tensors: tuple[CapturedTensor, ...]
    division: str = ""
    leaders: frozenset[str] = frozenset()

    @property
    def plain(self) -> Any:
        """Return the plain tree in JSON form."""
        return msgspec.json.decode(self.tree)

    @property
    def indexed(self) -> IndexedItem:
        """Return the item as an index holds it."""
        return IndexedItem(self.type, msgspec.Raw(self.tree))


def capture_item(item: Item) -> SnapshotItem:
    """Return the state of one item now, its plain tree encoded.

    Raises:
        RequestError: A value cannot be stored; named by its path.
    """
    captured = item.capture()
    return SnapshotItem(item.name, captured.type, captured.tree, captured.tensors, captured.division, captured.leaders)


def digest_chunks(spec: TensorSpec, data: memoryview, *, begin: int = 0) -> tuple[Chunk, ...]:
    """Return the chunks of a box whose bytes are `data`, as they lie in a file from `begin` on, each with its digest.

    Spec: F3.
    """
    element_bytes = DTYPES[spec.dtype].size_bytes
    row_bytes = element_count(spec.shape[1:]) * element_bytes
    return tuple(
        Chunk(
            rows=(start, stop),
            object=0,
            offset_bytes=begin + start * row_bytes,
            size_bytes=(stop - start) * row_bytes,
            digest=digest_bytes(data[start * row_bytes : stop * row_bytes]),
        )
        for start, stop in split_rows(spec.shape, element_bytes)
    )


def digest_state(item: SnapshotItem) -> str:
    """Return the digest of an item's state, read from live memory one tensor at a time.

    Equal to the digest that a manifest states for the item if and only if the state is the one saved.

    Spec: F7.
    """
    tensors = []
    for tensor in item.tensors:
        data = memoryview(bytearray(tensor.source.nbytes))
        tensor.source.copy_into(data)
        spec = tensor.spec
        chunks = digest_chunks(spec, data)
        tensors.append(Tensor(item.name, spec.name, spec.dtype, spec.global_shape, spec.offset, spec.shape, chunks))
    return item_digest(item.indexed, tensors)
