"""Passes over loaders, and what an input tells of its position."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from safepoint.data.cursor import Cursor
from safepoint.errors import RequestError


@runtime_checkable
class Position(Protocol):
    """A position in the input that separates what was handed out from what is finished with."""

    @property
    def uncommitted(self) -> int:
        """Return how much was handed out since the last commit."""

    def commit(self, batches: int | None = None, /) -> None:
        """Count what was handed out as finished with; None for all of it."""


class Loader(Position, Protocol):
    """A position in a data set, which knows its epoch and the samples it handed out."""

    @property
    def epoch(self) -> int: ...

    @property
    def position(self) -> int: ...

    @property
    def uncommitted_samples(self) -> int: ...

    @property
    def uncommitted_total(self) -> int: ...

    def last_ids(self) -> list[int]: ...


@dataclass(slots=True, eq=False)
class Pass:
    """Hold one pass over a loader: what it handed out since the last boundary, and in all.

    `begun` is the epoch in which a loader that counts epochs began it.
    """

    loader: object
    begun: int
    handed: int = 0
    in_all: int = 0


def length_of(loader: object) -> int | None:
    """Return the number of batches of a loader; None if it does not tell."""
    try:
        return len(loader)  # type: ignore[arg-type]  # what has no length says so
    except (TypeError, NotImplementedError):
        return None


def held_samples(loader: Loader | None) -> tuple[int, int]:
    """Return the samples in the batches handed out and not committed: of this rank, and of all by the loader's plan."""
    return (0, 0) if loader is None else (loader.uncommitted_samples, loader.uncommitted_total)


def epochs_finished(loader: Loader) -> int:
    """Return how many epochs a loader's committed batches complete; it may have handed out some of the next one."""
    return loader.epoch - (loader.uncommitted > loader.position)


def committed(cursor: Cursor) -> int:
    """Return the committed offset of a cursor."""
    return cursor.offset - cursor.uncommitted


def uncommitted_cursor(name: str, cursor: Cursor) -> RequestError:
    """Return the error of a cursor of which nobody said how far the update has used it."""
    return RequestError(
        "a cursor counts units, so a number of batches does not say how far it is finished with",
        where=name,
        found=f"{cursor.uncommitted} units handed out since its last commit",
        remedy="Call cursor.commit(n) with the units of the update before after_update(batches=...).",
    )
