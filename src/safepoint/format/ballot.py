"""A ballot: what one rank reports to the leader when its objects are durable.

Spec: C4.
"""

from __future__ import annotations

import msgspec

from safepoint.errors import AbortedError
from safepoint.format.index import Count, ObjectReference


class Ballot(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Report one rank's stored objects, or why it could not store them (`refusal` is not empty).

    `layout` is the digest of the boxes that it stored. `shares` are what it adds to the digest of each item (F7.5).
    `referenced_bytes` is the size of the chunks that lie in ancestors' files.
    `replicas` holds a digest of checksums for each set of boxes that it shares with other ranks, by the set's number.
    """

    run: str
    generation: str
    incarnation: Count
    rank: Count
    world_size: Count
    layout: str
    objects: tuple[ObjectReference, ...]
    refusal: str = ""
    shares: dict[str, str] = {}
    replicas: dict[str, str] = {}
    referenced_bytes: Count = 0


def check_ballots(ballots: list[Ballot], *, run: str, generation: str, incarnation: int, world_size: int) -> None:
    """Raise `AbortedError` unless there is one consenting ballot of this generation from each rank.

    Spec: C4.
    """
    expected = (run, generation, incarnation, world_size)
    for ballot in ballots:
        found = (ballot.run, ballot.generation, ballot.incarnation, ballot.world_size)
        where = f"rank {ballot.rank}"
        if found != expected:
            raise AbortedError("a ballot belongs to another save", where=where, expected=expected, found=found)
        if ballot.refusal:
            raise AbortedError("a rank could not store its part", where=where, found=ballot.refusal)
    ranks = sorted(ballot.rank for ballot in ballots)
    if ranks != list(range(world_size)):
        raise AbortedError("not every rank voted once", where=generation, expected=list(range(world_size)), found=ranks)
