"""Loops over epochs and batches that a resumed script needs no arithmetic for."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import nullcontext
from typing import TypeVar

from safepoint.boundary import Boundary
from safepoint.state.placement import StreamPlacement, undisturbed_streams

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

    Directly after a restore at an epoch's end it yields nothing, so that a script does what follows the epoch.
    """
    if not boundary.begin_pass():
        return
    keeps_count = boundary.is_watched(loader)
    # Where the order is drawn from the global stream, making the iterator is a part of the training. Where the order is
    # saved, what an iterator draws differs between a whole epoch and the rest of one.
    with undisturbed_streams() if boundary.is_told(loader) else nullcontext():
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
