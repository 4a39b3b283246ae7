"""Compare a chain of killed and resumed starts with the uninterrupted one, value by value.

1. Equal means equal bits: metrics are compared as exact text, states and random streams by digest.
2. Every update is compared that any start made, also those that were made again after a restore.
3. What a restore said it does not keep is not held against it: at ``same_data`` only the samples are compared, at
   ``approximate`` only the count of updates.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from safepoint.contract import LEVELS
from safepoint.drill.events import Update
from safepoint.drill.trace import Rehearsal, Start

_NOTHING = "nothing"
_LONGEST_TEXT = 80


@dataclass(frozen=True, slots=True)
class Unequal:
    """Name one value that differs: what it is, in the uninterrupted run and in the other."""

    subject: str
    expected: str
    found: str

    def __str__(self) -> str:
        return f"{self.subject}: uninterrupted {self.expected}, here {self.found}"


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
class Comparison:
    """Hold the outcome: how much was compared, at which level, and the first divergence."""

    level: str
    updates: int
    repeated: int
    items: int
    divergence: Divergence | None


def compare(rehearsal: Rehearsal) -> Comparison:
    """Return how the chain compares with the uninterrupted start."""
    level = _lowest_level(rehearsal.starts)
    expected = {update.step: update for update in rehearsal.baseline.updates}
    seen: set[int] = set()
    updates = repeated = 0
    first: Divergence | None = None
    for number, start in enumerate(rehearsal.starts, 1):
        before_any_kill = number == 1
        step = start.restored.step if start.restored is not None else 0
        for update in start.updates:
            step += 1
            values = _update_values(expected.get(step), update, step, level)
            if values and first is None:
                first = Divergence(number, update.step, values, before_any_kill)
            updates += 1
            repeated += update.step in seen
            seen.add(update.step)
    items = 0
    if rehearsal.starts and rehearsal.starts[-1].is_complete:
        last = rehearsal.starts[-1]
        values, items = _final_values(rehearsal.baseline, last, level)
        if values and first is None:
            first = Divergence(len(rehearsal.starts), None, values, len(rehearsal.starts) == 1)
    return Comparison(level, updates, repeated, items, first)


def _lowest_level(starts: tuple[Start, ...]) -> str:
    promises = [start.restored.promise for start in starts if start.restored is not None]
    return min(promises, key=lambda level: LEVELS.index(level) if level in LEVELS else -1, default="exact")


def _update_values(expected: Update | None, found: Update, step: int, level: str) -> tuple[Unequal, ...]:
    if found.step != step:
        return (Unequal("step", str(step), str(found.step)),)
    if expected is None:
        return (Unequal("number of updates", f"none after update {step - 1}", f"update {step}"),)
    values: list[Unequal] = []
    if level != "approximate":
        values += _unequal("ids of", _texts(expected.ids), _texts(found.ids))
    if level == "exact":
        values += _unequal("metric", expected.metrics, found.metrics)
        values += _unequal("random", {"streams": expected.streams}, {"streams": found.streams})
    return tuple(values)


def _final_values(baseline: Start, last: Start, level: str) -> tuple[tuple[Unequal, ...], int]:
    values: list[Unequal] = []
    if baseline.last_step != last.last_step:
        values.append(Unequal("last update", str(baseline.last_step), str(last.last_step)))
    if level != "exact":
        return tuple(values), 0
    expected, found = baseline.state or {}, last.state or {}
    values += _unequal("item", expected, found)
    return tuple(values), len(expected.keys() & found.keys())


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
