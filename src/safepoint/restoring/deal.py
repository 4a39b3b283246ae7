"""Deal: the leader reads the indexes, and each rank is told of them what it needs.

1. Indexes are read and examined once per job. What is common to all ranks goes to all; what a rank saved itself, and
   which stored boxes its own boxes need, go to that rank alone. So what a rank hears does not grow with the number of
   ranks that saved.
2. The boxes are dealt when all ranks know their targets. What a rank is told of another's index is that index without
   its trees and without the boxes that the rank does not need.

Spec: C10.6, C11.
"""

from __future__ import annotations

import json
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import msgspec

from safepoint.format.extent import Box
from safepoint.format.index import Index
from safepoint.format.manifest import Manifest
from safepoint.format.plain import encode_plain
from safepoint.format.plain_decoding import decode_plain
from safepoint.restoring.boxes import StoredBox, TensorKey, boxes_by_tensor, overlap
from safepoint.restoring.plan import target_boxes
from safepoint.restoring.together import Ranks
from safepoint.restoring.union import Union
from safepoint.restoring.validate import (
    Common,
    Examined,
    Own,
    SavedState,
    check_headers,
    common_of,
    examine,
    own_of,
    read_index_texts,
    state_of,
    validate,
)
from safepoint.state.item import TensorSpec, TensorTarget
from safepoint.storage.base import Storage

Targets = Mapping[str, Mapping[str, TensorTarget]]


class _Spec(msgspec.Struct, frozen=True, array_like=True):
    """Describe a whole tensor."""

    name: str
    dtype: str
    shape: tuple[int, ...]


class _CommonTold(msgspec.Struct, frozen=True, array_like=True):
    tree: bytes
    contradictions: tuple[str, ...]
    is_one: bool
    specs: tuple[_Spec, ...]


class _OwnTold(msgspec.Struct, frozen=True, array_like=True):
    trees: dict[str, bytes]
    specs: dict[str, tuple[_Spec, ...]]


class _Wanted(msgspec.Struct, frozen=True, array_like=True):
    """Name the boxes that a rank fills of one tensor."""

    item: str
    name: str
    boxes: tuple[tuple[tuple[int, ...], tuple[int, ...]], ...]


def told_manifest(ranks: Ranks, manifest: Manifest | None) -> Manifest | None:
    """Return a manifest as all ranks are told it: without its objects, of which there are some for each rank."""
    if manifest is None or ranks.world_size == 1:
        return manifest
    return msgspec.structs.replace(manifest, objects=())


def deal_state(ranks: Ranks, storage: Storage, manifest: Manifest, *, full: Sequence[Manifest]) -> SavedState:
    """Return the saved state of a committed generation, as this rank sees it; of several ranks without its boxes.

    Args:
        ranks: Those that restore together.
        storage: Where the run lies; read on the leader alone.
        manifest: The manifest as all ranks know it.
        full: The whole of it; on the leader alone.

    Raises:
        CorruptionError: An index is damaged or contradicts the manifest or another one; a tensor is not whole.
        ObjectMissingError: One went away since the manifest was read.

    Spec: C10.6, C11.
    """
    if ranks.world_size == 1:
        saved = validate(manifest, read_index_texts(storage, manifest))
        if manifest.world_size == 1:
            check_headers(storage, saved)
        return saved
    examined: list[Examined] = []

    def common() -> dict[str, _CommonTold]:
        (whole,) = full
        examined.append(examine(whole, read_index_texts(storage, whole)))
        return {name: _told(one) for name, one in common_of(examined[0]).items()}

    heard = ranks.led(common, dict[str, _CommonTold])
    own = ranks.dealt(lambda rank: _told_own(own_of(examined[0], rank, world_size=ranks.world_size)), _OwnTold)
    where = manifest.generation
    saved = state_of(
        manifest,
        {name: _common(one, f"{where}: {name}") for name, one in heard.items()},
        Own(
            {name: decode_plain(json.loads(tree), where=f"{where}: {name}") for name, tree in own.trees.items()},
            {name: _specs(specs) for name, specs in own.specs.items()},
        ),
        rank=ranks.rank,
        world_size=ranks.world_size,
    )
    return replace(saved, examined=examined[0] if examined else None)


def deal_boxes(ranks: Ranks, saved: SavedState, targets: Targets) -> SavedState:
    """Return the saved state with the boxes that this rank's targets need.

    Every rank calls this, with whatever targets it has. One process knows all boxes already.

    Spec: C11.
    """
    if ranks.world_size == 1:
        return saved
    wanted: list[list[_Wanted]] = []

    def wants() -> list[_Wanted]:
        return [
            _Wanted(item, name, tuple((one.box.offset, one.box.shape) for one in target_boxes(target, shape, name)))
            for item, by_name in targets.items()
            for name, target in by_name.items()
            for shape in [saved.items[item].specs[name].global_shape]
        ]

    # Any: what the leader keeps is no answer.
    def keep(parts: list[list[_Wanted]]) -> Any:
        wanted.extend(parts)
        return []

    ranks.joined(wants, keep, list[_Wanted])
    needed = _Needed(saved.examined)
    indexes = ranks.dealt(lambda rank: needed.by(rank, wanted[rank]), list[Index])
    boxes = boxes_by_tensor(saved.manifest, indexes)
    return replace(saved, indexes=tuple(indexes), tensors={(key.item, key.name): parts for key, parts in boxes.items()})


class _Needed:
    """Find the stored boxes that ranks need; on the leader."""

    def __init__(self, examined: Examined | None) -> None:
        self._examined = examined
        self._rows: dict[TensorKey, tuple[list[int], list[StoredBox], int]] = {}

    def by(self, rank: int, wanted: Sequence[_Wanted]) -> list[Index]:
        """Return the indexes that name the boxes that a rank needs, without all else."""
        if self._examined is None:
            return []
        found: dict[int, list[StoredBox]] = {}
        for one in wanted:
            is_own = self._examined.manifest.items[one.item].kind == "per_rank"
            key = TensorKey(one.item, one.name, rank if is_own else None)
            for part in self._of(key, [Box(*box) for box in one.boxes]):
                found.setdefault(part.rank, []).append(part)
        return [
            msgspec.structs.replace(
                self._examined.indexes[number], items={}, tensors=tuple(part.tensor for part in found[number])
            )
            for number in sorted(found)
        ]

    def _of(self, key: TensorKey, boxes: Sequence[Box]) -> list[StoredBox]:
        starts, parts, longest = self._by_row(key)
        found: dict[int, StoredBox] = {}
        for box in boxes:
            first, last = 0, len(parts)
            if box.offset:
                first = bisect_left(starts, box.offset[0] - longest + 1)
                last = bisect_left(starts, box.offset[0] + box.shape[0])
            found.update((place, parts[place]) for place in range(first, last) if overlap(parts[place].box, box))
        # What a tensor is, its first box tells, also where none is needed.
        return list(found.values()) or parts[:1]

    def _by_row(self, key: TensorKey) -> tuple[list[int], list[StoredBox], int]:
        if key not in self._rows:
            parts = list(self._examined.tensors[key]) if self._examined is not None else []
            parts.sort(key=lambda part: part.tensor.offset[:1])
            starts = [part.tensor.offset[0] for part in parts if part.tensor.offset]
            longest = max((part.tensor.shape[0] for part in parts if part.tensor.shape), default=0)
            self._rows[key] = starts, parts, longest
        return self._rows[key]


def _told(one: Common) -> _CommonTold:
    return _CommonTold(_text(one.trees.tree), one.trees.contradictions, one.is_one, _listed(one.specs))


def _told_own(own: Own) -> _OwnTold:
    return _OwnTold(
        {name: _text(tree) for name, tree in own.trees.items()},
        {name: _listed(specs) for name, specs in own.specs.items()},
    )


def _common(told: _CommonTold, where: str) -> Common:
    tree = decode_plain(json.loads(told.tree), where=where)
    return Common(Union(tree, told.contradictions), told.is_one, _specs(told.specs))


def _text(tree: object) -> bytes:
    # Integers of any size go through JSON, as they do on disk.
    return msgspec.json.encode(encode_plain(tree))


def _listed(specs: Mapping[str, TensorSpec]) -> tuple[_Spec, ...]:
    return tuple(_Spec(spec.name, spec.dtype, spec.global_shape) for spec in specs.values())


def _specs(listed: Sequence[_Spec]) -> dict[str, TensorSpec]:
    return {one.name: TensorSpec(one.name, one.dtype, one.shape, one.shape, (0,) * len(one.shape)) for one in listed}
