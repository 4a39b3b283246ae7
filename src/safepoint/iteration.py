"""Loops over epochs and batches that a resumed script needs no arithmetic for."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import nullcontext
from typing import TypeVar

from safepoint.boundary import Boundary
from safepoint.data.workers import prepared_workers
from safepoint.due import DueSaves
from safepoint.errors import RequestError
from safepoint.state.placement import StreamPlacement, undisturbed_streams
from safepoint.stop import Stop

Batch = TypeVar("Batch")


def epochs_left(
    total: int, boundary: Boundary, placement: StreamPlacement, end_epoch: Callable[[], None], stop: Stop
) -> Iterator[int]:
    """Yield the numbers of the epochs that are left, and close each one after the loop's body.

    What was drawn between a restore and the first epoch belongs to the start of a program, not to its training. A body
    that ends on the boundary of a restore made in it is begun again from there. A run that should stop begins no other
    epoch, and may leave this one in its middle.

    Raises:
        RequestError: The body ended, and the epoch has not.
    """
    placement.begin_training()
    while boundary.progress.epoch < total and not stop.should_stop:
        number, restores = boundary.progress.epoch, boundary.restores
        yield number
        is_gone_back = boundary.restores != restores and boundary.stands_where_restored
        if is_gone_back or boundary.progress.epoch > number:
            continue
        if stop.should_stop:
            return
        if not boundary.finish_epoch():
            raise RequestError(
                "the body of the loop over epochs ended in the middle of an epoch",
                where=f"epoch {number}",
                expected="all batches of manager.batches(loader)",
                found=f"batches left, or no loader that tells its end, at step {boundary.progress.step}",
                remedy="To stop training, leave the loop over epochs too; for shorter epochs, use a shorter loader.",
            )
        end_epoch()


def rest_of_epoch(
    loader: Iterable[Batch], boundary: Boundary, placement: StreamPlacement, due: DueSaves
) -> Iterator[Batch]:
    """Yield the batches of the rest of one epoch, with the random streams in place before the first one is made.

    Directly after a restore at an epoch's end it yields nothing, so that a script does what follows the epoch.
    """
    placement.begin_pass()
    due.before_batch()
    one = boundary.begin_pass(loader)
    if one is None:
        return
    due.begin_epoch()
    keeps_count = boundary.is_watched(loader)
    try:
        # Where the order is drawn from the global stream, making the iterator is a part of the training. Where the
        # order is saved, what an iterator draws differs between a whole epoch and the rest of one.
        with prepared_workers(loader), undisturbed_streams() if boundary.is_told(loader) else nullcontext():
            iterator = iter(loader)
        while True:
            if not keeps_count:
                due.before_batch()
            placement.place()
            try:
                batch = next(iterator)
            except StopIteration:
                break
            boundary.hand_out(one)
            yield batch
        boundary.finish_pass(one)
    finally:
        boundary.leave_pass(one)
