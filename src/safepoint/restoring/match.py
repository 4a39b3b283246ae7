"""Match: compare a saved state with the live items of all ranks, before anything is touched.

Spec: C11.1.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from safepoint.contract import UNCHANGED, WORDS, Level, Reason
from safepoint.errors import ContractError, Difference, MismatchError, RequestError
from safepoint.restoring.together import Ranks, merged_findings
from safepoint.restoring.validate import SavedState
from safepoint.state.item import STREAMS_ITEM, Item, Preparing

_LEVELS: dict[str, Level] = {
    "workers": "exact",
    "world_size": "same_data",
    "rng": "same_data",
    "scheduler": "same_data",
}
# What each rank has of its own, and no other rank can be given.
_PER_RANK = ".per_rank"
_REMOVED = ".removed"


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


def match(
    saved: SavedState, items: Mapping[str, Item], choice: Choice, permitted: frozenset[str], *, ranks: Ranks
) -> Match:
    """Compare every item of every rank, and return what shall be restored here.

    Differences whose words are the contract's own (``dataset``, ``scheduler``, …) become reasons, for the contract to
    decide; all others must be permitted.

    Raises:
        RequestError: The choice names an item that exists on neither side.
        MismatchError: Lists every difference that is not permitted, of whatever rank.
        ContractError: The only ones are items that each rank had of its own, and the number of ranks is another.
    """
    names = list(dict.fromkeys(name for name in [*saved.manifest.items, *items] if choice.takes(name)))
    differences = ranks.joined(
        lambda: _differences(saved, items, choice, names),
        lambda parts: _of_all(parts, is_spread=_is_spread(saved, ranks)),
        list[Difference],
    )
    refused = [entry for entry in differences if entry.word not in WORDS and entry.word not in permitted]
    if refused:
        raise _refusal(saved, refused)
    reasons = [
        Reason(entry.word, _LEVELS.get(entry.word, "approximate"), entry.subject, entry.saved, entry.current)
        for entry in differences
    ]
    left = sorted(name for name in items if not choice.takes(name) and name not in choice.late)
    reasons += [Reason(f"{name}.skipped", "approximate", f"item {name!r} was left out", "", "") for name in left]
    absent = [name for name in items if choice.takes(name) and name not in saved.items]
    both = [name for name in names if name in items and name in saved.items]
    chosen = [items[name] for name in both if items[name].type == saved.items[name].type]
    return Match(tuple(chosen), tuple(reasons), tuple(left + absent))


def _differences(
    saved: SavedState, items: Mapping[str, Item], choice: Choice, names: Iterable[str]
) -> list[Difference]:
    _check_choice(saved, items, choice)
    for live in items.values():
        if isinstance(live, Preparing):
            live.prepare()
    found: list[Difference] = []
    for name in names:
        item, stored = items.get(name), saved.items.get(name)
        if name in saved.ownerless:
            if item is not None:
                found.append(_ownerless(saved, name))
        elif item is None and stored is not None:
            found.append(Difference(f"{name}.removed", f"item {name!r}", "present", "absent"))
        elif item is not None and stored is None:
            found.append(Difference(f"{name}.added", f"item {name!r}", "absent", "present"))
        elif item is not None and stored is not None and stored.type != item.type:
            found.append(Difference(f"{name}.type", f"type of item {name!r}", stored.type, item.type))
        elif item is not None and stored is not None:
            found += item.check(stored)
    return found


def _ownerless(saved: SavedState, name: str) -> Difference:
    ranks = saved.manifest.world_size
    owners = f"of each of {ranks} ranks" if ranks > 1 else "of one process"
    if name == STREAMS_ITEM:
        return Difference("rng", "global random streams", owners, "as each rank set them")
    return Difference(f"{name}{_PER_RANK}", f"item {name!r}, each rank's own", owners, "left as it is")


def _of_all(parts: list[list[Difference]], *, is_spread: bool) -> list[Difference]:
    """Return the differences of all ranks; with `is_spread` what one rank lacks is none while another one has it."""
    everywhere = set(parts[0]).intersection(*parts[1:])
    kept = [
        [one for one in found if one in everywhere or not (is_spread and one.word.endswith(_REMOVED))]
        for found in parts
    ]
    return merged_findings(kept)


def _is_spread(saved: SavedState, ranks: Ranks) -> bool:
    """Return whether ranks may hold different parts of one item.

    They did at the save if several of them stored a tree of it, and they may where the number of ranks has changed.
    """
    shared = [name for name, summary in saved.manifest.items.items() if summary.kind != "per_rank"]
    return saved.manifest.world_size != ranks.world_size or any(
        sum(name in index.items for index in saved.indexes) > 1 for name in shared
    )


def _refusal(saved: SavedState, refused: list[Difference]) -> MismatchError:
    where = saved.manifest.generation
    if all(entry.word.endswith(_PER_RANK) for entry in refused):
        words = ", ".join(sorted({repr(entry.word) for entry in refused}))
        return ContractError(
            "the checkpoint holds what each rank had of its own, and was saved by another number of ranks",
            where=where,
            differences=refused,
            remedy=f"{UNCHANGED} Resume on {saved.manifest.world_size} ranks, or leave these items as they are with "
            f"Contract(permit={{{words}}}).",
        )
    return MismatchError(
        "the checkpoint does not fit the live objects",
        where=where,
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
