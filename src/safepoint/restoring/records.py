"""Records: the small files of a run and of its checkpoints, each read, and what of them does not hold.

1. Nothing is changed. What a record costs is told with it: a restore goes on without most of them.
2. A journal bears no digest and is never synced, so that a line of it that is not as it is written may be torn.
3. Heartbeats are stamps that a holder moves on: any value is one.

Spec: F5, F6, F8.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from safepoint.catalog import Lineage, list_generations, list_incarnations
from safepoint.errors import CorruptionError, FormatVersionError, ObjectMissingError
from safepoint.format.encoding import RECORD_LIMIT_BYTES, unseal
from safepoint.format.names import PIN, RUN_RECORD, TOMBSTONE, VERIFIED, generation_path, journal_path
from safepoint.format.records import PinRecord, TombstoneRecord, VerifiedRecord
from safepoint.journal import unsound_lines
from safepoint.storage.base import Storage

_BESIDE: dict[str, type[PinRecord] | type[TombstoneRecord] | type[VerifiedRecord]] = {
    TOMBSTONE: TombstoneRecord,
    PIN: PinRecord,
    VERIFIED: VerifiedRecord,
}
_COSTS = {
    RUN_RECORD: "the run's id is taken from its other records",
    ".resumed.json": "what that start resumed is taken from its checkpoints' manifests, where it has any",
    ".refused.json": "that start counts as one that went on",
    ".json": "who made that start is not known",
    TOMBSTONE: "the mark is void: the checkpoint counts as one that stays",
    PIN: "the checkpoint is kept all the same, and the reason is lost",
    VERIFIED: "the checkpoint counts as not verified, until it is again",
}


@dataclass(frozen=True, slots=True)
class DamagedRecord:
    """Name a small file that does not hold, why, and what that costs.

    `is_torn` says that a crash may have left it so: no damage is concluded from it.
    """

    file: str
    reason: str
    cost: str
    is_torn: bool = False


def check_records(storage: Storage, lineage: Lineage) -> list[DamagedRecord]:
    """Return what does not hold of the run's record, of its starts', of marks, pins and notes, and of journals.

    Args:
        lineage: As it was read of the same storage: what could not be read for it is told here.

    Raises:
        StorageError: The storage cannot answer.
    """
    found = [DamagedRecord(entry.file, entry.reason, _cost_of(entry.file)) for entry in lineage.damage]
    for name in list_generations(storage):
        found += _beside(storage, str(name), lineage.run)
    for number in list_incarnations(storage):
        found += _of_journal(storage, number)
    return found


def _of_journal(storage: Storage, number: int) -> Iterator[DamagedRecord]:
    path = journal_path(number)
    try:
        lines = unsound_lines(storage, number)
    except CorruptionError as exc:
        cost = "checkpoints that it alone named are not missed where they are gone"
        yield DamagedRecord(path, str(exc), cost)
        return
    if lines:
        which = f"line {lines[0]}" + (f" and {len(lines) - 1} more" if len(lines) > 1 else "")
        reason = f"{which} of the journal is not as it is written"
        cost = "what the line told is passed over; no restore needs it"
        yield DamagedRecord(path, reason, cost, is_torn=True)


def _beside(storage: Storage, generation: str, run: str | None) -> Iterator[DamagedRecord]:
    for name, kind in _BESIDE.items():
        path = generation_path(generation, name)
        try:
            record = unseal(storage.read(path, limit_bytes=RECORD_LIMIT_BYTES), kind, where=path)
            if record.generation != generation or (run is not None and record.run != run):
                found = f"{record.generation} of run {record.run}"
                raise CorruptionError("a record speaks of another checkpoint", where=path, found=found)
        except ObjectMissingError:
            continue
        except (CorruptionError, FormatVersionError) as exc:
            yield DamagedRecord(path, str(exc), _COSTS[name])


def _cost_of(file: str) -> str:
    return next(cost for end, cost in _COSTS.items() if file.endswith(end))
