"""Live objects that a damaged checkpoint was read into: they hold a mixture until a good one was read over it."""

from __future__ import annotations

from collections.abc import Sequence

from safepoint.contract import UNCHANGED
from safepoint.errors import MismatchError

MIXED = (
    "The live objects may hold a mixture of states: restore a good checkpoint into them, or make them anew, before "
    "they are used."
)


def of_mixture(remedy: str) -> str:
    """Return a remedy that says in what state the live objects are left."""
    return f"{MIXED} {remedy.removeprefix(UNCHANGED).lstrip()}".rstrip()


def check_is_covered(generation: str, written_before: set[tuple[str, str]], left: Sequence[str]) -> None:
    """Raise `MismatchError` when something is left as it is that a damaged candidate was read into.

    Args:
        written_before: (item, tensor) of earlier candidates that this one does not hold.
        left: Items, and ``<item>/<name>`` within items, that this candidate leaves as they are.
    """
    items = sorted({item for item, _ in written_before})
    stale = [item for item in items if any(name == item or name.startswith(f"{item}/") for name in left)]
    if stale:
        raise MismatchError(
            "a damaged checkpoint was read into what the older one that is good does not hold",
            where=generation,
            found=", ".join(stale),
        )
