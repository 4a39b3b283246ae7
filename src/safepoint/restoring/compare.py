"""Compare: what two checkpoints have in common, item by item and tensor by tensor.

1. Tensors whose chunks have equal rows and digests are equal; they are not read. That their bytes are what the
   records say is for the caller to see to, by `verify_generation`.
2. What is read is checked by digest first: a difference is never damage.
3. At most one chunk of each side is held; a tensor that the two sides cut into other boxes is held whole.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Literal

from safepoint.catalog import Generation
from safepoint.errors import CorruptionError
from safepoint.format.digest import digest_bytes
from safepoint.format.dtypes import DTYPES
from safepoint.format.extent import Box, element_count
from safepoint.format.index import Chunk, Index, Tensor
from safepoint.format.manifest import Manifest
from safepoint.format.plain import decode_plain
from safepoint.restoring.boxes import StoredBox, boxes_by_tensor, check_boxes, copy_overlap, element_bytes_of
from safepoint.restoring.checking import check_chunk
from safepoint.restoring.trees import LeafDifference, differing_values
from safepoint.restoring.union import union_of_trees
from safepoint.restoring.validate import read_indexes
from safepoint.restoring.values import Distance, measure
from safepoint.storage.base import Storage

Verdict = Literal["equal", "values", "type", "shape", "only_first", "only_second"]
Key = tuple[str, str]


@dataclass(frozen=True, slots=True)
class TensorComparison:
    """Say how one tensor of an item compares; `first` and `second` describe it by type and shape."""

    item: str
    name: str
    verdict: Verdict
    first: str = ""
    second: str = ""
    elements: int = 0
    distance: Distance = field(default_factory=Distance)


@dataclass(frozen=True, slots=True)
class PlainComparison:
    """Name one plain value of an item that differs, by its path in the item's state."""

    item: str
    difference: LeafDifference


@dataclass(frozen=True, slots=True)
class Comparison:
    """Hold everything that two checkpoints have in common and not."""

    tensors: tuple[TensorComparison, ...]
    plain: tuple[PlainComparison, ...]
    items: tuple[str, ...]
    only_first: tuple[str, ...]
    only_second: tuple[str, ...]

    @property
    def is_equal(self) -> bool:
        """Return whether all tensors have equal bits and all plain values are the same."""
        differs = any(tensor.verdict != "equal" for tensor in self.tensors)
        return not (differs or self.plain or self.only_first or self.only_second)


@dataclass(frozen=True, slots=True)
class _Side:
    storage: Storage
    manifest: Manifest
    indexes: tuple[Index, ...]


@dataclass(frozen=True, slots=True)
class _Part:
    """Name one box of a tensor and where its bytes lie."""

    storage: Storage
    stored: StoredBox

    @property
    def tensor(self) -> Tensor:
        return self.stored.tensor

    @property
    def row_bytes(self) -> int:
        return element_count(self.tensor.shape[1:]) * element_bytes_of(self.tensor)


def compare_checkpoints(
    storage: Storage, generation: Generation, other_storage: Storage, other_generation: Generation
) -> Comparison:
    """Return what differs between two committed generations, of one run or of two.

    Raises:
        CorruptionError: A checkpoint is damaged where it had to be read.
        StorageError: A storage does not answer.
    """
    first, second = _open(storage, generation), _open(other_storage, other_generation)
    items = [name for name in first.manifest.items if name in second.manifest.items]
    return Comparison(
        tensors=tuple(_compare_tensors(_parts(first, items), _parts(second, items))),
        plain=tuple(_compare_plain(first, second, items)),
        items=tuple(items),
        only_first=tuple(name for name in first.manifest.items if name not in second.manifest.items),
        only_second=tuple(name for name in second.manifest.items if name not in first.manifest.items),
    )


def _open(storage: Storage, generation: Generation) -> _Side:
    manifest = generation.manifest
    if manifest is None:
        reason = generation.refusal.reason if generation.refusal is not None else "there is no manifest"
        raise CorruptionError("a checkpoint cannot be compared", where=generation.text, found=reason)
    return _Side(storage, manifest, tuple(read_indexes(storage, manifest)))


def _parts(side: _Side, items: list[str]) -> dict[Key, list[_Part]]:
    found: dict[Key, list[_Part]] = {}
    for key, boxes in boxes_by_tensor(side.manifest, side.indexes).items():
        if key.item in items:
            check_boxes(boxes, where=f"{side.manifest.generation}: {key}")
            name = str(key).removeprefix(f"{key.item}/")
            parts = [_Part(side.storage, one) for one in boxes if element_count(one.tensor.shape)]
            parts = parts or [_Part(side.storage, boxes[0])]
            found[key.item, name] = sorted(parts, key=lambda part: part.tensor.offset)
    return found


def _compare_tensors(first: Mapping[Key, list[_Part]], second: Mapping[Key, list[_Part]]) -> Iterator[TensorComparison]:
    for key in [*first, *(key for key in second if key not in first)]:
        item, name = key
        if key not in second:
            yield TensorComparison(item, name, "only_first", first=_described(first[key]))
        elif key not in first:
            yield TensorComparison(item, name, "only_second", second=_described(second[key]))
        else:
            yield _compare_tensor(item, name, first[key], second[key])


def _compare_tensor(item: str, name: str, first: list[_Part], second: list[_Part]) -> TensorComparison:
    one, other = first[0].tensor, second[0].tensor
    count = element_count(one.global_shape)
    sides = _described(first), _described(second)
    if one.dtype != other.dtype:
        return TensorComparison(item, name, "type", *sides, count)
    if one.global_shape != other.global_shape:
        return TensorComparison(item, name, "shape", *sides, count)
    distance = Distance()
    if [part.stored.box for part in first] == [part.stored.box for part in second]:
        for part, counterpart in zip(first, second, strict=True):
            distance = distance.joined(_compare_box(part, counterpart))
    else:
        distance = measure(one.dtype, element_bytes_of(one), _assembled(first), _assembled(second))
    return TensorComparison(item, name, "values" if distance.differing else "equal", *sides, count, distance)


def _compare_box(first: _Part, second: _Part) -> Distance:
    """Walk both sides' chunks at once; where their rows do not meet, each is read once and compared in parts."""
    chunks, others = list(first.tensor.chunks), list(second.tensor.chunks)
    distance, row = Distance(), 0
    held: dict[int, tuple[Chunk, memoryview]] = {}
    while chunks:
        one, other = chunks[0], others[0]
        stop = min(one.rows[1], other.rows[1])
        if (one.rows, one.digest) != (other.rows, other.digest):
            sides = []
            for part, chunk in ((first, one), (second, other)):
                if held.get(id(part), (None,))[0] is not chunk:
                    held[id(part)] = chunk, _read_chunk(part, chunk)
                begin = (row - chunk.rows[0]) * part.row_bytes
                sides.append(held[id(part)][1][begin : begin + (stop - row) * part.row_bytes])
            dtype = DTYPES[first.tensor.dtype]
            distance = distance.joined(measure(dtype.name, dtype.size_bytes, *sides))
        row = stop
        chunks = chunks[1:] if one.rows[1] == stop else chunks
        others = others[1:] if other.rows[1] == stop else others
    return distance


def _assembled(parts: list[_Part]) -> memoryview:
    """Return a whole tensor, put together from its boxes."""
    tensor = parts[0].tensor
    element_bytes = element_bytes_of(tensor)
    box = Box((0,) * len(tensor.global_shape), tensor.global_shape)
    whole = memoryview(bytearray(element_count(tensor.global_shape) * element_bytes))
    for part in parts:
        for chunk in part.tensor.chunks:
            copy_overlap(_read_chunk(part, chunk), part.stored.box_of(chunk), whole, box, element_bytes)
    return whole


def _read_chunk(part: _Part, chunk: Chunk) -> memoryview:
    path = part.stored.paths[chunk.object]
    memory = memoryview(bytearray(chunk.size_bytes))
    part.storage.read_into(path, chunk.offset_bytes, memory)
    check_chunk(digest_bytes(memory), chunk, part.tensor, path)
    return memory


def _compare_plain(first: _Side, second: _Side, items: list[str]) -> Iterator[PlainComparison]:
    for item in items:
        one, other = _plain_trees(first, item), _plain_trees(second, item)
        for place in [*one, *(place for place in other if place not in one)]:
            for difference in differing_values(one.get(place), other.get(place), place):
                yield PlainComparison(item, difference)


def _plain_trees(side: _Side, item: str) -> dict[str, object]:
    """Return an item's plain tree, by rank where each has its own values; trees of parts are put together."""
    trees = {
        index.rank: decode_plain(index.items[item].plain, where=f"{side.manifest.generation}: {item}")
        for index in side.indexes
        if item in index.items
    }
    union = union_of_trees(list(trees.values())) if trees else None
    if side.manifest.items[item].kind == "per_rank" or (union is not None and union.contradictions):
        return {f"rank {rank}": tree for rank, tree in trees.items()}
    return {"": union.tree} if union is not None else {}


def _described(parts: list[_Part]) -> str:
    tensor = parts[0].tensor
    return f"{tensor.dtype} {list(tensor.global_shape)}"
