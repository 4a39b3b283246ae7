"""The manifest: the record whose existence makes a generation committed.

Spec: F7.
"""

from __future__ import annotations

from typing import Any

import msgspec

from safepoint.errors import CorruptionError
from safepoint.format.encoding import unseal
from safepoint.format.index import Count, ObjectReference, check_reference
from safepoint.format.names import GenerationName
from safepoint.format.records import LineageLink
from safepoint.format.version import check_version


class ProgressRecord(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Hold the counters at the boundary; `step` is the number of completed updates."""

    step: Count
    microbatches: Count
    samples: Count
    tokens: Count
    epoch: Count
    skipped: Count
    epoch_end_due: bool = False


class ItemSummary(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Summarise an item: its type, kind (``global``, ``replicated``, ``sharded``, ``per_rank``), tensors and their bytes.

    `digest` is that of the item's state: its plain tree and its tensors' chunk digests, whatever file they lie in.
    """

    type: str
    kind: str
    tensors: Count
    size_bytes: Count
    digest: str


class Conditions(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Hold what a later restore is compared with. Values of `Any` are plain values in JSON form.

    `counts` holds each optimizer's steps, each scheduler's count, and each loader's batches beside the progress.
    """

    world_size: Count
    global_batch: Count | None
    accumulation: Count | None
    environment: dict[str, str]
    structure: dict[str, str]
    configuration: dict[str, Any]
    datasets: dict[str, Any]
    config: Any
    counts: dict[str, int]
    reasons: tuple[str, ...] = ()


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
    check_version(manifest.format, manifest.flags, where=where)
    name = GenerationName.parse(manifest.generation)
    if manifest.generation != generation or name is None:
        raise CorruptionError("a manifest names another generation", where=where, expected=generation, found=manifest.generation)
    if (manifest.step, manifest.incarnation) != (name.step, name.incarnation):
        raise CorruptionError("a manifest contradicts its generation's name", where=where, expected=generation)
    if manifest.progress.step != manifest.step or manifest.boundary != "after_update":
        raise CorruptionError("a manifest stands for no boundary", where=where, expected=f"step {manifest.step}")
    if not manifest.lineage or manifest.lineage[-1].incarnation != manifest.incarnation:
        raise CorruptionError("a manifest's lineage does not end with its incarnation", where=where)
    for reference in manifest.objects:
        check_reference(reference, where=where)
    return manifest
