"""Passes over loaders, and what an input tells of its position."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from safepoint.data.cursor import Cursor
from safepoint.data.sampler import ResumableSampler
from safepoint.errors import RequestError

_PARTS = ("dataset", "sampler", "batch_sampler")


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

    `begun` is the epoch in which a loader that counts epochs began it, `held` what all positions had handed out and not
    committed then. `is_told` says that an item tells where its batches come from.
    """

    loader: object
    begun: int
    held: int = 0
    is_told: bool = False
    handed: int = 0
    in_all: int = 0


def parts_in_step(loader: object) -> list[object]:
    """Return the parts of a loader whose position is that of its batches.

    With workers, only that of safepoint's own sampler is: other samplers run ahead, and data sets are read in copies.
    """
    parts = [getattr(loader, name, None) for name in _PARTS]
    if getattr(loader, "num_workers", 0):
        return [part for part in parts if isinstance(part, ResumableSampler)]
    return parts


def handed_out(positions: Iterable[Position]) -> int:
    """Return how much positions have handed out and not committed, each in its own unit."""
    return sum(one.uncommitted for one in positions)


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


def commit_window(position: Position, batches: int | None, *, window: int, dropped: int) -> None:
    """Count what an update used of a position as finished with.

    Args:
        position: The position of an item.
        batches: How many batches belong to the update; None for all that were handed out.
        window: How many microbatches the update has.
        dropped: How many batches were handed out and not used.
    """
    if isinstance(position, ResumableSampler):
        # A sampler does not see which of its batches the loop has received: each microbatch is one.
        position.commit(min(window + dropped, position.uncommitted))
    elif batches is None or not (hasattr(position, "last_ids") or isinstance(position, Cursor)):
        position.commit(None)
    elif not isinstance(position, Cursor):
        position.commit(min(batches + dropped, position.uncommitted))


def committed_offsets(positions: Mapping[str, Position]) -> dict[str, int]:
    """Return the committed offset of each cursor."""
    return {name: _committed(one) for name, one in positions.items() if isinstance(one, Cursor)}


def check_cursors(positions: Mapping[str, Position], before: Mapping[str, int]) -> None:
    """Raise `RequestError` for a cursor of which nobody said how far the update has used it.

    Args:
        positions: The positions by item.
        before: What `committed_offsets` returned at the last boundary.
    """
    for name, one in positions.items():
        if isinstance(one, Cursor) and one.uncommitted and _committed(one) == before[name]:
            raise RequestError(
                "a cursor counts units, so a number of batches does not say how far it is finished with",
                where=name,
                found=f"{one.uncommitted} units handed out since its last commit",
                remedy="Call cursor.commit(n) with the units of the update before after_update(batches=...).",
            )


def _committed(cursor: Cursor) -> int:
    return cursor.offset - cursor.uncommitted
