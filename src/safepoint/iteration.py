"""Loops over epochs and batches that a resumed script needs no arithmetic for."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import TypeVar

from safepoint.boundary import Boundary
from safepoint.state.placement import StreamPlacement

Batch = TypeVar("Batch")


def epochs_left(
    total: int, boundary: Boundary, placement: StreamPlacement, end_epoch: Callable[[], None]
) -> Iterator[int]:
    """Yield the numbers of the epochs that are left, and close each one after the loop's body.

    What was drawn between a restore and the first epoch belongs to the start of a program, not to its training.
    """
    boundary.uses_end_epoch = True
    placement.settle()
    while boundary.progress.epoch < total:
        yield boundary.progress.epoch
        if not boundary.progress.epoch_end_due:
            return
        end_epoch()


def rest_of_epoch(loader: Iterable[Batch], boundary: Boundary, placement: StreamPlacement) -> Iterator[Batch]:
    """Yield the batches of the rest of one epoch, with the random streams in place before the first one is made.

    At an epoch's end that is not closed it yields nothing, so that a script restored there does what follows the epoch.
    """
    if boundary.progress.epoch_end_due:
        return
    keeps_count = boundary.is_watched(loader)
    iterator = iter(loader)
    while True:
        placement.place()
        try:
            batch = next(iterator)
        except StopIteration:
            break
        if not keeps_count:
            boundary.hand_out(loader)
        yield batch
    if not keeps_count:
        boundary.mark_epoch_end()
