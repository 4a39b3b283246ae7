"""What the phases ask of the ranks of a job."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Protocol


class Group(Protocol):
    """Exchange small messages among the ranks of one job.

    1. Each exchange has a topic: names parted by ``/``, used once. All ranks make the same exchanges, those of one
       thread in the same order; exchanges of several threads do not disturb each other.
    2. Each wait has a deadline, in seconds from the call. No call lasts longer than that and a fixed grace, also when
       the leader's process is stopped or its host cut off.
    3. `AbortedError` names the absent ranks and the topic, and is the same on all ranks that hear it: it is the
       leader's word. `LeaderLostError` says that the leader's word did not come, and thus not what it did.
    """

    @property
    def rank(self) -> int:
        """Return this process's rank."""

    @property
    def world_size(self) -> int:
        """Return the number of ranks."""

    def spread(self, topic: str, message: bytes | None, *, deadline_s: float) -> bytes:
        """Return the leader's message on every rank; ranks other than the leader pass None.

        The leader does not wait for the others to read it.

        Raises:
            LeaderLostError: The message did not come.
        """

    def gather(self, topic: str, message: bytes, *, deadline_s: float) -> list[bytes] | None:
        """Return the messages of all ranks, in their order, on the leader; None on the others.

        A return is an acknowledgement: the leader has the messages of all ranks.

        Raises:
            AbortedError: Messages of some ranks were not there when the leader's deadline was over.
            LeaderLostError: This rank's message was sent, and the leader did not say whether it has all.
        """

    def watched(self, *, silence_s: float) -> AbstractContextManager[None]:
        """Show signs of life while the block runs, and end its waits for ranks that show none.

        A rank that is slow shows them, one that is stopped or gone does not; one that is in no such block is waited for
        as ever. The errors are those of an absent rank, and of a leader that is lost. Of waits, only those of this
        thread are concerned.

        Args:
            silence_s: How long there may be no sign.
        """

    def leave(self, topic: str, message: bytes, *, limit_s: float) -> None:
        """Leave a message for the leader, which looks for it when it likes; a later one replaces it.

        From any thread of any rank; it waits for nobody, and a return proves nothing.

        Raises:
            LeaderLostError: It could not be left within `limit_s`.
        """

    def find(self, topic: str, *, limit_s: float) -> bytes | None:
        """Return, on the leader, what a rank has left under a topic, where it stays; None where none has.

        Raises:
            LeaderLostError: It could not be looked at within `limit_s`.
        """

    def settle(self, topic: str) -> None:
        """Forget what was exchanged under a topic and below it.

        To be called when every rank has made a later exchange of the same thread, so that nobody reads it any more. It
        does not wait, and does nothing on ranks other than the leader.
        """

    def close(self, *, deadline_s: float) -> None:
        """Take leave: the leader waits until the others have, for they may still read its last word. Never raises."""
