"""A group of one rank."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

from safepoint.errors import InternalError


class SoloGroup:
    """Be the only rank: every exchange is with oneself."""

    rank = 0
    world_size = 1

    def spread(self, topic: str, message: bytes | None, *, deadline_s: float) -> bytes:
        """Return the message."""
        if message is None:
            raise InternalError("the leader has no message to spread", where=topic)
        return message

    def gather(self, topic: str, message: bytes, *, deadline_s: float) -> list[bytes] | None:
        """Return the one message there is."""
        return [message]

    def watched(self, *, silence_s: float) -> AbstractContextManager[None]:
        """Do nothing: nobody is waited for."""
        return nullcontext()

    def leave(self, topic: str, message: bytes, *, limit_s: float) -> None:
        """Do nothing: nobody else is there to leave something for."""

    def find(self, topic: str, *, limit_s: float) -> bytes | None:
        """Find nothing: nobody else leaves anything."""
        return None

    def settle(self, topic: str) -> None:
        """Do nothing: nothing is kept."""

    def close(self, *, deadline_s: float) -> None:
        """Do nothing: nobody has to be waited for."""
