"""Match: compare a saved state with the live items of all ranks, before anything is touched.

Spec: C11.1.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass

from safepoint.contract import DERIVED, PER_RANK, UNCHANGED, WORDS, Level, Reason
from safepoint.errors import Difference, MismatchError, RequestError
from safepoint.restoring.derive import with_derived_streams
from safepoint.restoring.together import Ranks, merged_findings
from safepoint.restoring.validate import SavedState
from safepoint.state.item import STREAMS_ITEM, Forgetting, Item, Preparing

_LEVELS: dict[str, Level] = {
    "workers": "exact",
    "world_size": "same_data",
    "rng": "same_data",
    "scheduler": "same_data",
}
_REMOVED = ".removed"
# Places within one item that a refusal lists.
_SHOWN = 8


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
    """Hold the items to restore and the reasons that differences give to the promise.

    `derivable` are those of the reasons that a contract with ``rng="derive"`` would not give.
    """

    items: tuple[Item, ...]
    reasons: tuple[Reason, ...]
    left_fresh: tuple[str, ...]
    derivable: frozenset[Reason] = frozenset()


def match(
    saved: SavedState, items: Mapping[str, Item], choice: Choice, permitted: frozenset[str], *, ranks: Ranks
) -> Match:
    """Compare every item of every rank, and return what shall be restored here.

    Differences whose words are the contract's own (``dataset``, ``scheduler``, …) become reasons, for the contract to
    decide, and so does what each rank had of its own; all others must be permitted.

    Raises:
        RequestError: The choice names an item that exists on neither side.
        MismatchError: Lists every difference that is not permitted, of whatever rank, where one does not fit.
    """
    names = list(dict.fromkeys(name for name in [*saved.manifest.items, *items] if choice.takes(name)))
    found = ranks.joined(
        lambda: _differences(saved, items, choice, names),
        lambda parts: _of_all(parts, saved, is_same_size=saved.manifest.world_size == ranks.world_size),
        dict[str, list[Difference]],
    )
    differences = [one for listed in found.values() for one in listed]
    refused = [entry for entry in differences if entry.word not in WORDS and entry.word not in permitted]
    if not all(entry.word.endswith(PER_RANK) for entry in refused):
        raise _refusal(saved, refused)
    reasons = [_reason(entry) for entry in differences]
    derivable = frozenset(_reason(_ownerless(saved, name)) for name in _derivable(saved, items, ranks))
    reasons += [_derived(saved, name, ranks) for name in saved.derived if name in items and choice.takes(name)]
    left = sorted(name for name in items if not choice.takes(name) and name not in choice.late)
    reasons += [Reason(f"{name}.skipped", "approximate", f"item {name!r} was left out", "", "") for name in left]
    absent = [name for name in items if choice.takes(name) and name not in saved.items]
    both = [name for name in names if name in items and name in saved.items]
    chosen = [items[name] for name in both if items[name].type == saved.items[name].type]
    return Match(tuple(chosen), tuple(reasons), tuple(left + absent), derivable)


@contextmanager
def forgetting(items: Iterable[Item]) -> Iterator[None]:
    """Have the items let go of what they saw when they were compared, however the restore within the block ends."""
    try:
        yield
    finally:
        for item in items:
            if isinstance(item, Forgetting):
                item.forget()


def _differences(
    saved: SavedState, items: Mapping[str, Item], choice: Choice, names: Iterable[str]
) -> dict[str, list[Difference]]:
    """Return the differences of this rank by item: of each that it has, and each that it had and has no more."""
    _check_choice(saved, items, choice)
    for live in items.values():
        if isinstance(live, Preparing):
            live.prepare()
    found: dict[str, list[Difference]] = {}
    for name in names:
        item, stored = items.get(name), saved.items.get(name)
        if item is None:
            if stored is not None and name not in saved.elsewhere:
                found[name] = [_gone(name)]
        elif name in saved.ownerless:
            found[name] = [_ownerless(saved, name)]
        elif stored is None:
            found[name] = [Difference(f"{name}.added", f"item {name!r}", "absent", "present")]
        elif stored.type != item.type:
            found[name] = [Difference(f"{name}.type", f"type of item {name!r}", stored.type, item.type)]
        else:
            found[name] = [*item.check(stored), *_contradicting(saved, name)]
    return found


def _gone(name: str) -> Difference:
    return Difference(f"{name}{_REMOVED}", f"item {name!r}", "present", "absent")


def _contradicting(saved: SavedState, name: str) -> list[Difference]:
    """Return the values that ranks had each of its own within an item, where none of them is this rank's."""
    places = saved.contradictions.get(name, ())
    if not places:
        return []
    listed = ", ".join(place or "all of it" for place in places[:_SHOWN])
    listed += f" and {len(places) - _SHOWN} more" if len(places) > _SHOWN else ""
    subject = f"item {name!r}, {listed}, each rank's own"
    owners = f"other values on some of {saved.manifest.world_size} ranks"
    return [Difference(f"{name}{PER_RANK}", subject, owners, "those of the lowest rank")]


def _ownerless(saved: SavedState, name: str) -> Difference:
    ranks = saved.manifest.world_size
    owners = f"of each of {ranks} ranks" if ranks > 1 else "of one process"
    if name == STREAMS_ITEM:
        return Difference("rng", "global random streams", owners, "as each rank set them")
    return Difference(f"{name}{PER_RANK}", f"item {name!r}, each rank's own", owners, "left as it is")


def _reason(entry: Difference) -> Reason:
    level = _LEVELS.get(entry.word, "approximate")
    return Reason(entry.word, level, entry.subject, entry.saved, entry.current)


def _derivable(saved: SavedState, items: Mapping[str, Item], ranks: Ranks) -> list[str]:
    if not saved.ownerless:
        return []
    derived = with_derived_streams(saved, items, rank=ranks.rank)
    return [name for name in saved.ownerless if name not in derived.ownerless]


def _derived(saved: SavedState, name: str, ranks: Ranks) -> Reason:
    manifest = saved.manifest
    was, now = f"of {manifest.world_size} ranks", f"derived at step {manifest.step} for {ranks.world_size} ranks"
    return Reason(f"{name}{DERIVED}", "same_data", f"random streams of {name!r}", was, now)


def _of_all(
    parts: list[dict[str, list[Difference]]], saved: SavedState, *, is_same_size: bool
) -> dict[str, list[Difference]]:
    """Return the differences of all ranks by item.

    Where ranks may hold different parts of an item, what one of them lacks is none while another one has it; nor is an
    item itself, where the number of ranks is another.
    """
    found = {}
    for name in dict.fromkeys(name for part in parts for name in part):
        gone = [_gone(name)]
        holders = [set(part[name]) for part in parts if name in part and part[name] != gone]
        lacked = set.intersection(*holders) if holders else set(gone)
        kept = [part.get(name, []) for part in parts]
        if name in saved.divided:
            kept = [
                [
                    one
                    for one in listed
                    if one in lacked or not one.word.endswith(_REMOVED) or (is_same_size and listed == gone)
                ]
                for listed in kept
            ]
        found[name] = merged_findings(kept)
    return found


def _refusal(saved: SavedState, refused: list[Difference]) -> MismatchError:
    return MismatchError(
        "the checkpoint does not fit the live objects",
        where=saved.manifest.generation,
        differences=refused,
        remedy=f"{UNCHANGED} Make them fit, permit words in Contract(permit=...), or name what to leave "
        "out in restore(skip=...).",
    )


def _check_choice(saved: SavedState, items: Mapping[str, Item], choice: Choice) -> None:
    known = set(saved.manifest.items) | set(items)
    named: Iterable[str] = choice.skip | (choice.only or frozenset()) | choice.late
    unknown = sorted(set(named) - known)
    if unknown:
        raise RequestError(
            "a restore names items that do not exist", expected=f"some of {sorted(known)}", found=", ".join(unknown)
        )
    registered = sorted(choice.late & set(items))
    if registered:
        raise RequestError("an item that is registered cannot be late", found=", ".join(registered))
