"""From what lies in a run to what the policy decides on. Only reads.

Spec: C12.
"""

from __future__ import annotations

import datetime
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any

from safepoint.catalog import Generation, GenerationState, Lineage
from safepoint.contract import Reason, lacking, needed_words
from safepoint.errors import CorruptionError
from safepoint.format.manifest import Manifest
from safepoint.format.names import TOMBSTONE, generation_path
from safepoint.format.plain import decode_plain
from safepoint.format.records import TombstoneRecord
from safepoint.notes import read_pin, read_record, read_verified
from safepoint.retention.policy import Candidate, Standing
from safepoint.storage.base import Storage

_STANDINGS: dict[GenerationState, Standing] = {
    GenerationState.COMMITTED: "good",
    GenerationState.SUPERSEDED: "superseded",
    GenerationState.DAMAGED: "damaged",
}


def candidates_among(
    storage: Storage,
    lineage: Lineage,
    generations: Iterable[Generation],
    *,
    unknown: Collection[str] = (),
    accepts: Callable[[Reason], bool] | None = None,
) -> list[Candidate]:
    """Return what the policy may decide on: generations whose manifest tells what they hold, and not marked already.

    A generation whose manifest cannot be read, or is another run's, is none: it is never deleted.

    Args:
        storage: Where the notes of verification lie.
        lineage: The run's lineage.
        generations: What was found, newest first.
        unknown: Names of generations whose save ended without a known outcome.
        accepts: Whether the contract accepts a reason; None for the level that each one records, without permits.
    """
    found = []
    for entry in generations:
        standing = _STANDINGS.get(entry.state)
        if standing is None or entry.manifest is None:
            continue
        if standing == "good" and is_doubtful(storage, entry.text, lineage):
            standing = "doubtful"
        found.append(
            Candidate(
                generation=entry.text,
                step=entry.name.step,
                standing="unknown" if entry.text in unknown else standing,
                is_verified=standing in ("good", "doubtful") and read_verified(storage, entry.text) is not None,
                metrics=_numbers(entry.manifest),
                objects=objects_of(entry.manifest),
                saved_s=_moment(entry.manifest.created),
                is_refused=bool(_refused_words(entry.manifest, accepts)),
            )
        )
    return found


def objects_of(manifest: Manifest) -> frozenset[tuple[str, str]]:
    """Return the objects that a manifest names, as (generation, name)."""
    return frozenset((reference.generation, reference.name) for reference in manifest.objects)


def is_doubtful(storage: Storage, generation: str, lineage: Lineage) -> bool:
    """Return whether a start that is off the live chain has marked a generation.

    The mark is void. But whoever set it may have been stopped just before a deletion, and may go on with that one.

    Spec: C12.5.
    """
    record = read_record(storage, generation_path(generation, TOMBSTONE), TombstoneRecord, [])
    if record is None or record.generation != generation or record.run != lineage.run:
        return False
    return all(link.incarnation != record.incarnation for link in lineage.chain)


def resumed_lately(lineage: Lineage) -> dict[str, str]:
    """Return the generations that the newest two starts resumed from, each with the reason that protects it.

    Spec: C12.
    """
    recorded = [entry.resumed for entry in lineage.incarnations if entry.resumed is not None and entry.refused is None]
    links = [record.chain[-1] for record in recorded[-2:] if not record.source]
    # The chain may know more than the records: one that cannot be read is rebuilt from a manifest. Its first link
    # resumed nothing, or a checkpoint of another run, which nothing here protects.
    links += lineage.chain[1:][-2:]
    found = {link.resumed: link.incarnation for link in links if link.resumed is not None}
    return {generation: f"incarnation {number} resumed from it" for generation, number in found.items()}


def pins_among(storage: Storage, generations: Iterable[str]) -> dict[str, str]:
    """Return the pinned ones of some generations, each with the reason that protects it.

    Spec: C12.8.
    """
    pins = ((generation, read_pin(storage, generation)) for generation in generations)
    return {generation: f"pinned: {pin.reason}" for generation, pin in pins if pin is not None}


def _refused_words(manifest: Manifest, accepts: Callable[[Reason], bool] | None) -> Mapping[str, str]:
    return needed_words(manifest) if accepts is None else lacking(manifest.conditions.reasons, accepts)


def _moment(text: str) -> float | None:
    """Return a recorded time in seconds since 1970, or None for a text that is none, or that names no zone."""
    try:
        moment = datetime.datetime.fromisoformat(text.replace("Z", "+00:00"))
        return moment.timestamp() if moment.tzinfo is not None else None
    except (ValueError, OverflowError):
        return None


def _numbers(manifest: Manifest) -> Mapping[str, float]:
    return {name: number for name, form in manifest.metrics.items() if (number := _number(form)) is not None}


def _number(form: Any) -> float | None:
    try:
        value = form if isinstance(form, float) else decode_plain(form)
    except CorruptionError:
        return None
    if isinstance(value, int | float) and not isinstance(value, bool):
        try:
            return float(value)
        except OverflowError:
            return None
    return None
