"""Apply: set the live objects, in the one order that is right, and read them back.

Modules first; schedulers before optimizers, because the optimizer's hyper-parameters are what the next update uses;
random streams last, because nothing may draw between their restore and the first batch.

Spec: C11.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from safepoint.contract import Reason
from safepoint.errors import InternalError, RequestError, SafepointError
from safepoint.restoring.read import BoxKey
from safepoint.restoring.split import differing_part
from safepoint.restoring.together import merged_findings, merged_names
from safepoint.restoring.validate import SavedState
from safepoint.state.item import Item, Permits
from safepoint.state.snapshot import capture_item, digest_state

FIRST = ("module", "scheduler", "optimizer", "scaler")
LAST = ("torch_generator", "numpy_generator", "python_random", "global_random")


@dataclass(frozen=True, slots=True)
class ReadBack:
    """Say how many items are equal, which differ and may, and which objects did not take their state."""

    equal: int
    notes: tuple[str, ...]
    reasons: tuple[Reason, ...]


@runtime_checkable
class Keeping(Protocol):
    """An item that may keep, deliberately, what the checkpoint does not know."""

    @property
    def keeps_own(self) -> bool:
        """Return whether it does, so that it is not what was saved although all is well."""


@runtime_checkable
class Forgiving(Protocol):
    """An item that may differ from what it was given although all is well."""

    @property
    def may_differ(self) -> bool:
        """Return whether it may."""


def in_order(items: Iterable[Item]) -> list[Item]:
    """Return items in the order in which they are applied; within a type as registered."""
    middle = len(FIRST)
    ranks = {kind: place for place, kind in enumerate((*FIRST, "", *LAST))}
    return sorted(items, key=lambda item: ranks.get(item.type, middle))


def apply(saved: SavedState, items: Sequence[Item], permits: Permits) -> list[str]:
    """Set all items and return what they deliberately left as it was.

    Raises:
        RequestError: The user's own code did not take what it was given.

    Spec: C11.
    """
    left: list[str] = []
    for item in in_order(items):
        try:
            kept = item.apply(saved.items[item.name], permits)
        except SafepointError:
            raise
        except Exception as exc:
            raise RequestError(
                "an object did not take the state that was saved of it",
                where=item.name,
                found=f"{type(exc).__name__}: {exc}",
                remedy="Make it take that state, or leave it out with restore(skip=...).",
            ) from exc
        left += [f"{item.name}/{name}" for name in kept]
    return left


def read_back(
    saved: SavedState,
    items: Sequence[Item],
    *,
    changed: frozenset[str],
    filled: Mapping[BoxKey, str] | None = None,
    undisturbed: Callable[[], AbstractContextManager[None]] = nullcontext,
) -> ReadBack:
    """Capture the live state again and compare it with what was saved.

    Args:
        saved: The saved state.
        items: What was restored.
        changed: Items in which a permitted difference makes the live state another one.
        filled: The digests of what this rank's targets were given, where no rank has the whole state; for None the
            manifest's digests are compared.
        undisturbed: Puts the random streams back after a block; the one that does needs torch.

    Raises:
        InternalError: An item that safepoint itself sets is not what was saved.

    Spec: C11.
    """
    equal, notes, reasons = 0, [], []
    # Random streams first: to tell its state an object may draw, which is undone in the end.
    compared = [item for item in reversed(in_order(items)) if item.name not in changed and not _keeps_own(item)]
    with undisturbed():
        differing = {item.name: _difference(saved, item, filled) for item in compared}
    for item in compared:
        found = differing[item.name]
        if found is None:
            equal += 1
        elif item.type == "stateful":
            text = "its state_dict() differs from what its load_state_dict() was given"
            if isinstance(item, Forgiving) and item.may_differ:
                notes.append(f"{item.name}: {text}")
            else:
                reasons.append(Reason(f"{item.name}.state", "approximate", f"{item.name}: {text}", "", ""))
        else:
            raise InternalError(
                "a restored item is not what was saved", where=item.name, expected=found[0], found=found[1]
            )
    return ReadBack(equal, tuple(notes), tuple(reasons))


def merged_read_backs(parts: list[ReadBack]) -> ReadBack:
    """Return what all ranks found: an item counts as equal where it is that on every rank."""
    return ReadBack(
        min(part.equal for part in parts),
        tuple(merged_names([part.notes for part in parts])),
        tuple(merged_findings([part.reasons for part in parts])),
    )


def _keeps_own(item: Item) -> bool:
    return isinstance(item, Keeping) and item.keeps_own


def _difference(saved: SavedState, item: Item, filled: Mapping[BoxKey, str] | None) -> tuple[str, str] | None:
    """Return what was expected and found where an item's live state is not the saved one."""
    snapshot = capture_item(item)
    if filled is not None:
        return differing_part(saved, snapshot, filled)
    stated, found = saved.manifest.items[item.name].digest, digest_state(snapshot)
    return None if found == stated else (f"digest {stated}", found)
