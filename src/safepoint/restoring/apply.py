"""Apply: set the live objects, in the one order that is right, and read them back.

Modules first; schedulers before optimizers, because the optimizer's hyper-parameters are what the next update uses;
random streams last, because nothing may draw between their restore and the first batch.

Spec: C11.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from safepoint.contract import Reason
from safepoint.errors import InternalError
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

    Spec: C11.
    """
    left: list[str] = []
    for item in in_order(items):
        left += [f"{item.name}/{name}" for name in item.apply(saved.items[item.name], permits)]
    return left


def read_back(
    saved: SavedState,
    items: Sequence[Item],
    *,
    changed: frozenset[str],
    undisturbed: Callable[[], AbstractContextManager[None]] = nullcontext,
) -> ReadBack:
    """Capture the live state again and compare its digests with the manifest's.

    Args:
        changed: Items in which a permitted difference makes the live state another one.
        undisturbed: Puts the random streams back after a block; the one that does needs torch.

    Raises:
        InternalError: An item that safepoint itself sets is not what was saved.

    Spec: C11.
    """
    equal, notes, reasons = 0, [], []
    # Random streams first: to tell its state an object may draw, which is undone in the end.
    compared = [item for item in reversed(in_order(items)) if item.name not in changed]
    with undisturbed():
        digests = {item.name: digest_state(capture_item(item)) for item in compared}
    for item in compared:
        found, stated = digests[item.name], saved.manifest.items[item.name].digest
        if found == stated:
            equal += 1
        elif item.type == "stateful":
            text = "its state_dict() differs from what its load_state_dict() was given"
            if isinstance(item, Forgiving) and item.may_differ:
                notes.append(f"{item.name}: {text}")
            else:
                reasons.append(Reason(f"{item.name}.state", "approximate", f"{item.name}: {text}", "", ""))
        else:
            raise InternalError(
                "a restored item is not what was saved", where=item.name, expected=f"digest {stated}", found=found
            )
    return ReadBack(equal, tuple(notes), tuple(reasons))
