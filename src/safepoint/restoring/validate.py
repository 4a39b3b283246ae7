"""Validate: everything that can be known of a checkpoint without reading its tensors, before anything is touched.

1. The texts of the indexes are read once, by one process; all ranks judge the same bytes.
2. Each index is the one that the manifest names; together they name the items of the manifest, with its digests, and
   make every tensor whole.
3. What a rank is given of an item is its own where each rank had its own, and the common state otherwise.

Spec: C11.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

from safepoint.errors import CorruptionError
from safepoint.format.digest import digest_bytes
from safepoint.format.encoding import INDEX_LIMIT_BYTES
from safepoint.format.index import Index, ObjectReference, decode_index
from safepoint.format.manifest import ItemSummary, Manifest
from safepoint.format.names import MANIFEST, generation_path, index_name
from safepoint.format.plain_decoding import decode_plain
from safepoint.restoring.boxes import StoredBox, TensorKey, boxes_by_tensor, check_boxes
from safepoint.restoring.digests import other_digests
from safepoint.restoring.union import Union, union_of_trees
from safepoint.state.item import STREAMS_ITEM, SavedItem, TensorSpec
from safepoint.storage.base import Storage

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
    4. Of several ranks one knows the `indexes` and boxes that it needs, and the leader all that was `examined`.
    """

    manifest: Manifest
    indexes: tuple[Index, ...]
    items: Mapping[str, SavedItem]
    tensors: Mapping[tuple[str, str], tuple[StoredBox, ...]]
    ownerless: tuple[str, ...] = ()
    elsewhere: frozenset[str] = frozenset()
    divided: frozenset[str] = frozenset()
    contradictions: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    derived: tuple[str, ...] = ()
    examined: Examined | None = None


@dataclass(frozen=True, slots=True)
class Examined:
    """Hold the indexes of a checkpoint, checked as far as that can be done without its tensors, and where boxes lie."""

    manifest: Manifest
    indexes: tuple[Index, ...]
    tensors: Mapping[TensorKey, tuple[StoredBox, ...]]


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


def validate(manifest: Manifest, texts: Sequence[bytes], *, rank: int = 0, world_size: int = 1) -> SavedState:
    """Return the saved state of a committed generation, as one rank sees it, with all of its boxes.

    Args:
        manifest: The manifest.
        texts: What `read_index_texts` returned, here or on another rank.
        rank: The rank that is to be restored.
        world_size: The number of ranks of the job now.

    Raises:
        CorruptionError: An index is damaged or contradicts the manifest or another one; a tensor is not whole.

    Spec: C11.
    """
    examined = examine(manifest, texts)
    own = own_of(examined, rank, world_size=world_size)
    saved = state_of(manifest, common_of(examined), own, rank=rank, world_size=world_size)
    owner = rank if manifest.world_size == world_size else None
    tensors = {
        (key.item, key.name): parts
        for key, parts in examined.tensors.items()
        if key.item in saved.items and key.rank in (None, owner)
    }
    return replace(saved, indexes=examined.indexes, tensors=tensors, examined=examined)


def examine(manifest: Manifest, texts: Sequence[bytes]) -> Examined:
    """Return the indexes of a committed generation, having checked them against the manifest and each other.

    Raises:
        CorruptionError: An index is damaged or contradicts the manifest or another one; a tensor is not whole.

    Spec: C11.
    """
    indexes = tuple(decode_indexes(manifest, texts))
    _check_items(manifest, indexes)
    tensors = boxes_by_tensor(manifest, indexes)
    for key, parts in tensors.items():
        check_boxes(parts, where=f"{manifest.generation}: {key}")
    return Examined(manifest, indexes, tensors)


def common_of(examined: Examined) -> dict[str, Common]:
    """Return what all ranks are given, by item."""
    specs = _specs(examined, None)
    found = {}
    for name, summary in examined.manifest.items.items():
        if summary.kind == "per_rank":
            continue
        trees = [_decoded(examined.manifest, index, name) for index in examined.indexes if name in index.items]
        found[name] = Common(union_of_trees(trees), len(trees) == 1, specs.get(name, {}))
    return found


def own_of(examined: Examined, rank: int, *, world_size: int) -> Own:
    """Return what a rank is given of what it saved itself; nothing where the ranks are others."""
    manifest = examined.manifest
    if manifest.world_size != world_size:
        return Own({}, {})
    index = examined.indexes[rank]
    # A tree that one rank alone stored is all ranks'.
    return Own({name: _decoded(manifest, index, name) for name in index.items}, _specs(examined, rank))


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
        manifest, (), items, {}, tuple(ownerless), frozenset(elsewhere), frozenset(divided), contradictions
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


def read_index_texts(
    storage: Storage, manifest: Manifest, *, told: Callable[[Callable[[], bytes]], bytes] = lambda read: read()
) -> list[bytes]:
    """Return the text of each rank's index, having compared it with the manifest's size and digest.

    Args:
        storage: Where the run lies.
        manifest: The manifest.
        told: Gives the text that a function reads, which may be called on another rank. One text is asked for at a
            time: together they may be larger than any message.

    Raises:
        CorruptionError: One is damaged, or it is not the one that the manifest names.
        ObjectMissingError: One went away since the manifest was read.

    Spec: C11.
    """
    references = references_of(manifest)
    return [told(partial(_read_text, storage, manifest, rank, references)) for rank in _ranks(manifest)]


def decode_indexes(manifest: Manifest, texts: Sequence[bytes]) -> Iterator[Index]:
    """Yield each rank's index from its text, having checked it against the manifest.

    Raises:
        CorruptionError: One is damaged, or it is not the one that the manifest names.

    Spec: C11.
    """
    references = references_of(manifest)
    if len(texts) != manifest.world_size:
        found = f"{len(texts)} of {manifest.world_size} indexes"
        raise CorruptionError("not every rank has an index", where=manifest.generation, found=found)
    for rank, text in enumerate(texts):
        yield _decode(manifest, rank, text, references)


def read_indexes(storage: Storage, manifest: Manifest) -> list[Index]:
    """Return the index of each rank, checked against the manifest; see `read_index_texts` and `decode_indexes`."""
    return list(decode_indexes(manifest, read_index_texts(storage, manifest)))


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
    return _decode(manifest, rank, _read_text(storage, manifest, rank, references), references)


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
    for index in saved.indexes:
        for reference in index.objects:
            path = generation_path(reference.generation, reference.name)
            if reference.generation != index.generation or (paths is not None and path not in paths):
                continue
            if index.header_bytes > HEADER_LIMIT_BYTES:
                raise _contradiction(saved.manifest, index, f"a header of {index.header_bytes} bytes")
            header = bytearray(index.header_bytes)
            storage.read_into(path, 0, memoryview(header))
            found = digest_bytes(header)
            if found != index.header_digest:
                raise CorruptionError(
                    "a data file's header is damaged", where=path, expected=index.header_digest, found=found
                )


def _check_items(manifest: Manifest, indexes: Sequence[Index]) -> None:
    listed: set[str] = set()
    for index in indexes:
        listed |= index.items.keys()
        strange = index.items.keys() - manifest.items.keys()
        if strange:
            raise _contradiction(manifest, index, "the manifest names other items")
        for name, item in index.items.items():
            if item.type != manifest.items[name].type:
                raise _contradiction(manifest, index, f"item {name!r} has another type in the manifest")
            holders = manifest.items[name].ranks
            if holders is not None and index.rank not in holders:
                raise _contradiction(manifest, index, f"item {name!r} is none of this rank's in the manifest")
    if listed != manifest.items.keys():
        raise _contradiction(manifest, indexes[0], "the manifest names other items")
    for name, _ in other_digests(manifest, indexes):
        raise _contradiction(manifest, indexes[0], f"item {name!r} has another digest in the manifest")


def _is_owned(name: str, summary: ItemSummary, manifest: Manifest) -> bool:
    """Return whether a state belongs to the ranks that saved it, and to no others.

    The global random streams of a run of one process are that process's own, though nothing differed from them.
    """
    return summary.kind == "per_rank" or (name == STREAMS_ITEM and manifest.world_size == 1)


def _whole(part: StoredBox) -> TensorSpec:
    tensor = part.tensor
    return TensorSpec(
        tensor.name, tensor.dtype, tensor.global_shape, tensor.global_shape, (0,) * len(tensor.global_shape)
    )


def _specs(examined: Examined, owner: int | None) -> dict[str, dict[str, TensorSpec]]:
    """Return by item and name the tensors that are the ranks' in common, or one rank's own."""
    found: dict[str, dict[str, TensorSpec]] = {}
    for key, parts in examined.tensors.items():
        if key.rank == owner:
            found.setdefault(key.item, {})[key.name] = _whole(parts[0])
    return found


def _decoded(manifest: Manifest, index: Index, name: str) -> object:
    path = generation_path(manifest.generation, index_name(index.rank, index.world_size))
    return decode_plain(index.items[name].plain, where=f"{path}: {name}")


def _ranks(manifest: Manifest) -> Iterable[int]:
    # The world size is only a number that the manifest states: what it lists bounds the work.
    return range(min(manifest.world_size, len(manifest.objects) + 1))


def _read_text(storage: Storage, manifest: Manifest, rank: int, references: References) -> bytes:
    name = index_name(rank, manifest.world_size)
    reference = _reference(manifest, references, manifest.generation, name)
    path = generation_path(manifest.generation, name)
    data = storage.read(path, limit_bytes=min(reference.size_bytes, INDEX_LIMIT_BYTES))
    _check_digest(data, reference, path)
    return data


def _decode(manifest: Manifest, rank: int, data: bytes, references: References) -> Index:
    name = index_name(rank, manifest.world_size)
    path = generation_path(manifest.generation, name)
    _check_digest(data, _reference(manifest, references, manifest.generation, name), path)
    index = decode_index(data, where=path)
    if (index.generation, index.rank, index.world_size) != (manifest.generation, rank, manifest.world_size):
        raise CorruptionError("an index belongs to another generation or rank", where=path, found=index.generation)
    for entry in index.objects:
        if entry != _reference(manifest, references, entry.generation, entry.name):
            raise CorruptionError("an index names another object than the manifest", where=path, found=entry)
    return index


def _check_digest(data: bytes, reference: ObjectReference, path: str) -> None:
    found = digest_bytes(data)
    if found != reference.digest:
        raise CorruptionError(
            "an index does not match its manifest", where=path, expected=reference.digest, found=found
        )


def _reference(manifest: Manifest, references: References, generation: str, name: str) -> ObjectReference:
    found = references.get((generation, name))
    if found is None:
        where = generation_path(manifest.generation, MANIFEST)
        raise CorruptionError("a manifest does not name an object it needs", where=where, expected=name)
    return found


def _contradiction(manifest: Manifest, index: Index, found: str) -> CorruptionError:
    path = generation_path(manifest.generation, index_name(index.rank, index.world_size))
    return CorruptionError("an index and its manifest contradict each other", where=path, found=found)
