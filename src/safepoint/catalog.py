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
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import TypeVar

from safepoint.errors import CorruptionError, FormatVersionError, ObjectMissingError
from safepoint.format.manifest import Manifest
from safepoint.format.names import (
    GENERATIONS,
    INCARNATIONS,
    MANIFEST,
    RUN_RECORD,
    TOMBSTONE,
    GenerationName,
    generation_path,
    incarnation_path,
    parse_incarnation_file,
)
from safepoint.format.records import (
    IncarnationRecord,
    LineageLink,
    Refusal,
    RefusedRecord,
    ResumedRecord,
    RunRecord,
    TombstoneRecord,
    check_resumed,
    is_on_chain,
)
from safepoint.notes import Manifests, read_pin, read_record
from safepoint.storage.base import Storage
from safepoint.storage.naming import names_in
from safepoint.storage.sizes import sizes_of

NEVER_COMPLETED = "no manifest: the save was never completed"

Start = TypeVar("Start", IncarnationRecord, ResumedRecord, RefusedRecord)


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
    """Hold what was found of one start of the job; one whose record is lost is a taken number (`record` is None)."""

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
        return is_on_chain(self.chain, incarnation=name.incarnation, step=name.step)

    @property
    def owner(self) -> int:
        """Return the highest number whose claim was not refused; 0 for none."""
        return max((entry.number for entry in self.incarnations if entry.refused is None), default=0)

    @property
    def resumed(self) -> str | None:
        """Return the generation that the newest incarnation on the chain resumed from."""
        return self.chain[-1].resumed if self.chain else None


def read_lineage(storage: Storage, *, needs_chain: bool = True, known: dict[int, Incarnation] | None = None) -> Lineage:
    """Return the run's identity, its incarnations and the live chain.

    Args:
        needs_chain: Whether a chain that cannot be told is an error; else the chain is then empty.
        known: What an earlier look found of starts, by number, and takes what this one finds. Records that were whole
            are not read again: they never change.

    Raises:
        CorruptionError: The newest resumed record cannot be read and no manifest tells its chain.
        FormatVersionError: A newer format wrote the run.

    Spec: C9.
    """
    damage: list[Refusal] = []
    generations = list_generations(storage)
    known = {} if known is None else known
    names = names_in(storage, INCARNATIONS)
    incarnations = [_incarnation(storage, number, names, damage, known.get(number)) for number in _numbers(names)]
    known.update((entry.number, entry) for entry in incarnations)
    run = _run_identity(storage, incarnations, generations, damage)
    incarnations += _lost_incarnations(storage, incarnations, generations, run, damage)
    incarnations.sort(key=lambda entry: entry.number)
    try:
        chain = _live_chain(storage, incarnations, generations, run, damage)
    except CorruptionError:
        if needs_chain:
            raise
        chain = ()
    return Lineage(run, tuple(incarnations), chain, tuple(damage))


def list_incarnations(storage: Storage) -> list[int]:
    """Return the claimed numbers, in order; a listing only, nothing is opened.

    Any file of an incarnation shows that its number is taken, also when its record was lost.
    """
    return _numbers(names_in(storage, INCARNATIONS))


def list_generations(storage: Storage) -> list[GenerationName]:
    """Return the names of all generations, newest step first; of two with one step the later one first.

    Folders whose names are not ours are left out: they are never read and never deleted.
    """
    names = (GenerationName.parse(name) for name, is_folder in names_in(storage, GENERATIONS).items() if is_folder)
    return sorted((name for name in names if name is not None), reverse=True)


def examine(storage: Storage, name: GenerationName, lineage: Lineage, manifests: Manifests | None = None) -> Generation:
    """Return what one generation is, having opened its manifest and each object that it names.

    Args:
        manifests: What an earlier look read of manifests, and takes what this one reads.

    Raises:
        StorageError: The storage cannot answer; nothing is concluded from that.
        FormatVersionError: A newer format wrote it.

    Spec: C8.
    """
    text = str(name)
    try:
        manifest = (manifests or Manifests()).read(storage, text)
    except ObjectMissingError:
        return _without_manifest(storage, name, lineage)
    except CorruptionError as exc:
        return _damaged(name, MANIFEST, exc)
    if lineage.run is not None and manifest.run != lineage.run:
        foreign = CorruptionError("the manifest belongs to another run", expected=lineage.run, found=manifest.run)
        return _damaged(name, MANIFEST, foreign)
    # Before its objects are looked at: a sweep that was cut short has left some of them.
    tombstone = read_tombstone(storage, text, lineage)
    if tombstone is not None:
        return Generation(name, GenerationState.DELETED, manifest, tombstone=tombstone)
    refusal = _missing_object(storage, manifest)
    if refusal is not None:
        return Generation(name, GenerationState.DAMAGED, manifest, refusal)
    state = GenerationState.COMMITTED if lineage.is_live(name) else GenerationState.SUPERSEDED
    return Generation(name, state, manifest)


def examine_all(storage: Storage, lineage: Lineage, manifests: Manifests | None = None) -> list[Generation]:
    """Return every generation, newest first. One that a newer format wrote is shown as damaged, with that reason."""
    found = []
    for name in list_generations(storage):
        try:
            found.append(examine(storage, name, lineage, manifests))
        except FormatVersionError as exc:
            found.append(_damaged(name, MANIFEST, exc))
    return found


def read_tombstone(storage: Storage, generation: str, lineage: Lineage) -> TombstoneRecord | None:
    """Return a generation's tombstone if it is valid: by an incarnation on the chain, on neither what was resumed last
    nor what is pinned.

    Spec: C9, C12.8.
    """
    record = read_mark(storage, generation, lineage)
    # In this order: a pin that was confirmed stood there before any tombstone did.
    return record if record is not None and read_pin(storage, generation) is None else None


def read_mark(storage: Storage, generation: str, lineage: Lineage) -> TombstoneRecord | None:
    """Return the tombstone that would be valid if the generation were not pinned.

    Spec: C12.3.
    """
    record = read_record(storage, generation_path(generation, TOMBSTONE), TombstoneRecord, [])
    if record is None or record.generation != generation or record.run != lineage.run:
        return None
    on_chain = any(link.incarnation == record.incarnation for link in lineage.chain)
    return record if on_chain and generation != lineage.resumed else None


def _without_manifest(storage: Storage, name: GenerationName, lineage: Lineage) -> Generation:
    tombstone = read_tombstone(storage, str(name), lineage)
    if tombstone is not None:
        return Generation(name, GenerationState.DELETED, tombstone=tombstone)
    state = GenerationState.PENDING if name.incarnation >= lineage.owner else GenerationState.ABANDONED
    return Generation(name, state, refusal=Refusal(str(name), MANIFEST, NEVER_COMPLETED))


def _damaged(name: GenerationName, file: str, error: CorruptionError | FormatVersionError) -> Generation:
    return Generation(name, GenerationState.DAMAGED, refusal=Refusal(str(name), file, str(error)))


def _missing_object(storage: Storage, manifest: Manifest) -> Refusal | None:
    """Return why the first object that is not as the manifest says is not; None for none."""
    paths = [generation_path(reference.generation, reference.name) for reference in manifest.objects]
    for reference, found in zip(manifest.objects, sizes_of(storage, paths), strict=True):
        if found != reference.size_bytes:
            reason = "the file is missing" if isinstance(found, ObjectMissingError) else str(found)
            if isinstance(found, int):
                reason = f"the file has the wrong size: expected {reference.size_bytes} bytes, found {found}"
            folder = "" if reference.generation == manifest.generation else f"{reference.generation}/"
            return Refusal(manifest.generation, folder + reference.name, reason)
    return None


def _manifest_of(storage: Storage, name: GenerationName, run: str | None) -> Manifest | None:
    """Return a generation's manifest if it can be read and belongs to the run (to any, for None)."""
    try:
        manifest = Manifests().read(storage, str(name))
    except (ObjectMissingError, CorruptionError, FormatVersionError):
        return None
    return manifest if run is None or manifest.run == run else None


def _numbers(names: Mapping[str, bool]) -> list[int]:
    numbers = (parse_incarnation_file(name) for name, is_folder in names.items() if not is_folder)
    return sorted({number for number in numbers if number is not None})


def _incarnation(
    storage: Storage, number: int, names: Collection[str], damage: list[Refusal], before: Incarnation | None
) -> Incarnation:
    """Return what is there of a start; `names` are those of all files of starts, as in what a fence looks at."""
    record = None if before is None else before.record
    record = record or _read_own(storage, number, "json", IncarnationRecord, damage)
    if record is None:
        _note_missing(damage, incarnation_path(number))
    resumed = None if before is None else before.resumed
    resumed = resumed or _read_own(storage, number, "resumed.json", ResumedRecord, damage)
    refused = None if before is None else before.refused
    if f"{number:06d}.refused.json" in names:
        refused = refused or _read_own(storage, number, "refused.json", RefusedRecord, damage)
    return Incarnation(number, record, resumed, refused)


def _read_own(storage: Storage, number: int, suffix: str, kind: type[Start], damage: list[Refusal]) -> Start | None:
    """Return a record of one start; one that speaks of another start, or contradicts itself, is damage."""
    path = incarnation_path(number, suffix)
    record = read_record(storage, path, kind, damage)
    if record is None:
        return None
    if record.incarnation != number:
        damage.append(Refusal("", path, f"the record belongs to incarnation {record.incarnation}"))
        return None
    try:
        if isinstance(record, ResumedRecord):
            check_resumed(record, where=path)
    except CorruptionError as exc:
        damage.append(Refusal("", path, str(exc)))
        return None
    return record


def _note_missing(damage: list[Refusal], path: str) -> None:
    if not any(entry.file == path for entry in damage):
        damage.append(Refusal("", path, "the file is missing"))


def _lost_incarnations(
    storage: Storage,
    incarnations: list[Incarnation],
    generations: list[GenerationName],
    run: str | None,
    damage: list[Refusal],
) -> list[Incarnation]:
    """Return the starts of which only a manifest of this run is left: their numbers are taken all the same."""
    known = {entry.number for entry in incarnations}
    lost = []
    for number in sorted({name.incarnation for name in generations} - known):
        if run is not None and _chain_from_manifests(storage, generations, number, run) is not None:
            _note_missing(damage, incarnation_path(number))
            lost.append(Incarnation(number, None, None, None))
    return lost


def _run_identity(
    storage: Storage, incarnations: list[Incarnation], generations: list[GenerationName], damage: list[Refusal]
) -> str | None:
    """Return the run's id: from its record, or, when that cannot be read, the one all other records agree on."""
    record = read_record(storage, RUN_RECORD, RunRecord, damage)
    claimed = {entry.record.run for entry in incarnations if entry.record is not None}
    claimed |= {entry.resumed.run for entry in incarnations if entry.resumed is not None}
    if record is None and not claimed:
        manifests = (_manifest_of(storage, name, None) for name in generations)
        claimed = {manifest.run for manifest in manifests if manifest is not None}
    if record is None and claimed:
        _note_missing(damage, RUN_RECORD)
    if record is not None:
        claimed.add(record.run)
    if len(claimed) <= 1:
        return next(iter(claimed), None)
    raise CorruptionError(
        "the folder holds records of different runs",
        where=RUN_RECORD,
        expected=record.run if record is not None else "one run id in all records",
        found=", ".join(sorted(claimed)),
        remedy="Give each run a folder of its own; put the records back to where they belong.",
    )


def _live_chain(
    storage: Storage,
    incarnations: list[Incarnation],
    generations: list[GenerationName],
    run: str | None,
    damage: list[Refusal],
) -> tuple[LineageLink, ...]:
    """Return the chain of the newest incarnation that recorded what it resumed.

    Nothing saves before it has recorded that, so a manifest without such a record shows that the record was lost.

    Spec: C9.
    """
    for entry in reversed(incarnations):
        if entry.refused is not None:
            continue
        if entry.resumed is not None:
            return entry.resumed.chain
        path = incarnation_path(entry.number, "resumed.json")
        chain = _chain_from_manifests(storage, generations, entry.number, run)
        if chain is not None:
            _note_missing(damage, path)
            return chain
        if any(damaged.file == path for damaged in damage):
            raise CorruptionError(
                "what the newest start resumed from cannot be read, and no checkpoint of that start tells it",
                where=path,
                remedy="Choose a checkpoint yourself: restore(step=..., branch=True).",
            )
    return ()


def _chain_from_manifests(
    storage: Storage, generations: list[GenerationName], number: int, run: str | None
) -> tuple[LineageLink, ...] | None:
    for name in generations:
        manifest = _manifest_of(storage, name, run) if name.incarnation == number else None
        if manifest is not None:
            return manifest.lineage
    return None
