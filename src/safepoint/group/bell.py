"""The bell: whoever has posted a message rings, and whoever waits for one looks at once.

A ring says nothing but "look". What is there, only the board tells, and everybody also looks now and then: a ring that
is lost, late, repeated or foreign costs time, and nothing else.
"""

from __future__ import annotations

from typing import Protocol

from safepoint.ambient import Ambient


class Bell(Protocol):
    """Tell that something was posted. Several threads may wait and ring at once."""

    @property
    def is_heard(self) -> bool:
        """Return whether all who post messages for this rank can ring here."""

    @property
    def count(self) -> int:
        """Return how often it rang here; it never grows less."""

    def wait(self, count: int, seconds: float) -> None:
        """Return when it has rung more often than `count` times, or the time is over."""

    def ring(self) -> None:
        """Ring where this rank's messages are waited for. Does not wait, and never raises."""

    def close(self) -> None:
        """Let go of the connections. Does not wait, and may be repeated."""


class NoBell:
    """Be the bell of a group that has none: who waits for a ring sleeps.

    Args:
        ambient: The clock.
    """

    is_heard = False
    count = 0

    def __init__(self, ambient: Ambient) -> None:
        self._ambient = ambient

    def wait(self, count: int, seconds: float) -> None:
        """Sleep."""
        self._ambient.sleep(seconds)

    def ring(self) -> None:
        """Do nothing."""

    def close(self) -> None:
        """Do nothing."""
