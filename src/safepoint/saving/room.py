"""Room: a save that cannot fit is refused before anything is copied or written.

1. The question is one call of the file system at a save. A storage that does not tell is not asked twice, and one that
   fails to answer refuses nothing: the write itself finds out.
2. What is predicted is a lower bound: each rank its own file; the leader the tensors of all, where all are written.
   Other programs may take the room meanwhile, and what is predicted to fit may still fail.
3. Nothing is deleted for it. What retention has marked goes at the next committed save, and counts as taken.
"""

from __future__ import annotations

import errno
import logging

from safepoint.catalog import list_generations, read_lineage, read_tombstone
from safepoint.errors import SafepointError, StorageError
from safepoint.format.names import generation_path
from safepoint.saving.divide import Division
from safepoint.saving.form import ALIGNMENT_BYTES
from safepoint.storage.base import Storage

_UNITS = ((10**12, "TB"), (10**9, "GB"), (10**6, "MB"), (10**3, "kB"))

_log = logging.getLogger(__name__)


def check_room(storage: Storage, own_bytes: int, *, division: Division | None, rank: int, world_size: int) -> None:
    """Raise `StorageError` where a save needs more than the storage has free.

    Args:
        storage: Where the run lies.
        own_bytes: The size of the data file that this rank is about to write.
        division: What all ranks write, on the leader, if they write all of it; else None.
        rank: This rank.
        world_size: The number of ranks.
    """
    try:
        free_bytes = storage.free_bytes()
    except StorageError as exc:
        _log.debug("how much room there is could not be told: %s", exc)
        return
    total_bytes = own_bytes
    if division is not None:
        # The header of a data file takes one line at least.
        total_bytes = max(own_bytes, sum(division.sizes_bytes.values()) + world_size * ALIGNMENT_BYTES)
    if free_bytes is None or total_bytes <= free_bytes:
        return
    whose = f"{_text(own_bytes)} of rank {rank}" if world_size > 1 else "one rank"
    expected = f"{_text(total_bytes)} free, predicted for {whose}"
    if world_size > 1 and division is not None:
        expected = f"{_text(total_bytes)} free, predicted for {world_size} ranks, {whose} among them"
    raise StorageError(
        "a save was not begun, for it would not fit: the disk is full or nearly so",
        where=storage.url,
        expected=expected,
        found=f"{_text(free_bytes)} free; {_marked(storage)}",
        remedy="Free space on this file system, or keep fewer checkpoints; what was committed before is untouched.",
        errno=errno.ENOSPC,
    )


def _marked(storage: Storage) -> str:
    """Say how much of what is taken retention has let go already; it goes at a committed save only."""
    try:
        lineage = read_lineage(storage)
        names = [str(name) for name in list_generations(storage)]
        folders = [generation_path(name) for name in names if read_tombstone(storage, name, lineage) is not None]
        size_bytes = sum(entry.size_bytes for folder in folders for entry in storage.list(folder))
    except SafepointError as exc:
        return f"whether retention would free some could not be told: {exc}"
    if not size_bytes:
        return "nothing more is marked for deletion"
    return (
        f"{_text(size_bytes)} more are marked for deletion, which goes after a committed save "
        "or by `safepoint prune RUN --keep-last N`"
    )


def _text(size_bytes: int) -> str:
    for unit, name in _UNITS:
        if size_bytes >= unit:
            return f"{size_bytes / unit:.1f} {name}"
    return f"{size_bytes} B"
