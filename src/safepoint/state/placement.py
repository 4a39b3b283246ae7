"""The second placing of the random streams, when the first batch after a restore is handed out.

A run that resumes inside an epoch does what an uninterrupted one did at the epoch's begin: it makes iterators, starts
workers, perhaps seeds again. What that draws the uninterrupted run did not draw at this point, so the streams are put
back just before the loop goes on. At an epoch's begin both do the same, and nothing is put back.
"""

from __future__ import annotations

import logging

from safepoint.state.randomness import RandomStreams

_log = logging.getLogger(__name__)


class StreamPlacement:
    """Hold the random streams of a restore until its first batch."""

    def __init__(self) -> None:
        self._streams: RandomStreams | None = None

    def arm(self) -> None:
        """Take the streams as they are now."""
        self._streams = RandomStreams.snapshot()

    def disarm(self) -> None:
        """Let the streams be."""
        self._streams = None

    def place(self) -> None:
        """Put the streams back, once, if something moved them since."""
        if self._streams is None:
            return
        if self._streams.moved():
            _log.info("random streams moved between the restore and its first batch; they were put back")
            self._streams.put_back()
        self._streams = None
