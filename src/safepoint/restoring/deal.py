"""Deal: each index is read by one rank for all, and each rank is told what it needs of the others'.

1. The leader tells each rank which indexes it reads. The ranks tell the leader what only all indexes together can
   prove: boxes in columns, and shares of digests. What is common to all ranks goes from the leader to all.
2. With as many ranks as there were, a rank has read its own index, and mostly needs no more. Else the leader finds in
   the columns which boxes a rank needs of indexes that others have read, and passes on what those tell of them.
3. So what a rank reads and hears does not grow with the number of ranks that saved, and no rank decodes the chunks of
   all. One process reads all indexes by itself, one after the other.

Spec: C10.6, C11.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import msgspec

from safepoint.format.index import ObjectReference
from safepoint.format.manifest import Manifest
from safepoint.format.names import generation_path, index_name
from safepoint.format.plain import encode_plain
from safepoint.format.plain_decoding import decode_plain
from safepoint.restoring.examine import Report, Share, examine_share, share_of
from safepoint.restoring.find import Needed, Task, Wanted, lacking, wanted_by
from safepoint.restoring.stored import Excerpt, StoredBoxes, excerpt_of, index_from
from safepoint.restoring.together import Ranks
from safepoint.restoring.union import Union, union_of_trees
from safepoint.restoring.validate import Common, Own, SavedState, check_headers, index_references, owned_items, state_of
from safepoint.restoring.whole import Whole, whole_of
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


class _Tree(msgspec.Struct, frozen=True, array_like=True):
    """Hold the plain tree that a rank stored of an item, as JSON."""

    item: str
    rank: int
    form: bytes


def told_manifest(ranks: Ranks, manifest: Manifest | None) -> Manifest | None:
    """Return a manifest as all ranks are told it: without its objects, of which there are some for each rank."""
    if manifest is None or ranks.world_size == 1:
        return manifest
    return msgspec.structs.replace(manifest, objects=())


def deal_state(ranks: Ranks, storage: Storage, manifest: Manifest, *, full: Sequence[Manifest]) -> SavedState:
    """Return the saved state of a committed generation, as this rank sees it.

    Args:
        ranks: Those that restore together.
        storage: Where the run lies.
        manifest: The manifest as all ranks know it.
        full: The whole of it; on the leader alone.

    Raises:
        CorruptionError: An index is damaged or contradicts the manifest or another one; a tensor is not whole.
        ObjectMissingError: One went away since the manifest was read.

    Spec: C10.6, C11.
    """
    share, wholes = _examined(ranks, storage, manifest, full)
    told = _common(ranks, manifest, share, wholes)
    # A tree that one rank alone decodes may be one that cannot be decoded.
    return ranks.all(lambda: _state(ranks, storage, manifest, share, told, wholes))


def deal_boxes(ranks: Ranks, saved: SavedState, targets: Targets) -> SavedState:
    """Return the saved state with the boxes that this rank's targets need.

    Every rank calls this, with whatever targets it has. One process knows all boxes already.

    Spec: C11.
    """
    share = saved.share
    if ranks.world_size == 1 or share is None:
        return saved
    needed: list[Needed] = []
    own: list[Wanted] = []

    def wants() -> list[Wanted]:
        own.extend(lacking(wanted_by(saved, targets), share, owned_items(saved.manifest)))
        return own

    def found(parts: list[list[Wanted]]) -> bool:
        # Only the leader merges, and it knows the whole.
        assert saved.whole is not None
        needed.append(Needed(saved.manifest, saved.whole, parts))
        return needed[0].is_any

    if not ranks.collected(wants, found, part=list[Wanted], kind=bool):
        return saved
    tasks = ranks.dealt(lambda rank: needed[0].tasks_of(rank, ranks.world_size), list[Task])
    passed: list[dict[str, list[Excerpt]]] = []
    ranks.collected(lambda: _excerpts(share, tasks), passed.extend, part=dict[str, list[Excerpt]], kind=type(None))
    told = ranks.told(
        needed[0].names if needed else (),
        own[0].digest if own else "",
        lambda name: [excerpt for part in passed for excerpt in part.get(name, ())],
        list[Excerpt],
    )
    indexes = (*share.indexes, *map(index_from, told))
    return replace(saved, indexes=indexes, tensors=_boxes_of(saved, indexes, ranks))


def _examined(
    ranks: Ranks, storage: Storage, manifest: Manifest, full: Sequence[Manifest]
) -> tuple[Share, list[Whole]]:
    """Return what this rank has read of the indexes, and on the leader what all say together."""
    count, wholes, shares = manifest.world_size, list[Whole](), list[Share]()
    listed: list[ObjectReference] = []

    def references_of(rank: int) -> list[ObjectReference]:
        if not listed:
            listed.extend(index_references(full[0]))
        own = share_of(rank, ranks.world_size, count)
        return listed[own.start : own.stop]

    references = ranks.dealt(references_of, list[ObjectReference])

    def read() -> Report:
        own = share_of(ranks.rank, ranks.world_size, count)
        keeps_own = count == ranks.world_size
        shares.append(examine_share(storage, manifest, references, own, keeps_own=keeps_own))
        # The leader needs no message for its own boxes.
        return shares[0].report(manifest, with_boxes=ranks.rank != 0)

    def prove(reports: list[Report]) -> None:
        wholes.append(whole_of(full[0], shares[0], reports))

    ranks.collected(read, prove, part=Report, kind=type(None))
    return shares[0], wholes


def _state(
    ranks: Ranks,
    storage: Storage,
    manifest: Manifest,
    share: Share,
    told: Mapping[str, Common | _CommonTold],
    wholes: Sequence[Whole],
) -> SavedState:
    """Return the saved state as this rank sees it, with the boxes that it has read."""
    common = {
        name: one if isinstance(one, Common) else _heard(one, f"{manifest.generation}: {name}")
        for name, one in told.items()
    }
    is_same_size = manifest.world_size == ranks.world_size
    own = _own(manifest, share, common, ranks.rank) if is_same_size else Own({}, {})
    saved = state_of(manifest, common, own, rank=ranks.rank, world_size=ranks.world_size)
    is_alone = manifest.world_size == ranks.world_size == 1
    saved = replace(
        saved,
        indexes=share.indexes,
        tensors=_boxes_of(saved, share.indexes, ranks),
        forms={name: trees[0] for name, trees in share.trees.items()} if is_alone else {},
        share=share,
        whole=wholes[0] if wholes else None,
    )
    if is_alone:
        check_headers(storage, saved)
    return saved


def _common(
    ranks: Ranks, manifest: Manifest, share: Share, wholes: Sequence[Whole]
) -> Mapping[str, Common | _CommonTold]:
    """Return what all ranks are given of each item that is not each rank's own; on the others as they are told it."""
    asked = ranks.led(lambda: dict(wholes[0].trees), dict[str, tuple[int, ...]])
    found: dict[str, Common] = {}

    def place_of(rank: int) -> str:
        return generation_path(manifest.generation, index_name(rank, manifest.world_size))

    def put_together(by_item: Mapping[str, Mapping[int, Any]]) -> dict[str, Common]:
        for name, by_rank in by_item.items():
            trees = [decode_plain(by_rank[rank], where=f"{place_of(rank)}: {name}") for rank in sorted(by_rank)]
            is_one = wholes[0].tree_counts[name] == 1
            found[name] = Common(union_of_trees(trees), is_one, wholes[0].specs.get(name, {}))
        return found

    if ranks.world_size == 1:
        return put_together({name: {rank: share.trees[name][rank] for rank in own} for name, own in asked.items()})

    def trees() -> list[_Tree]:
        return [
            _Tree(name, rank, msgspec.json.encode(share.trees[name][rank]))
            for name, wanted in asked.items()
            for rank in wanted
            if rank in share.trees.get(name, ())
        ]

    def joined(parts: list[list[_Tree]]) -> dict[str, _CommonTold]:
        by_item: dict[str, dict[int, Any]] = {}
        for tree in (tree for part in parts for tree in part):
            by_item.setdefault(tree.item, {})[tree.rank] = json.loads(tree.form)
        return {name: _told(one) for name, one in put_together(by_item).items()}

    heard = ranks.collected(trees, joined, part=list[_Tree], kind=dict[str, _CommonTold])
    return found or heard


def _own(manifest: Manifest, share: Share, common: Mapping[str, Common], rank: int) -> Own:
    """Return what a rank is given of what it saved itself."""
    path = generation_path(manifest.generation, index_name(rank, manifest.world_size))
    trees = {
        name: decode_plain(by_rank[rank], where=f"{path}: {name}")
        for name, by_rank in share.trees.items()
        # A tree that one rank alone stored is all ranks'.
        if rank in by_rank and not (name in common and common[name].is_one)
    }
    specs: dict[str, dict[str, TensorSpec]] = {}
    for tensor in share.indexes[0].boxes.frame.tensors:
        if tensor.item not in common:
            shape = tensor.global_shape
            spec = TensorSpec(tensor.name, tensor.dtype, shape, shape, (0,) * len(shape))
            specs.setdefault(tensor.item, {})[tensor.name] = spec
    return Own(trees, specs)


def _boxes_of(saved: SavedState, indexes: Sequence[Any], ranks: Ranks) -> StoredBoxes:
    manifest = saved.manifest
    specs = {name: item.specs for name, item in saved.items.items()}
    return StoredBoxes(
        specs, indexes, owned_items(manifest), ranks.rank if manifest.world_size == ranks.world_size else None
    )


def _excerpts(share: Share, tasks: Sequence[Task]) -> dict[str, list[Excerpt]]:
    by_rank = {index.rank: index for index in share.indexes}
    found: dict[str, list[Excerpt]] = {}
    for task in tasks:
        found.setdefault(task.name, []).append(excerpt_of(by_rank[task.rank], task.numbers))
    return found


def _told(one: Common) -> _CommonTold:
    # Integers of any size go through JSON, as they do on disk.
    tree = msgspec.json.encode(encode_plain(one.trees.tree))
    specs = tuple(_Spec(spec.name, spec.dtype, spec.global_shape) for spec in one.specs.values())
    return _CommonTold(tree, one.trees.contradictions, one.is_one, specs)


def _heard(told: _CommonTold, where: str) -> Common:
    tree = decode_plain(json.loads(told.tree), where=where)
    specs = {
        one.name: TensorSpec(one.name, one.dtype, one.shape, one.shape, (0,) * len(one.shape)) for one in told.specs
    }
    return Common(Union(tree, told.contradictions), told.is_one, specs)
