"""What a run tells of its own saves and failures: the times in its manifests, its starts, and its journal."""

from __future__ import annotations

import datetime
import itertools
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from safepoint.catalog import Incarnation, Lineage, examine_all
from safepoint.errors import CorruptionError, NotFoundError, ObjectMissingError
from safepoint.format.manifest import Manifest
from safepoint.format.names import incarnation_path
from safepoint.joining.holder import CLOSED
from safepoint.journal import NotedCost, read_journal
from safepoint.storage.base import Storage

_LIMIT_BYTES = 64


@dataclass(frozen=True, slots=True)
class SaveTimes:
    """Hold what saves of one way took, medians.

    Args:
        saves: How many were noted.
        total_s: From a save's beginning until it was committed.
        blocked_s: For how long training stood still.
    """

    saves: int
    total_s: float
    blocked_s: float


@dataclass(frozen=True, slots=True)
class Measured:
    """Hold what a run tells; medians over its checkpoints. None stands for what it does not tell.

    Args:
        saves: How many checkpoints were asked.
        size_bytes: Size of a checkpoint's own files.
        phases_s: The phases of a save that manifests hold: all but the look at the state and the publishing.
        synchronous: What saves took that training waited for, as the journals have it.
        background: What saves took that were made beside the training.
        is_background: Whether the newest save of which the journals tell was made beside the training.
        period_s: From save to save.
        update_s: Time of an update, saves included.
        starts: How many starts the run had.
        deaths: How many of them did not end in order; the newest one may be alive and does not count.
        mtbf_s: Time of training seen per death; as rough as so few deaths make it.
        lost_updates: Updates that were done again after the last death.
    """

    saves: int
    size_bytes: int
    phases_s: float
    synchronous: SaveTimes | None
    background: SaveTimes | None
    is_background: bool
    period_s: float | None
    update_s: float | None
    starts: int
    deaths: int
    mtbf_s: float | None
    lost_updates: int | None


def measure(storage: Storage, lineage: Lineage, *, url: str) -> Measured:
    """Return what a run tells of its saves and failures.

    Raises:
        NotFoundError: It has no checkpoint whose manifest can be read.
    """
    found = [entry.manifest for entry in examine_all(storage, lineage) if entry.manifest is not None]
    manifests = sorted(found, key=lambda manifest: (manifest.incarnation, manifest.step))
    if not manifests:
        raise NotFoundError("no checkpoint of the run tells how long a save takes", where=url)
    spans = list(_spans(manifests))
    starts = [entry for entry in lineage.incarnations if entry.refused is None and entry.record is not None]
    dead = [entry for entry in starts[:-1] if not _is_closed(storage, entry.number)]
    trained_s = sum(_trained_s(start, manifests) for start in starts)
    costs = [cost for start in starts for cost in read_journal(storage, start.number).costs]
    return Measured(
        saves=len(manifests),
        size_bytes=int(statistics.median(_own_bytes(manifest) for manifest in manifests)),
        phases_s=statistics.median(sum(manifest.timings_s.values()) for manifest in manifests),
        synchronous=_times([cost for cost in costs if not cost.is_background]),
        background=_times([cost for cost in costs if cost.is_background]),
        is_background=bool(costs) and costs[-1].is_background,
        period_s=statistics.median(seconds for seconds, _ in spans) if spans else None,
        update_s=statistics.median(seconds / updates for seconds, updates in spans) if spans else None,
        starts=len(starts),
        deaths=len(dead),
        mtbf_s=trained_s / len(dead) if dead and trained_s > 0 else None,
        lost_updates=_lost_updates(storage, starts, dead),
    )


def _times(costs: Sequence[NotedCost]) -> SaveTimes | None:
    if not costs:
        return None
    total_s = statistics.median(cost.total_s for cost in costs)
    return SaveTimes(len(costs), total_s, statistics.median(cost.blocked_s for cost in costs))


def _spans(manifests: Sequence[Manifest]) -> list[tuple[float, int]]:
    """Return the seconds and updates between neighbouring checkpoints of one start."""
    spans = []
    for earlier, later in itertools.pairwise(manifests):
        began, ended = _moment(earlier.created), _moment(later.created)
        if began is None or ended is None or earlier.incarnation != later.incarnation:
            continue
        # A clock that was set back tells nothing.
        if began < ended:
            spans.append((ended - began, later.step - earlier.step))
    return spans


def _trained_s(start: Incarnation, manifests: Sequence[Manifest]) -> float:
    """Return how long a start is known to have trained: until its last checkpoint."""
    began = _moment(start.record.started) if start.record is not None else None
    saved = [_moment(manifest.created) for manifest in manifests if manifest.incarnation == start.number]
    ends = [moment for moment in saved if moment is not None]
    return max(0.0, max(ends) - began) if ends and began is not None else 0.0


def _lost_updates(storage: Storage, starts: Sequence[Incarnation], dead: Sequence[Incarnation]) -> int | None:
    if not dead:
        return None
    last = dead[-1]
    done = read_journal(storage, last.number).last_step
    after = next((entry for entry in starts if entry.number > last.number and entry.resumed is not None), None)
    if done is None or after is None or after.resumed is None:
        return None
    return max(0, done - after.resumed.step)


def _own_bytes(manifest: Manifest) -> int:
    return sum(entry.size_bytes for entry in manifest.objects if entry.generation == manifest.generation)


def _is_closed(storage: Storage, number: int) -> bool:
    try:
        return storage.read(incarnation_path(number, "alive"), limit_bytes=_LIMIT_BYTES) == CLOSED
    except (ObjectMissingError, CorruptionError):
        return False


def _moment(text: str) -> float | None:
    try:
        return datetime.datetime.fromisoformat(text.replace("Z", "+00:00")).timestamp()
    except (ValueError, OverflowError):
        return None
