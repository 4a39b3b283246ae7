"""Describe: the index of a rank, from the form of its data file and the digests that were taken as it was written.

Spec: F3, F7.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from safepoint.format.digest import digest_file
from safepoint.format.index import Chunk, Index, IndexedItem, ObjectReference, Tensor
from safepoint.format.names import data_name
from safepoint.format.state_digest import item_digest, rank_share
from safepoint.saving.form import Entry, FileForm
from safepoint.state.snapshot import SnapshotItem


@dataclass(frozen=True, slots=True)
class Place:
    """Say whose part is saved, in which generation, and of which items this rank stores the plain trees.

    `per_rank` names the items of which each rank stores its own state; `has_own_tree` those of which each rank stores
    its own tree.
    """

    generation: str
    rank: int
    world_size: int
    trees: frozenset[str]
    per_rank: frozenset[str] = frozenset()
    has_own_tree: frozenset[str] = frozenset()


def index_of(form: FileForm, digests: Sequence[str], items: Sequence[SnapshotItem], place: Place) -> Index:
    """Return a rank's index.

    Args:
        form: What its data file looks like.
        digests: Those of the form's extents, the header's first.
        items: The items of the snapshot.
        place: Whose index this is.
    """
    header_digest, *chunk_digests = digests
    left = iter(chunk_digests)
    tensors = tuple(_tensor(entry, [next(left) for _ in entry.chunks]) for entry in form.entries)
    name = data_name(place.rank, place.world_size)
    digest = digest_file(header_digest, chunk_digests)
    return Index(
        generation=place.generation,
        rank=place.rank,
        world_size=place.world_size,
        header_bytes=len(form.header),
        header_digest=header_digest,
        objects=(ObjectReference(place.generation, name, form.size_bytes, digest),),
        items={item.name: IndexedItem(item.type, item.plain) for item in items if item.name in place.trees},
        tensors=tensors,
    )


def shares_of(index: Index, place: Place) -> dict[str, str]:
    """Return what this rank adds to the digest of each item that it stored anything of.

    Of a world of one rank, it is that digest.

    Spec: F7.3, F7.5.
    """
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


def _tensor(entry: Entry, digests: Sequence[str]) -> Tensor:
    box = entry.box
    chunks = tuple(
        Chunk(chunk.rows, 0, chunk.offset_bytes, chunk.size_bytes, digest)
        for chunk, digest in zip(entry.chunks, digests, strict=True)
    )
    return Tensor(box.item, box.name, box.dtype, box.global_shape, box.offset, box.shape, chunks)
