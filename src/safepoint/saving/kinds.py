"""Kinds: what an item is to the ranks that hold it, as they are found, or as the program declares.

A declared kind is a promise of the program's: it takes the place of the one that is found, or aborts the save where
what the ranks hold contradicts it.

Spec: F7.6.
"""

from __future__ import annotations

from collections.abc import Mapping

from safepoint.errors import AbortedError

_MOST_LISTED = 8


def find_kind(states: Mapping[int, str], declared: Mapping[int, str], *, item: str, is_in_parts: bool) -> str:
    """Return the kind of an item.

    Args:
        states: The digest of the whole state of each rank that has the item; empty where ranks hold parts or replicas.
        declared: The kind that each of these ranks declares, or nothing.
        item: The item's name.
        is_in_parts: Whether a tensor of the item is held in parts.

    Raises:
        AbortedError: The ranks declare different kinds, or hold what contradicts the declared one.

    Spec: F7.6.
    """
    distinct = set(states.values())
    if "" in distinct:
        found = "sharded" if is_in_parts else "replicated"
    else:
        found = "global" if len(distinct) == 1 else "per_rank"
    kind = _agreed(declared, item)
    contradicts = {
        "per_rank": found in ("sharded", "replicated"),
        "replicated": found in ("sharded", "per_rank"),
        "sharded": found != "sharded",
    }
    if contradicts.get(kind, False):
        raise AbortedError(
            f"an item that is declared {kind} is not so",
            where=item,
            expected=_EXPECTED[kind],
            found=_told(found, states),
            remedy=f"Find what makes it so, or register it without {kind}().",
        )
    return kind if kind == "per_rank" else found


_EXPECTED = {
    "per_rank": "a state that is each rank's own: no module, no optimizer, no distributed tensors",
    "replicated": "the same state on all ranks",
    "sharded": "tensors of which each rank holds a part",
}


def _agreed(declared: Mapping[int, str], item: str) -> str:
    """Return the one kind that all ranks declare, or nothing."""
    first: dict[str, int] = {}
    for rank, kind in sorted(declared.items()):
        first.setdefault(kind, rank)
    if len(first) > 1:
        told = ", ".join(f"{kind or 'none'} on rank {rank}" for kind, rank in first.items())
        raise AbortedError(
            "the ranks declare different kinds of one item",
            where=item,
            found=told,
            remedy="Register it alike on all ranks.",
        )
    return next(iter(first))


def _told(found: str, states: Mapping[int, str]) -> str:
    """Return the kind that was found, and where states differ the ranks that are unlike the lowest one."""
    reference = states[min(states)]
    others = [rank for rank in sorted(states) if states[rank] != reference]
    if found != "per_rank":
        return found
    more = f" and {len(others) - _MOST_LISTED} more" if len(others) > _MOST_LISTED else ""
    return f"another state on rank {', '.join(map(str, others[:_MOST_LISTED]))}{more} than on rank {min(states)}"
