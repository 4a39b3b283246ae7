"""The reader's rule: which generations exist, which are committed, which are on the live lineage.

1. A generation is committed when its manifest decodes, its own digest holds, it belongs to this run, each object it
   names exists with the stated size, and it bears no valid tombstone.
2. The live lineage is computed from the incarnations' resumed records, never from parents that retention may have
   removed, and never from times.
3. Nothing here writes.

Spec: C8, C9.
"""

from __future__ import annotations

import enum
from collections import Counter
from dataclasses import dataclass

from safepoint.errors import CorruptionError, FormatVersionError, ObjectMissingError
from safepoint.format.encoding import MANIFEST_LIMIT_BYTES, RECORD_LIMIT_BYTES, Record, unseal
from safepoint.format.manifest import Manifest, decode_manifest
from safepoint.format.names import (
    GENERATIONS,
    INCARNATIONS,
    MANIFEST,
    RUN_RECORD,
    TOMBSTONE,
    GenerationName,
    generation_path,
    incarnation_path,
    parse_incarnation,
)
from safepoint.format.records import (
    IncarnationRecord,
    LineageLink,
    Refusal,
    RefusedRecord,
    ResumedRecord,
    RunRecord,
    TombstoneRecord,
)
from safepoint.format.version import check_version
from safepoint.storage.base import Storage


class GenerationState(enum.Enum):
    """Say what a generation is to a reader."""

    COMMITTED = "committed"
    SUPERSEDED = "superseded"
    DELETED = "deleted"
    DAMAGED = "damaged"
    PENDING = "pending"
    ABANDONED = "abandoned"


@dataclass(frozen=True, slots=True)
class Generation:
    """Hold what was found of one generation. `refusal` says why a damaged or absent one cannot be used."""

    name: GenerationName
    state: GenerationState
    manifest: Manifest | None = None
    refusal: Refusal | None = None
    tombstone: TombstoneRecord | None = None

    @property
    def text(self) -> str:
        """Return the generation's name as it stands on disk."""
        return str(self.name)


@dataclass(frozen=True, slots=True)
class Incarnation:
    """Hold what was found of one start of the job; an undecodable record is a taken number (`record` is None)."""

    number: int
    record: IncarnationRecord | None
    resumed: ResumedRecord | None
    refused: RefusedRecord | None


@dataclass(frozen=True, slots=True)
class Lineage:
    """Hold the chain of incarnations that the newest one descends from, oldest first.

    `chain` is empty while nothing has recorded what it resumed. `damage` lists records that could not be read.
    """

    run: str | None
    incarnations: tuple[Incarnation, ...] = ()
    chain: tuple[LineageLink, ...] = ()
    damage: tuple[Refusal, ...] = ()

    @property
    def newest(self) -> int:
        """Return the highest number claimed, refused claims included; 0 for none."""
        return self.incarnations[-1].number if self.incarnations else 0

    def is_live(self, name: GenerationName) -> bool:
        """Return whether a generation is on the live lineage.

        Spec: C9.
        """
        for index, link in enumerate(self.chain):
            if link.incarnation == name.incarnation:
                following = self.chain[index + 1 :]
                return not following or name.step <= following[0].step
        return False

    @property
    def resumed(self) -> str | None:
        """Return the generation that the newest incarnation on the chain resumed from."""
        return self.chain[-1].resumed if self.chain else None


def read_lineage(storage: Storage) -> Lineage:
    """Return the run's identity, its incarnations and the live chain.

    Raises:
        CorruptionError: The newest resumed record cannot be read and no manifest tells its chain.
        FormatVersionError: A newer format wrote the run.

    Spec: C9.
    """
    damage: list[Refusal] = []
    incarnations = []
    for number in sorted(list_incarnations(storage)):
        record = _read(storage, incarnation_path(number), IncarnationRecord, damage)
        resumed = _read(storage, incarnation_path(number, "resumed.json"), ResumedRecord, damage)
        refused = _read(storage, incarnation_path(number, "refused.json"), RefusedRecord, damage)
        incarnations.append(Incarnation(number, record, resumed, refused))
    run = _run_identity(storage, incarnations, damage)
    chain = _live_chain(storage, incarnations, run, damage)
    return Lineage(run, tuple(incarnations), chain, tuple(damage))


def list_incarnations(storage: Storage) -> list[int]:
    """Return the claimed numbers, in order; a listing only, nothing is opened."""
    numbers = (parse_incarnation(entry.name) for entry in storage.list(INCARNATIONS) if not entry.is_folder)
    return sorted(number for number in numbers if number is not None)


def list_generations(storage: Storage) -> list[GenerationName]:
    """Return the names of all generations, newest step first; of two with one step the later incarnation first.

    Folders whose names are not ours are left out: they are never read and never deleted.
    """
    names = (GenerationName.parse(entry.name) for entry in storage.list(GENERATIONS) if entry.is_folder)
    return sorted((name for name in names if name is not None), reverse=True)


def examine(storage: Storage, name: GenerationName, lineage: Lineage) -> Generation:
    """Return what one generation is, having opened its manifest and each object that it names.

    Raises:
        StorageError: The storage cannot answer; nothing is concluded from that.
        FormatVersionError: A newer format wrote it.

    Spec: C8.
    """
    text = str(name)
    path = generation_path(text, MANIFEST)
    try:
        data = storage.read(path, limit_bytes=MANIFEST_LIMIT_BYTES)
    except ObjectMissingError:
        return _without_manifest(name, lineage)
    except CorruptionError as exc:
        return _damaged(name, MANIFEST, exc)
    try:
        manifest = decode_manifest(data, where=path, generation=text)
    except CorruptionError as exc:
        return _damaged(name, MANIFEST, exc)
    if lineage.run is not None and manifest.run != lineage.run:
        foreign = CorruptionError("the manifest belongs to another run", expected=lineage.run, found=manifest.run)
        return _damaged(name, MANIFEST, foreign)
    for reference in manifest.objects:
        refusal = _missing_object(storage, text, reference.generation, reference.name, reference.size_bytes)
        if refusal is not None:
            return Generation(name, GenerationState.DAMAGED, manifest, refusal)
    tombstone = _tombstone(storage, text, lineage)
    if tombstone is not None:
        return Generation(name, GenerationState.DELETED, manifest, tombstone=tombstone)
    state = GenerationState.COMMITTED if lineage.is_live(name) else GenerationState.SUPERSEDED
    return Generation(name, state, manifest)


def examine_all(storage: Storage, lineage: Lineage) -> list[Generation]:
    """Return every generation, newest first. One that a newer format wrote is shown as damaged, with that reason."""
    found = []
    for name in list_generations(storage):
        try:
            found.append(examine(storage, name, lineage))
        except FormatVersionError as exc:
            found.append(_damaged(name, MANIFEST, exc))
    return found


def _without_manifest(name: GenerationName, lineage: Lineage) -> Generation:
    in_flight = name.incarnation >= lineage.newest
    state = GenerationState.PENDING if in_flight else GenerationState.ABANDONED
    reason = "no manifest: the save was never completed"
    return Generation(name, state, refusal=Refusal(str(name), MANIFEST, reason))


def _damaged(name: GenerationName, file: str, error: CorruptionError | FormatVersionError) -> Generation:
    return Generation(name, GenerationState.DAMAGED, refusal=Refusal(str(name), file, str(error)))


def _missing_object(storage: Storage, generation: str, owner: str, name: str, size_bytes: int) -> Refusal | None:
    file = name if owner == generation else f"{owner}/{name}"
    try:
        found = storage.size(generation_path(owner, name))
    except ObjectMissingError:
        return Refusal(generation, file, "the file is missing")
    except CorruptionError as exc:
        return Refusal(generation, file, str(exc))
    if found != size_bytes:
        return Refusal(generation, file, f"the file has the wrong size: expected {size_bytes} bytes, found {found}")
    return None


def _tombstone(storage: Storage, generation: str, lineage: Lineage) -> TombstoneRecord | None:
    """Return a generation's tombstone if it is valid: by an incarnation on the chain, not on what was resumed last."""
    record = _read(storage, generation_path(generation, TOMBSTONE), TombstoneRecord, [])
    if record is None or record.generation != generation or record.run != lineage.run:
        return None
    on_chain = any(link.incarnation == record.incarnation for link in lineage.chain)
    return record if on_chain and generation != lineage.resumed else None


def _read(storage: Storage, path: str, kind: type[Record], damage: list[Refusal]) -> Record | None:
    """Return a small record, or None when it is absent or, then noted as damage, undecodable."""
    try:
        data = storage.read(path, limit_bytes=RECORD_LIMIT_BYTES)
        record = unseal(data, kind, where=path)
    except ObjectMissingError:
        return None
    except CorruptionError as exc:
        damage.append(Refusal("", path, str(exc)))
        return None
    check_version(getattr(record, "format", 1), (), where=path)
    return record


def _run_identity(storage: Storage, incarnations: list[Incarnation], damage: list[Refusal]) -> str | None:
    """Return the run's id: from its record, or, when that cannot be read, the one all other records agree on."""
    record = _read(storage, RUN_RECORD, RunRecord, damage)
    if record is not None:
        check_version(record.format, record.flags, where=RUN_RECORD)
    claimed = Counter(entry.record.run for entry in incarnations if entry.record is not None)
    claimed.update(entry.resumed.run for entry in incarnations if entry.resumed is not None)
    if record is None and not claimed:
        return None
    if record is not None and (not claimed or set(claimed) == {record.run}):
        return record.run
    if record is None and len(claimed) == 1:
        return next(iter(claimed))
    raise CorruptionError(
        "the folder holds records of different runs",
        where=RUN_RECORD,
        expected=record.run if record is not None else "one run id in all records",
        found=", ".join(sorted(claimed)),
        remedy="Give each run a folder of its own; put the records back to where they belong.",
    )


def _live_chain(
    storage: Storage, incarnations: list[Incarnation], run: str | None, damage: list[Refusal]
) -> tuple[LineageLink, ...]:
    """Return the chain of the newest incarnation that recorded what it resumed."""
    undecodable = {entry.file for entry in damage}
    for entry in reversed(incarnations):
        if entry.resumed is not None:
            return entry.resumed.chain
        path = incarnation_path(entry.number, "resumed.json")
        if path in undecodable:
            return _chain_from_manifests(storage, entry.number, path, run)
    return ()


def _chain_from_manifests(storage: Storage, number: int, path: str, run: str | None) -> tuple[LineageLink, ...]:
    """Rebuild what an incarnation resumed from one of its own manifests.

    Spec: C9.
    """
    for name in list_generations(storage):
        if name.incarnation != number:
            continue
        everything = Lineage(run, chain=(LineageLink(number, None, 0),))
        found = examine(storage, name, everything)
        if found.manifest is not None and found.manifest.run == run:
            return found.manifest.lineage
    raise CorruptionError(
        "the record of what the newest start resumed from cannot be read, and no checkpoint of that start tells it",
        where=path,
        remedy="Choose a checkpoint yourself: restore(step=..., branch=True).",
    )
