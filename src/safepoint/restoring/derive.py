"""Derive: random streams for a job of another number of ranks, made of those that were saved.

A derived state takes the place of a saved one, so that it is applied and read back like any other. It is a function of
the item's name and saved digest, the step, the rank and the stream's name: the same inputs give the same streams, no
two ranks share one, and every rank finds its own without reading what other ranks had.

Spec: C11.9.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import msgspec

from safepoint.format.digest import digest_bytes
from safepoint.restoring.validate import SavedState
from safepoint.state.item import Derivable, Item, SavedItem

ALGORITHM = "rng-derive-1"

_SEED_DIGITS = 16
_SEEDS = 1 << 64


def derived_seed(item: str, stream: str, *, digest: str, step: int, rank: int) -> int:
    """Return the seed, below 2**64, of one rank's stream.

    Args:
        item: The item's name.
        stream: The stream's name within the item.
        digest: That of the item's saved state, of all ranks.
        step: The step of the checkpoint.
        rank: The logical rank that the stream is for.

    Spec: C11.9.
    """
    line = msgspec.json.encode([ALGORITHM, item, digest, step, stream])
    return (int(digest_bytes(line)[:_SEED_DIGITS], 16) + rank) % _SEEDS


def with_derived_streams(saved: SavedState, items: Mapping[str, Item], *, rank: int) -> SavedState:
    """Return the saved state with a derived one for each random stream that belongs to no rank of this job."""
    found: dict[str, SavedItem] = {}
    for name in saved.ownerless:
        item, summary = items.get(name), saved.manifest.items[name]
        if item is None or item.type != summary.type or not isinstance(item, Derivable):
            continue
        seeds = _Seeds(name, summary.digest, saved.manifest.step, rank)
        tree = item.derive(seeds.of)
        if tree is not None:
            found[name] = SavedItem(summary.type, tree)
    return replace(
        saved,
        items={**saved.items, **found},
        ownerless=tuple(name for name in saved.ownerless if name not in found),
        derived=(*saved.derived, *found),
    )


class _Seeds:
    """Give the seeds of one item's streams."""

    def __init__(self, item: str, digest: str, step: int, rank: int) -> None:
        self._item = item
        self._digest = digest
        self._step = step
        self._rank = rank

    def of(self, stream: str) -> int:
        return derived_seed(self._item, stream, digest=self._digest, step=self._step, rank=self._rank)
