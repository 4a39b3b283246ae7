"""Validate: everything that can be known of a checkpoint without reading its tensors, before anything is touched.

1. Each index is the one that the manifest names; together they name the items of the manifest, with its digests, and
   make every tensor whole: see `safepoint.restoring.examine` and `safepoint.restoring.whole`.
2. What a rank is given of an item is its own where each rank had its own, and the common state otherwise.

Spec: C11.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from safepoint.errors import CorruptionError
from safepoint.format.digest import digest_bytes
from safepoint.format.encoding import INDEX_LIMIT_BYTES
from safepoint.format.index import Index, ObjectReference, decode_index
from safepoint.format.manifest import ItemSummary, Manifest
from safepoint.format.names import MANIFEST, generation_path, index_name
from safepoint.restoring.boxes import StoredBox
from safepoint.restoring.union import Union, union_of_trees
from safepoint.state.item import STREAMS_ITEM, SavedItem, TensorSpec
from safepoint.storage.base import Storage

if TYPE_CHECKING:
    # The commands that read indexes run without numpy, which these need.
    from safepoint.restoring.examine import Share
    from safepoint.restoring.stored import StoredIndex
    from safepoint.restoring.whole import Whole

HEADER_LIMIT_BYTES = 100_000_000

References = Mapping[tuple[str, str], ObjectReference]


@dataclass(frozen=True, slots=True)
class SavedState:
    """Hold what a checkpoint says of all items to one rank, and where each tensor's boxes lie.

    1. `ownerless` names the items of which each rank had its own and none of them is this rank's, because their number
       is another one; `elsewhere` those that this rank did not have at the save, of as many ranks, and others did.
    2. `divided` names those of which this rank may hold a part; `contradictions` the places at which the ranks' values
       differ, of the user's, where none of them is this rank's own.
    3. `derived` names items of random streams that had no owner, and were given streams made of the saved ones.
    4. `tensors` are the boxes that this rank has read of or was told, of `indexes`. `share` is what it read of them for
       all ranks, and the leader knows the `whole`.
    5. `forms` are the plain trees in JSON form where there was one process and is one, until it is restored.
    """

    manifest: Manifest
    items: Mapping[str, SavedItem]
    indexes: tuple[StoredIndex, ...] = ()
    tensors: Mapping[tuple[str, str], Sequence[StoredBox]] = field(default_factory=dict)
    ownerless: tuple[str, ...] = ()
    elsewhere: frozenset[str] = frozenset()
    divided: frozenset[str] = frozenset()
    contradictions: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    derived: tuple[str, ...] = ()
    forms: Mapping[str, Any] = field(default_factory=dict)
    share: Share | None = None
    whole: Whole | None = None


@dataclass(frozen=True, slots=True)
class Common:
    """Hold what all ranks are given of an item that is not each rank's own.

    `trees` are the plain trees that ranks stored, put together; `is_one` says that all of them are one tree.
    """

    trees: Union
    is_one: bool
    specs: Mapping[str, TensorSpec]


@dataclass(frozen=True, slots=True)
class Own:
    """Hold what one rank saved itself: its plain trees where ranks had different ones, and tensors of its own items."""

    trees: Mapping[str, object]
    specs: Mapping[str, Mapping[str, TensorSpec]]


def state_of(manifest: Manifest, common: Mapping[str, Common], own: Own, *, rank: int, world_size: int) -> SavedState:
    """Return the saved state as one rank sees it, without its boxes."""
    is_same_size = manifest.world_size == world_size
    items: dict[str, SavedItem] = {}
    ownerless: list[str] = []
    elsewhere, divided = set[str](), set[str]()
    contradictions: dict[str, tuple[str, ...]] = {}
    for name, summary in manifest.items.items():
        if not is_same_size and _is_owned(name, summary, manifest):
            ownerless.append(name)
            continue
        if summary.kind == "per_rank":
            if name in own.trees:
                items[name] = SavedItem(summary.type, own.trees[name], own.specs.get(name, {}))
            continue
        if is_same_size and summary.ranks is not None and rank not in summary.ranks:
            elsewhere.add(name)
        one = common[name]
        union = one.trees
        if not one.is_one and name in own.trees:
            # In a tree that is its own the rank finds no other's values.
            union = Union(union_of_trees([own.trees[name], union.tree], is_first_own=True).tree, ())
        items[name] = SavedItem(summary.type, union.tree, one.specs)
        if world_size > 1 and not (one.is_one and is_same_size):
            divided.add(name)
        if union.contradictions:
            contradictions[name] = union.contradictions
    return SavedState(
        manifest,
        items,
        ownerless=tuple(ownerless),
        elsewhere=frozenset(elsewhere),
        divided=frozenset(divided),
        contradictions=contradictions,
    )


def without_owner(saved: SavedState, names: Collection[str], *, world_size: int) -> SavedState:
    """Return the saved state in which these items, too, belong to the ranks that saved them and to no others.

    Spec: C11.6.
    """
    taken = [name for name in names if name in saved.items and name not in saved.derived]
    if saved.manifest.world_size == world_size or not taken:
        return saved
    items = {name: item for name, item in saved.items.items() if name not in taken}
    return replace(saved, items=items, ownerless=(*saved.ownerless, *sorted(taken)))


def kept_of(saved: SavedState, *, world_size: int) -> SavedState:
    """Return what is kept of a state that was restored, to give it to items that are registered later.

    Several ranks deal boxes out to each other for them. One has all it needs in the decoded trees and the columns; what
    it was made of would be gone through by each collection of cycles.
    """
    return replace(saved, forms={}, share=None, whole=None) if world_size == 1 else saved


def read_indexes(storage: Storage, manifest: Manifest) -> list[Index]:
    """Return the index of each rank, checked against the manifest; see `read_index`."""
    references = references_of(manifest)
    return [read_index(storage, manifest, references, rank=rank) for rank, _ in enumerate(index_references(manifest))]


def read_index(storage: Storage, manifest: Manifest, references: References, *, rank: int) -> Index:
    """Return a rank's index, having checked it against the manifest's size and digest.

    Args:
        storage: Where the run lies.
        manifest: The manifest.
        references: What `references_of` returned for it.
        rank: Whose index.

    Raises:
        CorruptionError: It is damaged, or it is not the one that the manifest names.

    Spec: C11.
    """
    name = index_name(rank, manifest.world_size)
    text = read_text(storage, _reference(manifest, references, manifest.generation, name))
    index = decode_text(manifest, rank, text)
    check_objects(manifest, references, index.objects)
    return index


def read_text(storage: Storage, reference: ObjectReference) -> bytes:
    """Return the text of an index, having compared it with the size and digest that the manifest states.

    Raises:
        CorruptionError: It is damaged, or it is not the one that the manifest names.
        ObjectMissingError: It went away since the manifest was read.
    """
    path = generation_path(reference.generation, reference.name)
    data = storage.read(path, limit_bytes=min(reference.size_bytes, INDEX_LIMIT_BYTES))
    found = digest_bytes(data)
    if found != reference.digest:
        raise CorruptionError(
            "an index does not match its manifest", where=path, expected=reference.digest, found=found
        )
    return data


def decode_text(
    manifest: Manifest, rank: int, data: bytes, *, are_boxes_sound: Callable[[Index], bool] = lambda index: False
) -> Index:
    """Return a rank's index from its text, of the manifest's generation; see `decode_index`."""
    path = generation_path(manifest.generation, index_name(rank, manifest.world_size))
    index = decode_index(data, where=path, are_boxes_sound=are_boxes_sound)
    if (index.generation, index.rank, index.world_size) != (manifest.generation, rank, manifest.world_size):
        raise CorruptionError("an index belongs to another generation or rank", where=path, found=index.generation)
    return index


def check_objects(manifest: Manifest, references: References, named: Iterable[ObjectReference]) -> None:
    """Raise `CorruptionError` unless the manifest names what indexes name, with the same sizes and digests.

    Spec: F7.4.
    """
    for entry in named:
        if entry != _reference(manifest, references, entry.generation, entry.name):
            where = generation_path(manifest.generation, MANIFEST)
            raise CorruptionError("an index names another object than the manifest", where=where, found=entry)


def check_items_of(manifest: Manifest, index: Index) -> None:
    """Raise `CorruptionError` unless the manifest names the items of an index, as it does."""
    if index.items.keys() - manifest.items.keys():
        raise contradiction(manifest, index.rank, "the manifest names other items")
    for name, item in index.items.items():
        if item.type != manifest.items[name].type:
            raise contradiction(manifest, index.rank, f"item {name!r} has another type in the manifest")
        holders = manifest.items[name].ranks
        if holders is not None and index.rank not in holders:
            raise contradiction(manifest, index.rank, f"item {name!r} is none of this rank's in the manifest")
    for name in {tensor.item for tensor in index.tensors} - manifest.items.keys():
        found = f"a stored tensor belongs to item {name!r:.80}, which is none of the manifest's"
        raise contradiction(manifest, index.rank, found)


def index_references(manifest: Manifest) -> list[ObjectReference]:
    """Return what a manifest states of the index of each rank, in their order.

    Raises:
        CorruptionError: It does not name one of them.
    """
    references = references_of(manifest)
    # The world size is only a number that the manifest states: what it lists bounds the work.
    ranks = range(min(manifest.world_size, len(manifest.objects) + 1))
    names = (index_name(rank, manifest.world_size) for rank in ranks)
    return [_reference(manifest, references, manifest.generation, name) for name in names]


def references_of(manifest: Manifest) -> References:
    """Return the objects of a manifest by generation and name."""
    return {(reference.generation, reference.name): reference for reference in manifest.objects}


def check_headers(storage: Storage, saved: SavedState, paths: Collection[str] | None = None) -> None:
    """Check the bytes of data files' headers; the indexes were checked for themselves when they were decoded.

    Args:
        storage: Where the run lies.
        saved: The saved state.
        paths: The files that this rank is going to read; all of the generation's own for None.

    Raises:
        CorruptionError: A header is damaged.
        ObjectMissingError: A file is not there.

    Spec: C11.
    """
    checked: set[str] = set()
    for index in saved.indexes:
        for reference in index.objects:
            path = generation_path(reference.generation, reference.name)
            is_asked = paths is None or path in paths
            if reference.generation != index.generation or not is_asked or path in checked:
                continue
            checked.add(path)
            if index.header_bytes > HEADER_LIMIT_BYTES:
                raise contradiction(saved.manifest, index.rank, f"a header of {index.header_bytes} bytes")
            header = bytearray(index.header_bytes)
            storage.read_into(path, 0, memoryview(header))
            found = digest_bytes(header)
            if found != index.header_digest:
                raise CorruptionError(
                    "a data file's header is damaged", where=path, expected=index.header_digest, found=found
                )


def owned_items(manifest: Manifest) -> frozenset[str]:
    """Return the items of which each rank has its own."""
    return frozenset(name for name, summary in manifest.items.items() if summary.kind == "per_rank")


def _is_owned(name: str, summary: ItemSummary, manifest: Manifest) -> bool:
    """Return whether a state belongs to the ranks that saved it, and to no others.

    The global random streams of a run of one process are that process's own, though nothing differed from them.
    """
    return summary.kind == "per_rank" or (name == STREAMS_ITEM and manifest.world_size == 1)


def _reference(manifest: Manifest, references: References, generation: str, name: str) -> ObjectReference:
    found = references.get((generation, name))
    if found is None:
        where = generation_path(manifest.generation, MANIFEST)
        raise CorruptionError("a manifest does not name an object it needs", where=where, expected=name)
    return found


def contradiction(manifest: Manifest, rank: int, found: str) -> CorruptionError:
    """Return the error that an index, by its rank, and the manifest do not go together."""
    path = generation_path(manifest.generation, index_name(rank, manifest.world_size))
    return CorruptionError("an index and its manifest contradict each other", where=path, found=found)
