"""Validate: everything that can be known of a checkpoint without reading its tensors, before anything is touched.

Spec: C11.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from safepoint.errors import CorruptionError, MismatchError
from safepoint.format.digest import digest_bytes
from safepoint.format.encoding import INDEX_LIMIT_BYTES
from safepoint.format.index import Index, ObjectReference, Tensor, decode_index
from safepoint.format.manifest import Manifest
from safepoint.format.names import MANIFEST, generation_path, index_name
from safepoint.format.plain_decoding import decode_plain
from safepoint.format.state_digest import item_digest
from safepoint.state.item import SavedItem, TensorSpec
from safepoint.storage.base import Storage

HEADER_LIMIT_BYTES = 100_000_000


@dataclass(frozen=True, slots=True)
class SavedState:
    """Hold what a checkpoint says of all items, and where each tensor's chunks lie."""

    manifest: Manifest
    index: Index
    items: Mapping[str, SavedItem]
    tensors: Mapping[tuple[str, str], Tensor]

    def object_path(self, number: int) -> str:
        """Return the path of an object by its number in the index."""
        reference = self.index.objects[number]
        return generation_path(reference.generation, reference.name)


def validate(storage: Storage, manifest: Manifest) -> SavedState:
    """Return the saved state of a committed generation, having checked its index against its manifest and data file.

    Raises:
        CorruptionError: The index or a header is damaged or contradicts the manifest.
        MismatchError: The checkpoint was saved by several ranks.
        ObjectMissingError: An object went away since the manifest was read.

    Spec: C11.
    """
    if manifest.world_size != 1:
        raise MismatchError(
            "the checkpoint was saved by several ranks",
            where=manifest.generation,
            expected="world size 1",
            found=manifest.world_size,
            remedy="This version restores what one process saved.",
        )
    index = read_index(storage, manifest)
    if manifest.items.keys() != index.items.keys():
        raise _contradiction(manifest, index, "the manifest names other items")
    for name, _ in other_digests(manifest, index):
        raise _contradiction(manifest, index, f"item {name!r} has another digest in the manifest")
    _check_header(storage, manifest, index)
    specs: dict[str, dict[str, TensorSpec]] = {name: {} for name in index.items}
    for tensor in index.tensors:
        spec = TensorSpec(tensor.name, tensor.dtype, tensor.shape, tensor.global_shape, tensor.offset)
        specs[tensor.item][tensor.name] = spec
    path = generation_path(manifest.generation, index_name(index.rank, index.world_size))
    items = {
        name: SavedItem(item.type, decode_plain(item.plain, where=f"{path}: {name}"), specs[name])
        for name, item in index.items.items()
    }
    return SavedState(manifest, index, items, {(t.item, t.name): t for t in index.tensors})


def read_index(storage: Storage, manifest: Manifest, *, rank: int = 0) -> Index:
    """Return a rank's index, having checked it against the manifest's size and digest.

    Raises:
        CorruptionError: It is damaged, or it is not the one that the manifest names.

    Spec: C11.
    """
    name = index_name(rank, manifest.world_size)
    reference = _reference(manifest, manifest.generation, name)
    path = generation_path(manifest.generation, name)
    data = storage.read(path, limit_bytes=min(reference.size_bytes, INDEX_LIMIT_BYTES))
    if digest_bytes(data) != reference.digest:
        raise CorruptionError(
            "an index does not match its manifest", where=path, expected=reference.digest, found=digest_bytes(data)
        )
    index = decode_index(data, where=path)
    if (index.generation, index.rank, index.world_size) != (manifest.generation, rank, manifest.world_size):
        raise CorruptionError("an index belongs to another generation or rank", where=path, found=index.generation)
    for entry in index.objects:
        if entry != _reference(manifest, entry.generation, entry.name):
            raise CorruptionError("an index names another object than the manifest", where=path, found=entry)
    return index


def other_digests(manifest: Manifest, index: Index) -> Iterator[tuple[str, str]]:
    """Yield (item, digest as the index gives it) where the manifest states another; both name the same items."""
    for name, item in index.items.items():
        found = item_digest(item, [tensor for tensor in index.tensors if tensor.item == name])
        if found != manifest.items[name].digest:
            yield name, found


def _check_header(storage: Storage, manifest: Manifest, index: Index) -> None:
    """Check the bytes of the data file's header; the index was checked for itself when it was decoded."""
    if index.header_bytes > HEADER_LIMIT_BYTES:
        raise _contradiction(manifest, index, f"a header of {index.header_bytes} bytes")
    for reference in index.objects:
        if reference.generation != index.generation:
            continue
        path = generation_path(reference.generation, reference.name)
        header = bytearray(index.header_bytes)
        storage.read_into(path, 0, memoryview(header))
        found = digest_bytes(header)
        if found != index.header_digest:
            raise CorruptionError(
                "a data file's header is damaged", where=path, expected=index.header_digest, found=found
            )


def _reference(manifest: Manifest, generation: str, name: str) -> ObjectReference:
    for reference in manifest.objects:
        if (reference.generation, reference.name) == (generation, name):
            return reference
    where = generation_path(manifest.generation, MANIFEST)
    raise CorruptionError("a manifest does not name an object it needs", where=where, expected=name)


def _contradiction(manifest: Manifest, index: Index, found: str) -> CorruptionError:
    path = generation_path(manifest.generation, index_name(index.rank, index.world_size))
    return CorruptionError("an index and its manifest contradict each other", where=path, found=found)
