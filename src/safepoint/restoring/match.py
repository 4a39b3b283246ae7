"""Match: compare a saved state with the live items, before anything is touched."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from safepoint.contract import UNCHANGED, WORDS, Level, Reason
from safepoint.errors import Difference, MismatchError, RequestError
from safepoint.restoring.validate import SavedState
from safepoint.state.item import Item

_LEVELS: dict[str, Level] = {
    "workers": "exact",
    "world_size": "same_data",
    "rng": "same_data",
    "scheduler": "same_data",
}


@dataclass(frozen=True, slots=True)
class Choice:
    """Say which items a restore leaves out.

    `skip` stay as they are; `only`, if given, are the only ones restored; `late` are registered after the restore.
    """

    skip: frozenset[str] = frozenset()
    only: frozenset[str] | None = None
    late: frozenset[str] = frozenset()

    def takes(self, name: str) -> bool:
        """Return whether an item shall be restored now."""
        return name not in self.skip and name not in self.late and (self.only is None or name in self.only)


@dataclass(frozen=True, slots=True)
class Match:
    """Hold the items to restore and the reasons that accepted differences give to the promise."""

    items: tuple[Item, ...]
    reasons: tuple[Reason, ...]
    left_fresh: tuple[str, ...]


def match(saved: SavedState, items: Mapping[str, Item], choice: Choice, permitted: frozenset[str]) -> Match:
    """Compare every item, and return what shall be restored.

    Differences whose words are the contract's own (``dataset``, ``scheduler``, …) become reasons, for the contract to
    decide; all others must be permitted.

    Raises:
        RequestError: The choice names an item that exists on neither side.
        MismatchError: Lists every difference that is not permitted.
    """
    _check_choice(saved, items, choice)
    differences: list[Difference] = []
    chosen: list[Item] = []
    for name in [*saved.items, *(name for name in items if name not in saved.items)]:
        if not choice.takes(name):
            continue
        item, stored = items.get(name), saved.items.get(name)
        if item is None:
            differences.append(Difference(f"{name}.removed", f"item {name!r}", "present", "absent"))
        elif stored is None:
            differences.append(Difference(f"{name}.added", f"item {name!r}", "absent", "present"))
        elif stored.type != item.type:
            differences.append(Difference(f"{name}.type", f"type of item {name!r}", stored.type, item.type))
        else:
            differences += item.check(stored)
            chosen.append(item)
    refused = [entry for entry in differences if entry.word not in WORDS and entry.word not in permitted]
    if refused:
        raise MismatchError(
            "the checkpoint does not fit the live objects",
            where=saved.manifest.generation,
            differences=refused,
            remedy=f"{UNCHANGED} Make them fit, permit words in Contract(permit=...), or name what to leave "
            "out in restore(skip=...).",
        )
    reasons = [
        Reason(entry.word, _LEVELS.get(entry.word, "approximate"), entry.subject, entry.saved, entry.current)
        for entry in differences
    ]
    left = sorted(name for name in items if not choice.takes(name) and name not in choice.late)
    reasons += [Reason(f"{name}.skipped", "approximate", f"item {name!r} was left out", "", "") for name in left]
    absent = [name for name in items if choice.takes(name) and name not in saved.items]
    return Match(tuple(chosen), tuple(reasons), tuple(left + absent))


def _check_choice(saved: SavedState, items: Mapping[str, Item], choice: Choice) -> None:
    known = set(saved.items) | set(items)
    named: Iterable[str] = choice.skip | (choice.only or frozenset()) | choice.late
    unknown = sorted(set(named) - known)
    if unknown:
        raise RequestError(
            "a restore names items that do not exist", expected=f"some of {sorted(known)}", found=", ".join(unknown)
        )
    registered = sorted(choice.late & set(items))
    if registered:
        raise RequestError("an item that is registered cannot be late", found=", ".join(registered))
