"""Apply: set the live objects, in the one order that is right.

Modules first; schedulers before optimizers, because the optimizer's hyper-parameters are what the next update uses;
random streams last, because nothing may draw between their restore and the first batch.

Spec: C11.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from safepoint.errors import RequestError, SafepointError
from safepoint.restoring.validate import SavedState
from safepoint.state.item import Item, Permits

FIRST = ("module", "scheduler", "optimizer", "scaler")
LAST = ("torch_generator", "numpy_generator", "python_random", "global_random")


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
