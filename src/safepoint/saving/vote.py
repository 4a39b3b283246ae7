"""Vote and check: planned == voted == stored, or nothing is published.

1. A rank waits for the end of the vote as long as the leader may take to come to it, and to hear the slowest rank.
2. Who has voted yes and does not hear the leader's word does not know the outcome: a paused leader may still publish.

Spec: C4, C5.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from safepoint.ambient import Ambient
from safepoint.errors import AbortedError, CorruptionError, LeaderLostError, ObjectMissingError, OutcomeUnknownError
from safepoint.format.ballot import Ballot, check_ballots
from safepoint.format.index import ObjectReference
from safepoint.format.names import data_name, generation_path, index_name
from safepoint.group.base import Group
from safepoint.saving.divide import Division
from safepoint.storage.base import Storage
from safepoint.storage.sizes import sizes_of

_POLL_S = 0.25


def vote(group: Group, ballot: Ballot, *, deadline_s: float) -> list[bytes] | None:
    """Send this rank's ballot; return the messages of all ranks on the leader, None elsewhere.

    Args:
        group: The ranks.
        ballot: What this rank stored, or why it could not.
        deadline_s: How much later than the leader the slowest rank may be, and the leader than any other.

    Raises:
        AbortedError: A rank is absent.
        OutcomeUnknownError: This rank voted yes, and the leader's word did not come.

    Spec: C4.
    """
    wait_s = deadline_s if group.rank == 0 else 2 * deadline_s
    try:
        return group.gather(f"save/{ballot.generation}/ballot", msgspec.json.encode(ballot), deadline_s=wait_s)
    except LeaderLostError as exc:
        if group.rank == 0 or ballot.refusal:
            raise
        raise unknown(ballot.generation, exc) from exc


def unknown(generation: str, cause: LeaderLostError) -> OutcomeUnknownError:
    """Return the error of a rank that has voted yes and does not hear the leader's word."""
    return OutcomeUnknownError(
        "this rank has voted, and the leader did not say whether the checkpoint was made",
        where=generation,
        found=str(cause),
        remedy="The next save, or the next start, settles it; older checkpoints are untouched.",
    )


def count(messages: Sequence[bytes], own: Ballot) -> list[Ballot]:
    """Return the ballots, one consenting one of each rank for the save of the leader's own ballot.

    Raises:
        AbortedError: A ballot is missing, refusing, repeated or foreign, or cannot be decoded.

    Spec: C4.
    """
    try:
        ballots = [msgspec.json.decode(message, type=Ballot) for message in messages]
    except msgspec.DecodeError as exc:
        raise AbortedError("a ballot cannot be decoded", where=own.generation, found=str(exc)) from exc
    check_ballots(
        ballots,
        run=own.run,
        generation=own.generation,
        incarnation=own.incarnation,
        world_size=own.world_size,
    )
    for place, ballot in enumerate(ballots):
        if ballot.rank != place:
            raise AbortedError("a rank sent the ballot of another", where=f"rank {place}", found=f"rank {ballot.rank}")
    return ballots


def check_planned(ballots: Sequence[Ballot], division: Division) -> None:
    """Raise `AbortedError` unless each rank stored the boxes that were planned for it, in its own two files.

    The plan itself was proven to tile every tensor when it was made.

    Spec: C5.
    """
    for ballot, digest in zip(ballots, division.digests, strict=True):
        own = {data_name(ballot.rank, ballot.world_size), index_name(ballot.rank, ballot.world_size)}
        named = [entry.name for entry in ballot.objects if entry.generation == ballot.generation]
        if ballot.layout != digest or sorted(named) != sorted(own):
            raise AbortedError(
                "a rank stored something else than was planned",
                where=f"rank {ballot.rank}",
                expected=f"boxes with the digest {digest} in {', '.join(sorted(own))}",
                found=f"{ballot.layout} in {', '.join(sorted(named))}",
            )


def check_stored(
    storage: Storage, objects: Sequence[ObjectReference], *, ambient: Ambient, deadline_s: float = 0.0
) -> None:
    """Raise `AbortedError` unless every object that was voted for is there with its size.

    Args:
        storage: Where they lie.
        objects: What was voted for.
        ambient: The clock.
        deadline_s: How long to look again: what another host wrote may take a while to be seen here.

    Spec: C5.
    """
    ends = ambient.monotonic() + deadline_s
    left = list(objects)
    while True:
        sizes = _sizes(storage, left)
        wrong = [(entry, found) for entry, found in zip(left, sizes, strict=True) if found != entry.size_bytes]
        if not wrong:
            return
        if ambient.monotonic() >= ends:
            entry, found = wrong[0]
            raise AbortedError(
                "an object that was voted for is not stored as voted",
                where=generation_path(entry.generation, entry.name),
                expected=f"{entry.size_bytes} bytes",
                found="no such object" if found is None else found,
            )
        left = [entry for entry, _ in wrong]
        ambient.sleep(_POLL_S)


def _sizes(storage: Storage, objects: Sequence[ObjectReference]) -> list[int | None]:
    found: list[int | None] = []
    for size in sizes_of(storage, [generation_path(entry.generation, entry.name) for entry in objects]):
        if isinstance(size, CorruptionError):
            raise size
        found.append(None if isinstance(size, ObjectMissingError) else size)
    return found
