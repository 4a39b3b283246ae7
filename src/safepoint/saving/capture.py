"""Capture: name everything that belongs to this boundary, without copying a tensor yet."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from safepoint.format.manifest import Conditions, ProgressRecord
from safepoint.state.item import Item
from safepoint.state.snapshot import SnapshotItem, capture_item


@dataclass(frozen=True, slots=True)
class Snapshot:
    """Hold all that a generation will say of one boundary."""

    progress: ProgressRecord
    items: tuple[SnapshotItem, ...]
    conditions: Conditions
    metrics: Mapping[str, Any]
    probe: Any
    contract: str


def capture(items: Sequence[Item]) -> tuple[SnapshotItem, ...]:
    """Return the state of all items at this boundary.

    The plain trees are encoded here, so they cannot change any more; the tensors are read by the stage phase, before
    the boundary is left.

    Raises:
        RequestError: A value cannot be stored; named by its path.
    """
    return tuple(capture_item(item) for item in items)
