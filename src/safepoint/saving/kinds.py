"""Kinds: what an item is to the ranks that hold it, as they are found, or as the program declares.

A declared kind is a promise of the program's: it takes the place of the one that is found, or aborts the save where
what the ranks hold contradicts it.

Spec: F7.6.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping, Sequence

from safepoint.errors import AbortedError
from safepoint.format.columns import Columns

_MOST_LISTED = 8


def find_kind(
    states: Mapping[int, str],
    declared: Mapping[int, str],
    *,
    item: str,
    is_in_parts: bool,
    trees: Mapping[int, str],
    layouts: Sequence[Columns],
) -> str:
    """Return the kind of an item.

    Args:
        states: The digest of the whole state of each rank that has the item; empty where ranks hold parts or replicas.
        declared: The kind that each of these ranks declares, or nothing.
        item: The item's name.
        is_in_parts: Whether a tensor of the item is held in parts.
        trees: The digest of the plain tree of each of these ranks, unless it may depend on what else the rank holds.
        layouts: The layout of each rank of the job.

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
    names = _names(item, states, layouts) if kind and found == "replicated" else {}
    unlike: list[int] = []
    if kind and found == "per_rank":
        unlike = _unlike(states)
    elif kind == found == "replicated":
        unlike = _unlike(trees) or _unlike(names)
    if kind == "replicated":
        unlike = unlike or [rank for rank in range(len(layouts)) if rank not in states]
    # An optimizer that has made no step has nothing that could be in parts.
    is_bare = bool(names) and not any(names.values())
    contradicts = {
        "per_rank": found in ("sharded", "replicated"),
        "replicated": found == "sharded" or bool(unlike),
        "sharded": found != "sharded" and not is_bare,
    }
    if contradicts.get(kind, False):
        raise AbortedError(
            f"an item that is declared {kind} is not so",
            where=item,
            expected=_EXPECTED[kind],
            found=_told(found, unlike, min(states)),
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


def _names(item: str, holders: Iterable[int], layouts: Sequence[Columns]) -> dict[int, frozenset[str]]:
    """Return the names of the tensors that each of some ranks holds of an item."""
    frames = {layouts[rank].frame.digest: layouts[rank].frame for rank in holders}
    names = {
        digest: frozenset(tensor.name for tensor in frame.tensors if tensor.item == item)
        for digest, frame in frames.items()
    }
    return {rank: names[layouts[rank].frame.digest] for rank in holders}


def _unlike(held: Mapping[int, Hashable]) -> list[int]:
    """Return the ranks that hold something else than the lowest one."""
    expected = held[min(held)] if held else None
    return [rank for rank in sorted(held) if held[rank] != expected]


def _told(found: str, unlike: Sequence[int], first: int) -> str:
    """Return the kind that was found, or which ranks are unlike the lowest one."""
    if not unlike:
        return found
    more = f" and {len(unlike) - _MOST_LISTED} more" if len(unlike) > _MOST_LISTED else ""
    return f"another state on rank {', '.join(map(str, unlike[:_MOST_LISTED]))}{more} than on rank {first}"
