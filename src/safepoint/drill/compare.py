"""Compare a chain of killed and resumed starts with the uninterrupted one, value by value.

1. Equal means equal bits: metrics are compared as exact text, states and random streams by digest.
2. Every update is compared that any start made, also those that were made again after a restore.
3. What a restore said it does not keep is not held against it: at ``same_data`` only the samples are compared, at
   ``approximate`` only the count of updates.
4. Random streams that nobody seeds differ between any two fresh starts, and steer nothing as long as metrics and
   samples agree. They are then compared along the chain instead: a restored start with the start that it continues.
5. From the first start with another number of ranks on, the samples of all ranks together are still compared exactly,
   and metrics within a tolerance. Random streams and the final state, of which each rank has a part, are not.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace

from safepoint.contract import LEVELS
from safepoint.drill.events import Update
from safepoint.drill.ranks import means, samples_together, without_rank
from safepoint.drill.trace import Rehearsal, Start
from safepoint.state.item import STREAMS_ITEM

_NOTHING = "nothing"
_LONGEST_TEXT = 80


@dataclass(frozen=True, slots=True)
class Unequal:
    """Name one value that differs: what it is, what it should have been, and what it was."""

    subject: str
    expected: str
    found: str

    def __str__(self) -> str:
        return f"{self.subject}: expected {self.expected}, found {self.found}"


@dataclass(frozen=True, slots=True)
class Divergence:
    """Say where a start first differs from the uninterrupted run, and in what.

    `start` counts from 1; `step` is None for the final state.
    """

    start: int
    step: int | None
    values: tuple[Unequal, ...]
    is_before_any_kill: bool

    def __str__(self) -> str:
        place = f"update {self.step}" if self.step is not None else "the final state"
        return f"{place} of start {self.start} differs: " + "; ".join(str(value) for value in self.values)


@dataclass(frozen=True, slots=True)
class Apart:
    """Hold how updates of another number of ranks compare: how many, and the largest relative difference of a metric.

    `place` says where that was.
    """

    updates: int = 0
    largest: float = 0.0
    place: str = ""
    tolerance: float = 0.0


@dataclass(frozen=True, slots=True)
class Comparison:
    """Hold the outcome: how much was compared, at which level, and the first divergence.

    `repeated` updates were made by more than one start; `items` are those of the final state. `has_metrics` and
    `has_ids` say whether any update had some to compare, `has_seeded_streams` whether the random streams of two fresh
    starts are equal. `apart` is about the updates that another number of ranks made, None where there are none.
    """

    level: str
    updates: int
    repeated: int
    items: tuple[str, ...]
    has_metrics: bool
    has_ids: bool
    has_seeded_streams: bool
    divergence: Divergence | None
    apart: Apart | None = None


def compare(rehearsal: Rehearsal) -> Comparison:
    """Return how the chain compares with the uninterrupted start."""
    alike, others = _split(rehearsal)
    level, is_seeded = _lowest_level(alike), _has_seeded_streams(rehearsal)
    apart = Apart(tolerance=rehearsal.tolerance) if others else None
    other_level = _lowest_level(others)
    expected = {update.step: update for update in rehearsal.baseline.updates}
    streams = {step: update.streams for step, update in expected.items()} if is_seeded else {}
    seen: set[int] = set()
    updates = repeated = 0
    first: Divergence | None = None
    for number, start in enumerate(rehearsal.starts, 1):
        step = 0
        if start.restored is not None:
            step = start.restored.step
            if start.restored.is_fresh and not is_seeded:
                streams = {}
        for update in start.updates:
            step += 1
            if apart is not None and number > len(alike):
                values, apart = _values_apart(expected.get(step), update, step, other_level, apart)
            else:
                values = _update_values(expected.get(step), update, step, level, streams.get(step, update.streams))
            if values and first is None:
                first = Divergence(number, update.step, values, is_before_any_kill=number == 1)
            streams.setdefault(step, update.streams)
            updates += 1
            repeated += update.step in seen
            seen.add(update.step)
    items: tuple[str, ...] = ()
    if rehearsal.starts and rehearsal.starts[-1].is_complete:
        left_out = frozenset() if is_seeded else frozenset({STREAMS_ITEM})
        final_level = "approximate" if others else level
        values, items = _final_values(rehearsal.baseline, rehearsal.starts[-1], final_level, left_out)
        if values and first is None:
            first = Divergence(len(rehearsal.starts), None, values, is_before_any_kill=len(rehearsal.starts) == 1)
    made = [*rehearsal.baseline.updates, *(update for start in rehearsal.starts for update in start.updates)]
    has_metrics, has_ids = any(update.metrics for update in made), any(update.ids for update in made)
    return Comparison(level, updates, repeated, items, has_metrics, has_ids, is_seeded, first, apart)


def _split(rehearsal: Rehearsal) -> tuple[tuple[Start, ...], tuple[Start, ...]]:
    """Return the starts up to the first one with another number of ranks, and the rest."""
    starts, ranks = rehearsal.starts, rehearsal.baseline.ranks
    first = next((number for number, start in enumerate(starts) if start.ranks != ranks), len(starts))
    return starts[:first], starts[first:]


def _has_seeded_streams(rehearsal: Rehearsal) -> bool:
    """Return whether the first update of two fresh starts left the random streams equal."""
    found = next((start.updates[0] for start in rehearsal.starts if start.updates), None)
    expected = rehearsal.baseline.updates[0] if rehearsal.baseline.updates else None
    if found is None or expected is None or found.step != expected.step:
        return True
    return found.streams == expected.streams or (found.metrics, found.ids) != (expected.metrics, expected.ids)


def _lowest_level(starts: tuple[Start, ...]) -> str:
    promises = [start.restored.promise for start in starts if start.restored is not None]
    return min(promises, key=lambda level: LEVELS.index(level) if level in LEVELS else -1, default="exact")


def _update_values(expected: Update | None, found: Update, step: int, level: str, streams: str) -> tuple[Unequal, ...]:
    if found.step != step:
        return (Unequal("step", str(step), str(found.step)),)
    if expected is None:
        return (Unequal("number of updates", f"none after update {step - 1}", f"update {step}"),)
    values: list[Unequal] = []
    if level != "approximate":
        values += _unequal("ids of", _texts(expected.ids), _texts(found.ids))
    if level == "exact":
        values += _unequal("metric", expected.metrics, found.metrics)
        values += _unequal("random", {"streams": streams}, {"streams": found.streams})
    return tuple(values)


def _values_apart(
    expected: Update | None, found: Update, step: int, level: str, apart: Apart
) -> tuple[tuple[Unequal, ...], Apart]:
    """Return what differs of an update that another number of ranks made, and the comparison with it counted in."""
    if expected is None or found.step != step:
        return _update_values(expected, found, step, level, ""), apart
    apart = replace(apart, updates=apart.updates + 1)
    if level == "approximate":
        return (), apart
    values = _unequal("ids of", _texts(samples_together(expected)), _texts(samples_together(found)))
    wanted, seen = means(expected), means(found)
    values += _unequal("metric", dict.fromkeys(wanted, "a value"), dict.fromkeys(seen, "a value"))
    for name in sorted(wanted.keys() & seen.keys()):
        difference = _relative_difference(wanted[name], seen[name])
        if difference > apart.largest:
            apart = replace(apart, largest=difference, place=f"metric {name} of update {step}")
        if difference > apart.tolerance:
            values.append(Unequal(f"metric {name}", repr(wanted[name]), repr(seen[name])))
    return tuple(values), apart


def _relative_difference(expected: float, found: float) -> float:
    if expected == found or (math.isnan(expected) and math.isnan(found)):
        return 0.0
    difference = abs(expected - found) / max(abs(expected), abs(found))
    return math.inf if math.isnan(difference) else difference


def _final_values(
    baseline: Start, last: Start, level: str, left_out: frozenset[str]
) -> tuple[tuple[Unequal, ...], tuple[str, ...]]:
    values: list[Unequal] = []
    if baseline.last_step != last.last_step:
        values.append(Unequal("last update", str(baseline.last_step), str(last.last_step)))
    if level != "exact":
        return tuple(values), ()
    expected, found = (
        {name: digest for name, digest in (start.state or {}).items() if without_rank(name) not in left_out}
        for start in (baseline, last)
    )
    values += _unequal("item", expected, found)
    return tuple(values), tuple(sorted(expected.keys() & found.keys()))


def _unequal(kind: str, expected: Mapping[str, str], found: Mapping[str, str]) -> list[Unequal]:
    names = [*expected, *(name for name in found if name not in expected)]
    return [
        Unequal(f"{kind} {name}", _short(expected.get(name, _NOTHING)), _short(found.get(name, _NOTHING)))
        for name in names
        if expected.get(name) != found.get(name)
    ]


def _texts(ids: Mapping[str, tuple[int, ...]]) -> dict[str, str]:
    return {name: " ".join(map(str, numbers)) for name, numbers in ids.items()}


def _short(text: str) -> str:
    return text if len(text) <= _LONGEST_TEXT else text[: _LONGEST_TEXT - 1] + "…"
