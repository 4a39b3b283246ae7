"""Write: make this rank's objects durable. Nothing here makes a checkpoint exist.

If we die in this phase, the generation's folder has no manifest: garbage, never a checkpoint.

Spec: C3.
"""

from __future__ import annotations

from safepoint.format.digest import digest_bytes
from safepoint.format.encoding import seal
from safepoint.format.index import ObjectReference
from safepoint.format.names import generation_path, index_name
from safepoint.saving.stage import StagedRank
from safepoint.storage.base import Storage

_PIECE_BYTES = 8 << 20


def write(storage: Storage, staged: StagedRank) -> tuple[ObjectReference, ...]:
    """Write this rank's data file and index, sync both and their folder, and return what is now durable.

    A failed sync is final for this attempt: the generation is given up and its name never used again.

    Raises:
        StorageError: Something could not be written or synced.

    Spec: C3.
    """
    index = staged.index
    generation = index.generation
    (data_reference,) = (entry for entry in index.objects if entry.generation == generation)
    _write_object(storage, generation_path(generation, data_reference.name), staged.data)
    text = seal(index)
    name = index_name(index.rank, index.world_size)
    _write_object(storage, generation_path(generation, name), memoryview(text))
    storage.sync_folder(generation_path(generation))
    ancestors = tuple(entry for entry in index.objects if entry.generation != generation)
    return (data_reference, ObjectReference(generation, name, len(text), digest_bytes(text)), *ancestors)


def _write_object(storage: Storage, path: str, data: memoryview) -> None:
    writer = storage.create(path)
    is_durable = False
    try:
        for start in range(0, len(data), _PIECE_BYTES):
            writer.write(data[start : start + _PIECE_BYTES])
        writer.finish()
        is_durable = True
    finally:
        if not is_durable:
            writer.abandon()
