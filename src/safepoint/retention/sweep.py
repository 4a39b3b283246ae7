"""The second phase of deleting: the data of generations that were marked at an earlier save.

1. All manifests are decoded first; while one cannot be, nothing is deleted.
2. Deletion is per object: one that a remaining manifest names stays, whosever folder it lies in.
3. A newer start ends the sweep. It is looked for before each generation.
4. A folder without a manifest is swept only by a start that is newer than the one in its name and has committed.
5. What is not ours is never deleted: neither a file, nor a folder that still holds one.

Spec: C12.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass

from safepoint.catalog import Lineage, list_generations, read_tombstone
from safepoint.errors import CorruptionError, FencedError, FormatVersionError, ObjectMissingError, SafepointError
from safepoint.format.manifest import Manifest
from safepoint.format.names import (
    GENERATIONS,
    MANIFEST,
    TEMPORARY_PREFIX,
    TOMBSTONE,
    VERIFIED,
    GenerationName,
    generation_path,
    is_object_name,
)
from safepoint.joining.claim import Claim, check_not_fenced
from safepoint.notes import Manifests, read_pin
from safepoint.retention.policy import has_two_copies
from safepoint.retention.survey import is_doubtful, objects_of, resumed_lately
from safepoint.storage.base import Entry, Storage
from safepoint.storage.naming import names_in

Owned = frozenset[tuple[str, str]]


@dataclass(frozen=True, slots=True)
class SweepReport:
    """Say what a sweep did.

    `deleted` are generations that are gone, `retained` marked ones of which others still need an object. `stopped` says
    why the sweep ended early; it is empty otherwise.
    """

    deleted: tuple[str, ...] = ()
    retained: tuple[str, ...] = ()
    freed_bytes: int = 0
    warnings: tuple[str, ...] = ()
    stopped: str = ""


@dataclass(frozen=True, slots=True)
class _Contents:
    """Hold what lies in a run: manifests by generation, folders without one, and what was marked."""

    manifests: dict[str, Manifest]
    bare: tuple[GenerationName, ...]
    marked: tuple[str, ...]

    @property
    def needed(self) -> Owned:
        """Return the objects that a remaining manifest names."""
        remaining = (manifest for name, manifest in self.manifests.items() if name not in self.marked)
        return frozenset().union(*(objects_of(manifest) for manifest in remaining))


def sweep(
    storage: Storage,
    lineage: Lineage,
    incarnation: int,
    *,
    protected: Collection[str] = (),
    unknown: Collection[str] = (),
    is_dry: bool = False,
    manifests: Manifests | None = None,
) -> SweepReport:
    """Delete the data of marked generations and of saves that were never completed.

    To be called at a committed save of `incarnation`, before anything is marked at that save. An object that cannot be
    deleted is a warning, and its generation waits for the next sweep.

    Args:
        storage: Where the run lies.
        lineage: The run's lineage, read after the commit.
        incarnation: The start that sweeps.
        protected: Generations that are left alone whatever they bear.
        unknown: Generations whose save ended without a known outcome: left alone as well, and counted as no copy.
        is_dry: Whether to report only, and to delete nothing.
        manifests: What an earlier look read of manifests, and takes what this one reads.

    Spec: C12.
    """
    protected = {*protected, *unknown}
    try:
        contents = _read_all(storage, lineage, protected, manifests or Manifests())
    except (CorruptionError, FormatVersionError) as exc:
        return SweepReport(stopped=f"a manifest cannot be decoded, so nothing is deleted: {exc}")
    stopped = _stop_reason(storage, lineage, incarnation, contents, unknown)
    needed = contents.needed
    deleted: list[str] = []
    retained: list[str] = []
    warnings: list[str] = []
    freed = 0
    for name in _sweepable(lineage, incarnation, contents, protected):
        try:
            # A newer start may have chosen what to resume from since we looked, by rules that this sweep does not know.
            stopped = stopped or _newer_start(storage, incarnation)
            if stopped:
                break
            size_bytes, is_gone = _delete_generation(storage, name, needed, is_dry=is_dry)
        except (SafepointError, OSError) as exc:
            warnings.append(f"{name} could not be deleted: {exc}")
            continue
        freed += size_bytes
        (deleted if is_gone else retained).append(name)
    return SweepReport(tuple(deleted), tuple(retained), freed, tuple(warnings), stopped)


def may_sweep(storage: Storage, incarnation: int) -> bool:
    """Return whether anything lies there that a sweep might delete: a mark, or a folder without a manifest. Opens none.

    Spec: C12.1, C12.6.
    """
    for name in list_generations(storage):
        files = names_in(storage, generation_path(str(name)))
        if TOMBSTONE in files or (MANIFEST not in files and name.incarnation < incarnation):
            return True
    return False


def _read_all(storage: Storage, lineage: Lineage, protected: Collection[str], known: Manifests) -> _Contents:
    manifests: dict[str, Manifest] = {}
    bare = []
    for name in list_generations(storage):
        try:
            manifests[str(name)] = known.read(storage, str(name))
        except ObjectMissingError:
            if read_pin(storage, str(name)) is None:
                bare.append(name)
    known.forget_all_but(manifests)
    resumed = resumed_lately(lineage)
    marked = [
        name
        for name, manifest in manifests.items()
        if manifest.run == lineage.run
        and name not in resumed
        and name not in protected
        and read_tombstone(storage, name, lineage) is not None
    ]
    return _Contents(manifests, tuple(bare), tuple(marked))


def _stop_reason(
    storage: Storage, lineage: Lineage, incarnation: int, contents: _Contents, unknown: Collection[str]
) -> str:
    """Return why nothing may be deleted at all, or an empty text."""
    if not any(link.incarnation == incarnation for link in lineage.chain):
        return f"incarnation {incarnation} is not on the live lineage"
    own = [name for name in contents.manifests if _incarnation_of(name) == incarnation]
    if not own:
        return f"incarnation {incarnation} has committed nothing yet"
    newer = _newer_start(storage, incarnation)
    if newer:
        return newer
    if not contents.marked:
        return ""
    remaining = [
        objects_of(manifest)
        for name, manifest in contents.manifests.items()
        if name not in contents.marked and name not in unknown and _is_whole(storage, lineage, name, manifest)
    ]
    return "" if has_two_copies(remaining) else "fewer than two good checkpoints that share nothing would stay"


def _is_whole(storage: Storage, lineage: Lineage, generation: str, manifest: Manifest) -> bool:
    name = GenerationName.parse(generation)
    if name is None or manifest.run != lineage.run or not lineage.is_live(name):
        return False
    if is_doubtful(storage, generation, lineage):
        return False
    sizes = ((generation_path(entry.generation, entry.name), entry.size_bytes) for entry in manifest.objects)
    try:
        return all(storage.size(path) == size_bytes for path, size_bytes in sizes)
    except (ObjectMissingError, CorruptionError):
        return False


def _newer_start(storage: Storage, incarnation: int) -> str:
    """Return a text that names a newer start that was not refused, or an empty one. A listing only.

    Spec: C5.
    """
    try:
        check_not_fenced(storage, Claim("", incarnation))
    except FencedError as exc:
        return f"{exc.found} is newer"
    return ""


def _sweepable(lineage: Lineage, incarnation: int, contents: _Contents, protected: Collection[str]) -> Iterator[str]:
    """Yield marked generations and uncompleted saves, oldest first."""
    uncompleted = {str(name) for name in contents.bare if name.incarnation < incarnation and str(name) not in protected}
    yield from sorted({*contents.marked, *uncompleted} - resumed_lately(lineage).keys())


def _delete_generation(storage: Storage, generation: str, needed: Owned, *, is_dry: bool) -> tuple[int, bool]:
    """Delete what is ours and not needed in one folder, and return (bytes freed, whether the generation is gone).

    The order is: objects, then the manifest, then the tombstone, then the folder. If we die among the objects, the
    generation is still marked, and the next sweep goes on. If we die after the manifest, the folder is that of a save
    that was never completed, and is swept as one. A needed object stops the order: manifest and tombstone stay as well.
    """
    folder = generation_path(generation)
    entries = [entry for entry in storage.list(folder) if not entry.is_folder]
    objects = [entry for entry in entries if _is_disposable(entry) and (generation, entry.name) not in needed]
    is_needed = any((generation, entry.name) in needed for entry in entries)
    if is_dry:
        return sum(entry.size_bytes for entry in objects), not is_needed
    freed = _delete(storage, folder, objects)
    if is_needed:
        return freed, False
    for name in (MANIFEST, TOMBSTONE):
        freed += _delete(storage, folder, [entry for entry in entries if entry.name == name])
    if not storage.list(folder):
        storage.delete_folder(folder)
        storage.sync_folder(GENERATIONS)
    return freed, True


def _is_disposable(entry: Entry) -> bool:
    return is_object_name(entry.name) or entry.name == VERIFIED or entry.name.startswith(TEMPORARY_PREFIX)


def _delete(storage: Storage, folder: str, entries: list[Entry]) -> int:
    """Delete objects and make that durable before the next step; a power loss must not undo an earlier one alone."""
    for entry in entries:
        storage.delete(f"{folder}/{entry.name}")
    if entries:
        storage.sync_folder(folder)
    return sum(entry.size_bytes for entry in entries)


def _incarnation_of(generation: str) -> int | None:
    name = GenerationName.parse(generation)
    return name.incarnation if name is not None else None
