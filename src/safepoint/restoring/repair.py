"""What damage costs, and what is left: what is lost of each checkpoint, and what would mend each damaged file.

Pure: it is told what was found. Nothing is repaired here; bytes that match a digest can only come from a copy.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from safepoint.catalog import Generation, GenerationState
from safepoint.contract import needed_words
from safepoint.format.asked import arguments_of
from safepoint.format.index import ObjectReference
from safepoint.format.manifest import Manifest
from safepoint.format.names import MANIFEST
from safepoint.restoring.records import DamagedRecord
from safepoint.restoring.verify import Finding, Verification

Use = Literal["next", "fallback", "branch", "partly", "none"]


@dataclass(frozen=True, slots=True)
class DamagedFile:
    """Say of one damaged file which checkpoints need it, and with which size and digest a copy would be right.

    `reasons` are what was found, `same_as` files with the same digest that were read and hold. Size and digest are of
    no use for a manifest that cannot be read: 0 and empty.
    """

    generation: str
    name: str
    reasons: tuple[str, ...]
    size_bytes: int = 0
    digest: str = ""
    needed_by: tuple[str, ...] = ()
    same_as: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Chance:
    """Say what a checkpoint is still good for.

    `use` is ``next`` for the one that a start takes, ``fallback`` for older ones of the live lineage, ``branch`` for
    one of another (both are asked for with `restore(step=..., branch=True)`), ``partly`` where only some items are
    lost, ``none`` for what is lost or marked for deletion. `asked` is what a restore takes as `step` to mean this one
    and no other. `lost_items` and `whole_items` are told of a damaged one. `needs` are words that a start has to
    permit, by what the checkpoint tells of itself.
    """

    generation: str
    step: int
    state: str
    use: Use
    asked: int | str
    lost_items: tuple[str, ...] = ()
    whole_items: tuple[str, ...] = ()
    needs: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class RepairPlan:
    """Say what a run has lost, newest first, and what can be chosen.

    `resumes_at` is the step that a start takes; None where there is none. `lost_updates` are those between it and the
    newest live step that was ever committed here. `records` are small files that do not hold.
    """

    resumes_at: int | None
    lost_updates: int
    checkpoints: tuple[Chance, ...]
    files: tuple[DamagedFile, ...]
    records: tuple[DamagedRecord, ...] = ()


def plan_repair(
    generations: Sequence[Generation],
    found: Mapping[str, Verification],
    live: frozenset[str],
    records: Sequence[DamagedRecord] = (),
) -> RepairPlan:
    """Return what can be chosen, and what a copy would have to bring back.

    Args:
        generations: All of the run that bear a manifest, newest first.
        found: What the verification of each found; those that are marked for deletion need not be there.
        live: Names of those on the live lineage.
        records: What `check_records` found.
    """
    good = [entry for entry in generations if _holds(entry, found)]
    chosen = next((entry for entry in good if entry.text in live), None)
    asked = arguments_of([entry.name for entry in generations])
    chances = tuple(
        _chance(entry, found, live, is_next=entry is chosen, asked=asked[entry.name]) for entry in generations
    )
    newest = max((entry.name.step for entry in generations if entry.text in live), default=0)
    lost = newest - (chosen.name.step if chosen is not None else 0)
    return RepairPlan(
        resumes_at=chosen.name.step if chosen is not None else None,
        lost_updates=lost,
        checkpoints=chances,
        files=tuple(_files(generations, found)),
        records=tuple(records),
    )


def _holds(entry: Generation, found: Mapping[str, Verification]) -> bool:
    return entry.tombstone is None and entry.text in found and found[entry.text].holds


def _chance(
    entry: Generation, found: Mapping[str, Verification], live: frozenset[str], *, is_next: bool, asked: int | str
) -> Chance:
    step, state, is_live = entry.name.step, entry.state.value, entry.text in live
    needs = tuple(needed_words(entry.manifest)) if entry.manifest is not None else ()
    if entry.tombstone is not None or entry.text not in found:
        return Chance(entry.text, step, state, "none", asked)
    if found[entry.text].holds:
        use: Use = "next" if is_next else "fallback" if is_live else "branch"
        return Chance(entry.text, step, state, use, asked, needs=needs)
    lost = _lost_items(entry, found[entry.text])
    items = tuple(entry.manifest.items) if entry.manifest is not None else ()
    whole = tuple(name for name in items if name not in lost)
    # A file that is missing or has another size makes the whole checkpoint unusable, whatever lies in it.
    is_partly = whole and entry.state is not GenerationState.DAMAGED
    use = "partly" if is_partly else "none"
    return Chance(entry.text, step, state, use, asked, tuple(sorted(lost)), whole, needs)


def _lost_items(entry: Generation, found: Verification) -> frozenset[str]:
    items = frozenset(entry.manifest.items) if entry.manifest is not None else frozenset[str]()
    named = {finding.tensor.split("/", 1)[0] for finding in found.findings}
    # What names no tensor, such as an index, speaks of all that lies in the file.
    return items if named - items else frozenset(named)


def _files(generations: Sequence[Generation], found: Mapping[str, Verification]) -> list[DamagedFile]:
    references = _references(generations)
    damaged: dict[tuple[str, str], dict[str, None]] = {}
    for entry in generations:
        for finding in found[entry.text].findings if entry.text in found else ():
            damaged.setdefault(_place(finding, entry.text), {})[str(finding)] = None
    by_digest: dict[str, list[tuple[str, str]]] = {}
    for place, (reference, _) in references.items():
        if place not in damaged and place[0] in found:
            by_digest.setdefault(reference.digest, []).append(place)
    files = []
    for (generation, name), reasons in damaged.items():
        if (generation, name) not in references:
            files.append(DamagedFile(generation, name, tuple(reasons), needed_by=(generation,)))
            continue
        reference, needed_by = references[generation, name]
        same = tuple("/".join(place) for place in by_digest.get(reference.digest, ()))
        size_bytes, digest = reference.size_bytes, reference.digest
        files.append(DamagedFile(generation, name, tuple(reasons), size_bytes, digest, needed_by, same))
    return files


def _references(
    generations: Sequence[Generation],
) -> dict[tuple[str, str], tuple[ObjectReference, tuple[str, ...]]]:
    """Return each object that any manifest names, with the generations that need it."""
    needed: dict[tuple[str, str], tuple[ObjectReference, tuple[str, ...]]] = {}
    for manifest in _manifests(generations):
        for reference in manifest.objects:
            place = (reference.generation, reference.name)
            _, others = needed.get(place, (reference, ()))
            needed[place] = (reference, (*others, manifest.generation))
    return needed


def _manifests(generations: Sequence[Generation]) -> list[Manifest]:
    return [entry.manifest for entry in generations if entry.manifest is not None]


def _place(finding: Finding, generation: str) -> tuple[str, str]:
    """Return the folder and the name of the file that a finding speaks of."""
    owner, _, name = finding.file.rpartition("/")
    return (owner or generation, name or MANIFEST)
