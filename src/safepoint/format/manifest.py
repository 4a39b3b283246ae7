"""The manifest: the record whose existence makes a generation committed.

Spec: F7.
"""

from __future__ import annotations

from typing import Any

import msgspec

from safepoint.errors import CorruptionError
from safepoint.format.encoding import unseal
from safepoint.format.index import Count, ObjectReference, check_reference
from safepoint.format.names import GenerationName, is_item_name
from safepoint.format.plain import decode_plain
from safepoint.format.records import LineageLink, check_chain, is_on_chain


class ProgressRecord(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Hold the counters at the boundary; `step` is the number of completed updates."""

    step: Count
    microbatches: Count
    samples: Count
    tokens: Count
    epoch: Count
    skipped: Count
    epoch_end_due: bool = False


class ItemSummary(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """Summarise an item: its type, how many tensors it has, and their bytes.

    `kind` is ``global``, ``replicated``, ``sharded`` or ``per_rank``. `digest` is that of the item's state: its plain
    tree and its tensors' chunk digests, whatever file they lie in. `ranks` lists the ranks that had the item, in
    order; None for all.
    """

    type: str
    kind: str
    tensors: Count
    size_bytes: Count
    digest: str
    ranks: tuple[Count, ...] | None = None


class RankConditions(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """Hold what some ranks' conditions say otherwise than rank 0's; None stands for what they do not have.

    Spec: F7.8.
    """

    ranks: tuple[Count, ...]
    environment: dict[str, str | None] = {}
    structure: dict[str, str | None] = {}
    configuration: dict[str, dict[str, Any] | None] = {}
    datasets: dict[str, Any] = {}
    global_batch: Count | msgspec.UnsetType | None = msgspec.UNSET


class Conditions(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Hold what a later restore is compared with. Values of `Any` are plain values in JSON form.

    `counts` holds each optimizer's steps, each scheduler's count, and each loader's batches beside the progress;
    `reasons` what lowers the promise of any restore from this save, by its word. `ranks` says which ranks had others.
    """

    world_size: Count
    global_batch: Count | None
    accumulation: Count | None
    environment: dict[str, str]
    structure: dict[str, str]
    configuration: dict[str, dict[str, Any]]
    datasets: dict[str, Any]
    config: Any
    counts: dict[str, int]
    reasons: dict[str, str] = {}
    ranks: tuple[RankConditions, ...] | msgspec.UnsetType = msgspec.UNSET


class Manifest(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Commit a generation."""

    format: Count
    flags: tuple[str, ...]
    run: str
    generation: str
    incarnation: Count
    step: Count
    boundary: str
    created: str
    lineage: tuple[LineageLink, ...]
    progress: ProgressRecord
    world_size: Count
    mesh: Any
    contract: str
    items: dict[str, ItemSummary]
    objects: tuple[ObjectReference, ...]
    layout: str
    conditions: Conditions
    metrics: dict[str, Any]
    probe: Any
    agreement: str
    timings_s: dict[str, float]
    nonce: str

    @property
    def ancestors(self) -> list[str]:
        """Return the generations whose files it refers to, oldest first."""
        return sorted({entry.generation for entry in self.objects} - {self.generation})


def decode_manifest(data: bytes, *, where: str, generation: str) -> Manifest:
    """Return a manifest, having checked everything that its own text can tell.

    Args:
        data: The whole file.
        where: The file's path, for messages.
        generation: The name of the folder that it lies in.

    Raises:
        CorruptionError: It is not a manifest of this generation.
        FormatVersionError: A newer format wrote it.

    Spec: F7.
    """
    manifest = unseal(data, Manifest, where=where)
    name = GenerationName.parse(manifest.generation)
    if manifest.generation != generation or name is None:
        found = manifest.generation[:80]
        raise CorruptionError("a manifest names another generation", where=where, expected=generation, found=found)
    if (manifest.step, manifest.incarnation) != (name.step, name.incarnation):
        raise CorruptionError("a manifest contradicts its generation's name", where=where, expected=generation)
    if manifest.progress.step != manifest.step or manifest.boundary != "after_update":
        raise CorruptionError("a manifest stands for no boundary", where=where, expected=f"step {manifest.step}")
    check_chain(manifest.lineage, incarnation=manifest.incarnation, where=where)
    if manifest.step < manifest.lineage[-1].step:
        raise CorruptionError("a manifest is older than what its run resumed from", where=where, found=manifest.step)
    for item, summary in manifest.items.items():
        if not is_item_name(item):
            raise CorruptionError("an item's name is not allowed", where=where, found=repr(item[:80]))
        ranks = summary.ranks
        if ranks is not None and (ranks != tuple(sorted(set(ranks))) or not ranks or ranks[-1] >= manifest.world_size):
            raise CorruptionError("an item's ranks are none of a job's", where=f"{where}: {item}", found=ranks[:8])
    _check_objects(manifest, where)
    _check_ranks(manifest, where)
    _check_values(manifest, where)
    return manifest


def _check_objects(manifest: Manifest, where: str) -> None:
    seen: set[tuple[str, str]] = set()
    for reference in manifest.objects:
        owner = check_reference(reference, where=where)
        if (reference.generation, reference.name) in seen:
            raise CorruptionError("a manifest names an object twice", where=where, found=reference.name)
        seen.add((reference.generation, reference.name))
        is_own = reference.generation == manifest.generation
        is_older = owner.step <= manifest.step and is_on_chain(
            manifest.lineage, incarnation=owner.incarnation, step=owner.step
        )
        if not is_own and not is_older:
            raise CorruptionError(
                "a manifest refers to a generation that it does not descend from",
                where=where,
                found=reference.generation,
            )


def _check_ranks(manifest: Manifest, where: str) -> None:
    """Check that each rank but the first has conditions of its own at most once."""
    conditions = manifest.conditions
    if conditions.ranks is msgspec.UNSET:
        return
    ranks = [rank for one in conditions.ranks for rank in one.ranks]
    are_known = all(0 < rank < manifest.world_size for rank in ranks)
    is_told = all(one.ranks and list(one.ranks) == sorted(one.ranks) for one in conditions.ranks)
    if not are_known or not is_told or len(set(ranks)) != len(ranks):
        raise CorruptionError("conditions are of no rank, or of one twice", where=where, found=ranks[:8])


def _check_values(manifest: Manifest, where: str) -> None:
    """Check that everything of a free form is a plain value, so that whoever shows it meets nothing else."""
    conditions = manifest.conditions
    others = conditions.ranks or ()
    named = [conditions.configuration, conditions.datasets, manifest.metrics]
    named += [part for one in others for part in (one.configuration, one.datasets)]
    free = [value for values in named for value in values.values()]
    for value in [*free, conditions.config, manifest.probe, manifest.mesh]:
        decode_plain(value, where=where)
