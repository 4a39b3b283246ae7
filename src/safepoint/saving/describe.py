"""Describe: the index of a rank, from the form of its data file and the digests that were taken as it was written.

Spec: F3, F7.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import msgspec

from safepoint.format.digest import digest_file
from safepoint.format.encoding import seal
from safepoint.format.index import Chunk, Index, ObjectReference, Tensor
from safepoint.format.names import data_name
from safepoint.format.state_digest import item_digest, rank_share
from safepoint.saving.form import FileForm
from safepoint.saving.increment import Increment
from safepoint.saving.wording import Wording
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


@dataclass(frozen=True, slots=True)
class Description:
    """Hold the text of a rank's index, the data objects that it names, and what the rank adds to each item's digest.

    `record` makes the index itself.
    """

    text: bytes | bytearray
    objects: tuple[ObjectReference, ...]
    shares: dict[str, str]
    record: Callable[[], Index]


def describe(
    form: FileForm, digests: Sequence[str], items: Sequence[SnapshotItem], place: Place, increment: Increment
) -> Description:
    """Describe what a rank has written.

    Args:
        form: What its data file looks like.
        digests: Those of the form's extents, the header's first.
        items: The items of the snapshot.
        place: Whose part this is.
        increment: What lies in ancestors' files.
    """
    record = partial(index_of, form, digests, items, place, increment)
    if form.wording is None:
        index = record()
        return Description(seal(index), index.objects, shares_of(index, place), lambda: index)
    # All but the digests is known from the save before.
    head, chunk_digests = _head(form, digests, items, place), digests[1:]
    shares = _shares_in_words(form.wording, head, chunk_digests, place)
    return Description(form.wording.seal(head, chunk_digests), head.objects, shares, record)


def index_of(
    form: FileForm, digests: Sequence[str], items: Sequence[SnapshotItem], place: Place, increment: Increment
) -> Index:
    """Return a rank's index; the arguments are those of `describe`."""
    head, chunk_digests = _head(form, digests, items, place), digests[1:]
    (own,) = head.objects
    offsets = (chunk.offset_bytes for entry in form.entries for chunk in entry.chunks)
    written = iter(zip(offsets, chunk_digests, strict=True))
    kept = iter(increment.kept)
    numbers = {own: 0}
    tensors = []
    for entry in increment.whole.entries:
        chunks = []
        for chunk in entry.chunks:
            stored = next(kept)
            reference = own if stored is None else stored.reference
            number = numbers.setdefault(reference, len(numbers))
            offset, chunk_digest = next(written) if stored is None else (stored.offset_bytes, stored.digest)
            chunks.append(Chunk(chunk.rows, number, offset, chunk.size_bytes, chunk_digest))
        box = entry.box
        tensors.append(Tensor(box.item, box.name, box.dtype, box.global_shape, box.offset, box.shape, tuple(chunks)))
    return msgspec.structs.replace(head, objects=tuple(numbers), tensors=tuple(tensors))


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
        tree, tree_of, boxes_of = _terms(index, name, place)
        shares[name] = rank_share(tree, tensors, tree_of=tree_of, boxes_of=boxes_of)
    return shares


def _shares_in_words(wording: Wording, head: Index, digests: Sequence[str], place: Place) -> dict[str, str]:
    """Return `shares_of` the index with this head whose boxes have this wording."""
    if place.world_size == 1:
        return {name: wording.digest_of(name, item, digests) for name, item in head.items.items()}
    shares = {}
    for name in dict.fromkeys([*head.items, *wording.shared]):
        tree, tree_of, boxes_of = _terms(head, name, place)
        shares[name] = wording.share_of(name, tree, digests, tree_of=tree_of, boxes_of=boxes_of)
    return shares


def _terms(index: Index, name: str, place: Place) -> tuple[tuple[Any] | None, int | None, int | None]:
    """Return of an item its tree, if this rank stores it, and this rank where the tree, and the boxes, are its own."""
    tree = (index.items[name].plain,) if name in index.items else None
    tree_of = place.rank if name in place.has_own_tree else None
    return tree, tree_of, place.rank if name in place.per_rank else None


def _head(form: FileForm, digests: Sequence[str], items: Sequence[SnapshotItem], place: Place) -> Index:
    """Return a rank's index without its tensors, of a file that refers to no other."""
    header_digest, *chunk_digests = digests
    name = data_name(place.rank, place.world_size)
    digest = digest_file(header_digest, chunk_digests)
    return Index(
        generation=place.generation,
        rank=place.rank,
        world_size=place.world_size,
        header_bytes=len(form.header),
        header_digest=header_digest,
        objects=(ObjectReference(place.generation, name, form.size_bytes, digest),),
        items={item.name: item.indexed for item in items if item.name in place.trees},
        tensors=(),
    )
