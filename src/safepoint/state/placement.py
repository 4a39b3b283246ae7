"""Placing the random streams again between a restore and the first batch.

A start draws: from making objects late, from a seed set again, from iterators and workers. What it draws before its
training goes on, the uninterrupted run drew long ago, so the streams are put back.

1. Before the loop over epochs begins: `begin_training`. When a late object has its state: `settle`.
2. When the first batch is handed out inside an epoch: `place`. An uninterrupted run made its iterator at the epoch's
   begin. At an epoch's begin both make one, both draw the same, and nothing is put back.
3. What a script draws at an epoch's begin before its iterator may belong to each start or to each epoch, which cannot
   be told apart: it is left, with a warning.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager

from safepoint.state.randomness import RandomStreams

_log = logging.getLogger(__name__)


@contextmanager
def undisturbed_streams() -> Iterator[RandomStreams]:
    """Put the random streams back after a block that may draw; it is given what they are."""
    streams = RandomStreams.snapshot()
    try:
        yield streams
    finally:
        if streams.moved():
            streams.put_back()


class StreamPlacement:
    """Hold the random streams of a restore until its first batch."""

    def __init__(self) -> None:
        self._streams: RandomStreams | None = None
        self._is_within_epoch = False

    def arm(self, *, is_within_epoch: bool) -> None:
        """Take the streams as they are now."""
        self._streams = RandomStreams.snapshot()
        self._is_within_epoch = is_within_epoch

    def disarm(self) -> None:
        """Let the streams be."""
        self._streams = None

    def settle(self) -> None:
        """Put the streams back if something moved them since, and keep them for the first batch."""
        if self._streams is not None and self._streams.moved():
            _log.info("random streams moved between a restore and the training; they were put back")
            self._streams.put_back()

    def begin_training(self) -> None:
        """Put the streams back; at an epoch's begin what is drawn from here on belongs to the training."""
        self.settle()
        if not self._is_within_epoch:
            self._streams = None

    def begin_pass(self) -> None:
        """Warn, at an epoch's begin or end, of what was drawn since the restore: it is not undone."""
        if self._streams is None or self._is_within_epoch:
            return
        if self._streams.moved():
            _log.warning(
                "random streams moved between a restore and the first batch of an epoch, and were left as they are; "
                "unless each epoch draws the same there, the run differs from an uninterrupted one. "
                "Draw before restore(), or loop over manager.epochs(), which puts the streams back"
            )
        self._streams = None

    def place(self) -> None:
        """Put the streams back, once, unless the epoch begins here."""
        self.begin_pass()
        self.settle()
        self._streams = None
