"""What a group needs of a transport: messages under keys, on a board that the leader keeps."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol


class Board(Protocol):
    """Hold messages under keys until they are taken or removed.

    No call waits for a message. A call that is not done after `limit_s` seconds, or that meets a broken connection,
    raises `LeaderLostError`: the board lies with the leader. Several threads may call at once.
    """

    def post(self, key: str, message: bytes, *, limit_s: float) -> None:
        """Put a message there, or replace it. Readers see all of it or nothing. A return proves nothing."""

    def look(self, key: str, *, limit_s: float) -> bytes | None:
        """Return the message under a key, and leave it there; None where there is none."""

    def take(self, keys: Sequence[str], *, limit_s: float) -> dict[str, bytes]:
        """Return the messages that are there, and take them off."""

    def remove(self, keys: Sequence[str], *, limit_s: float) -> None:
        """Take off messages that this rank posted; keys under which there is none are passed over."""

    def close(self) -> None:
        """Let go of the board; on the leader it ends for all. Does not wait, and may be repeated."""
