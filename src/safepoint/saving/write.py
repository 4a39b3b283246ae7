"""Write: make this rank's objects durable. Nothing here makes a checkpoint exist.

If we die in this phase, the generation's folder has no manifest: garbage, never a checkpoint. An attempt that fails
takes its objects away, so that a disk that is full does not stay so.

Spec: C3.
"""

from __future__ import annotations

import logging

from safepoint.errors import CorruptionError, StorageError
from safepoint.format.digest import digest_bytes
from safepoint.format.encoding import seal
from safepoint.format.index import Index, ObjectReference
from safepoint.format.names import MANIFEST, data_name, generation_path, index_name
from safepoint.saving.stage import StagedRank
from safepoint.storage.base import Storage

_PIECE_BYTES = 8 << 20

_log = logging.getLogger(__name__)


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


def discard(storage: Storage, index: Index) -> None:
    """Delete what this rank wrote for an attempt that failed, and the folder if it is empty then; best effort.

    To be called only where no manifest was or will be published for it; should one be there all the same, nothing is
    deleted. If we die in here, the rest is swept like that of any save that was never completed.

    Spec: C3.3.
    """
    folder = generation_path(index.generation)
    own = (data_name(index.rank, index.world_size), index_name(index.rank, index.world_size))
    try:
        names = {entry.name for entry in storage.list(folder)}
        if MANIFEST in names:
            return
        for name in names.intersection(own):
            storage.delete(f"{folder}/{name}")
        # Other ranks take theirs away at the same time; the last one finds the folder empty.
        if names.issubset(own) or not storage.list(folder):
            storage.delete_folder(folder)
    except (StorageError, CorruptionError) as exc:
        _log.warning("what a failed save had written stays for now: %s", exc)


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
