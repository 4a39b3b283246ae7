"""What several ranks told, put together to what one run tells.

1. A restore, an update and the end are complete when every rank told them; each value keeps in its name the rank it
   came from, so that ranks are compared one by one.
2. Ranks that tell different things at the same time are apart, and are not waited for.
3. Where the number of ranks changed, what they did together is compared: the samples of all in rank order, which is the
   global order, and the mean of each metric over the ranks.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TypeVar

from safepoint.drill.events import Apart, Closed, Event, Restored, State, Update

Value = TypeVar("Value")

_OF = " of rank "


def of_rank(name: str, rank: int) -> str:
    """Return the name that a value of one rank has among those of all."""
    return f"{name}{_OF}{rank}"


def without_rank(name: str) -> str:
    """Return the name that a value has on its own rank."""
    return name.rpartition(_OF)[0] or name


def join_events(told: Mapping[int, Event]) -> Event:
    """Return the event that all ranks told together, or `Apart` where they did not tell the same one."""
    events = [told[rank] for rank in sorted(told)]
    updates = [event for event in events if isinstance(event, Update)]
    states = [event for event in events if isinstance(event, State)]
    restores = {_restored(event) for event in events if isinstance(event, Restored)}
    if len(updates) == len(events) and len({event.step for event in updates}) == 1:
        return Update(
            updates[0].step,
            _named(event.metrics for event in updates),
            _named(event.ids for event in updates),
            " ".join(event.streams for event in updates),
        )
    if len(states) == len(events):
        return State(_named(event.items for event in states))
    if all(isinstance(event, Restored) for event in events) and len(restores) == 1:
        return events[0]
    if all(isinstance(event, Closed) for event in events):
        return events[0]
    return Apart(", ".join(f"rank {rank} {_place(told[rank])}" for rank in sorted(told)))


def samples_together(update: Update) -> dict[str, tuple[int, ...]]:
    """Return the samples of all ranks in rank order, by loader."""
    together: dict[str, tuple[int, ...]] = {}
    for name, ids in update.ids.items():
        together[without_rank(name)] = (*together.get(without_rank(name), ()), *ids)
    return together


def means(update: Update) -> dict[str, float]:
    """Return the mean of each metric over the ranks that told it."""
    values: dict[str, list[float]] = {}
    for name, text in update.metrics.items():
        values.setdefault(without_rank(name), []).append(float.fromhex(text))
    return {name: sum(numbers) / len(numbers) for name, numbers in values.items()}


def _named(parts: Iterable[Mapping[str, Value]]) -> dict[str, Value]:
    return {of_rank(name, rank): value for rank, part in enumerate(parts) for name, value in part.items()}


def _restored(event: Restored) -> tuple[int, str | None, bool]:
    return event.step, event.generation, event.is_fresh


def _place(event: Event) -> str:
    if isinstance(event, Update):
        return f"after update {event.step}"
    if isinstance(event, Restored):
        return "at a fresh start" if event.is_fresh else f"after restoring {event.generation}"
    return "at its end" if isinstance(event, Closed) else "telling its state"
