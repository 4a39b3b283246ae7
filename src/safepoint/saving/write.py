"""Write: make this rank's objects durable. Nothing here makes a checkpoint exist.

If we die in this phase, the generation's folder has no manifest: garbage, never a checkpoint. An attempt that fails
takes its objects away, so that a disk that is full does not stay so.

Spec: C3.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from safepoint.errors import CorruptionError, StorageError
from safepoint.format.digest import digest_bytes
from safepoint.format.encoding import INDEX_LIMIT_BYTES, check_length
from safepoint.format.index import Index, ObjectReference
from safepoint.format.names import MANIFEST, data_name, generation_path, index_name
from safepoint.saving.describe import Description, Place, describe
from safepoint.saving.form import FileForm
from safepoint.saving.increment import Increment
from safepoint.saving.pour import Origin, Spent, pour
from safepoint.state.snapshot import SnapshotItem
from safepoint.storage.base import Storage
from safepoint.storage.naming import names_in

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Stored:
    """Hold what one rank made durable: its objects, and what it adds to the digest of each item.

    `objects` are followed by those of ancestors that the index names; `index` makes that, and is absent where nothing
    was stored.
    """

    objects: tuple[ObjectReference, ...] = ()
    shares: dict[str, str] = field(default_factory=dict)
    index: Callable[[], Index] | None = None
    referenced_bytes: int = 0


def write(
    storage: Storage,
    form: FileForm,
    origin: Origin,
    items: Sequence[SnapshotItem],
    place: Place,
    increment: Increment,
    *,
    clock: Callable[[], float],
    spent: Spent,
) -> Stored:
    """Write this rank's data file and its index, sync both and their folder.

    A failed sync is final for this attempt: the generation is given up and its name never used again.

    Args:
        storage: Where to.
        form: What the data file looks like.
        origin: Where its bytes come from.
        items: The items of the snapshot, for their plain trees.
        place: Whose part this is.
        increment: What lies in ancestors' files.
        clock: The seconds of a clock that never goes back.
        spent: What the time of the data file went to is added here.

    Raises:
        RequestError: The index is longer than a reader takes.
        StorageError: Something could not be written or synced.
        TornSnapshotError: The state changed while it was read.

    Spec: C3, F2.5.
    """
    generation = place.generation
    data_path = generation_path(generation, data_name(place.rank, place.world_size))
    name = index_name(place.rank, place.world_size)
    path = generation_path(generation, name)
    told: list[Description] = []

    def tell(digests: Sequence[str]) -> None:
        # A disk that is still busy with the data takes the index along at little cost.
        told.append(describe(form, digests, items, place, increment))
        text = told[0].text
        check_length(len(text), limit_bytes=INDEX_LIMIT_BYTES, where=path)
        _write_small(storage, path, text)

    writer = storage.create(data_path, size_bytes=form.size_bytes)
    pour(writer, form, origin, clock=clock, spent=spent, meanwhile=tell)
    storage.sync_folder(generation_path(generation))
    (described,) = told
    reference = ObjectReference(generation, name, len(described.text), digest_bytes(described.text))
    own, *ancestors = described.objects
    objects = (own, reference, *ancestors)
    return Stored(objects, described.shares, described.record, increment.referenced_bytes)


def discard(storage: Storage, place: Place) -> None:
    """Delete what this rank wrote for an attempt that failed, and the folder if it is empty then; best effort.

    To be called only where no manifest was or will be published for it; should one be there all the same, nothing is
    deleted. If we die in here, the rest is swept like that of any save that was never completed.

    Spec: C3.3.
    """
    folder = generation_path(place.generation)
    own = {data_name(place.rank, place.world_size), index_name(place.rank, place.world_size)}
    try:
        names = names_in(storage, folder).keys()
        if MANIFEST in names:
            return
        for name in names & own:
            storage.delete(f"{folder}/{name}")
        # Other ranks take theirs away at the same time; the last one finds the folder empty.
        if names <= own or not names_in(storage, folder):
            storage.delete_folder(folder)
    except (StorageError, CorruptionError) as exc:
        _log.warning("what a failed save had written stays for now: %s", exc)


def _write_small(storage: Storage, path: str, data: bytes | bytearray) -> None:
    writer = storage.create(path, size_bytes=len(data))
    try:
        writer.write(memoryview(data))
        writer.finish()
    except BaseException:
        writer.abandon()
        raise
