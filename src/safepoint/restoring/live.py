"""Live memory: where stored bytes shall go and where they lie then, asked of many targets or sources at once.

A call for each box takes longer than to read and digest a small one. What is of no type that can be asked so is asked
one by one.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import groupby, repeat
from typing import Any, Protocol

from safepoint.state.item import Place, Source, Target, placed


class TargetType(Protocol):
    """A type of targets all of which can be asked at once."""

    def memories(self, targets: Sequence[Any]) -> list[memoryview]:
        """Return `memory` of each."""

    def commit_all(self, targets: Sequence[Any]) -> list[Place | None]:
        """Commit each, and return what `commit` does."""


class PlacedType(Protocol):
    """A type of sources all of which can be asked at once where their bytes lie."""

    def places(self, sources: Sequence[Any]) -> list[Place | None]:
        """Return `place` of each; it may be None of one without bytes."""


def memories_of(targets: Sequence[Target]) -> list[memoryview]:
    """Return the memory of each target."""
    found: list[memoryview] = []
    for kind, run in _by_type(targets, "memories"):
        found += [one.memory() for one in run] if kind is None else kind.memories(run)
    return found


def commit(targets: Sequence[Target]) -> list[Place | None]:
    """Commit each target, and return where its bytes lie now; see `Target.commit`."""
    found: list[Place | None] = []
    for kind, run in _by_type(targets, "commit_all"):
        found += [one.commit() for one in run] if kind is None else kind.commit_all(run)
    return found


def are_in_place(targets: Iterable[Target]) -> bool:
    """Return whether none of the targets has memory that is given back when it is committed; see `is_temporary`."""
    return all(map(getattr, targets, repeat("is_in_place"), repeat(False)))


def places_of(sources: Sequence[Source]) -> list[Place | None]:
    """Return where the bytes of each source lie in live memory as they are stored; None where that is not known."""
    found: list[Place | None] = []
    for kind, run in _by_type(sources, "places"):
        found += map(_place_of, run) if kind is None else kind.places(run)
    return found


def _place_of(source: Source) -> Place | None:
    known = placed(source)
    return None if known is None else known.place()


def _by_type(asked: Sequence[Any], verb: str) -> Iterator[tuple[Any, list[Any]]]:
    """Yield runs of targets or sources of one type, and that type if many can be asked at once."""
    for kind, run in groupby(asked, type):
        # Asking isinstance() of a protocol takes longer.
        yield kind if hasattr(kind, verb) else None, list(run)
