"""What the phases ask of the ranks of a job."""

from __future__ import annotations

from typing import Protocol


class Group(Protocol):
    """Exchange small messages among the ranks of one job.

    Each exchange has a topic, used once. A wait that passes its deadline raises `AbortedError` naming the absent ranks.
    """

    @property
    def rank(self) -> int:
        """Return this process's rank."""

    @property
    def world_size(self) -> int:
        """Return the number of ranks."""

    def spread(self, topic: str, message: bytes | None, *, deadline_s: float) -> bytes:
        """Return the leader's message on every rank; ranks other than the leader pass None."""

    def gather(self, topic: str, message: bytes, *, deadline_s: float) -> list[bytes] | None:
        """Return the messages of all ranks, in their order, on the leader; None on the others."""
