"""The usable checkpoints of a run, for people and programs that choose among them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import cast

from safepoint.catalog import GenerationState, examine_all, read_lineage
from safepoint.format.plain_decoding import decode_plain
from safepoint.storage.base import Storage


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """Summarise a usable checkpoint: committed, whole and on the live lineage. `metrics` are those of its update
    and, where it was saved as an epoch was closed, of the epoch."""

    step: int
    generation: str
    created: str
    size_bytes: int
    metrics: dict[str, float]


def list_checkpoints(storage: Storage) -> list[Checkpoint]:
    """Return the usable checkpoints of a run, newest first.

    Spec: C8, C9.
    """
    found = examine_all(storage, read_lineage(storage))
    return [
        Checkpoint(
            generation.name.step,
            generation.text,
            generation.manifest.created,
            sum(reference.size_bytes for reference in generation.manifest.objects),
            {name: cast(float, decode_plain(value)) for name, value in generation.manifest.metrics.items()},
        )
        for generation in found
        if generation.state is GenerationState.COMMITTED and generation.manifest is not None
    ]
