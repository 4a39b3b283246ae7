"""Replicas: whether ranks that hold the same box hold the same bytes.

Each rank adds up every box that others hold as well, where it lies, and votes with one digest for each set of boxes.
The sums themselves are sent only where digests differ.

Spec: C5.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass

import msgspec

from safepoint.errors import AbortedError
from safepoint.format.ballot import Ballot
from safepoint.saving.divide import Division
from safepoint.saving.pieces import ReplicaSums


@dataclass(frozen=True, slots=True)
class Doubts:
    """Name the replica sets whose digests differ: those that must not, and those whose lowest holder counts."""

    sets: tuple[int, ...] = ()
    is_leaders_own: bool = False


def find_doubts(ballots: Sequence[Ballot], division: Division) -> Doubts:
    """Return the replica sets on whose digests their holders do not agree.

    Raises:
        AbortedError: A rank did not vote on a set that it holds.
    """
    found = []
    for number, holders in enumerate(division.holders):
        digests = {rank: ballots[rank].replicas.get(str(number)) for rank in holders}
        silent = [rank for rank, digest in digests.items() if digest is None]
        if silent:
            raise AbortedError("a rank did not compare what it shares", where=f"rank {silent[0]}")
        if len(set(digests.values())) > 1:
            found.append(number)
    must = tuple(number for number in found if number not in division.leaders)
    return Doubts(must, len(must) < len(found))


def encode_sums(sums: Sequence[ReplicaSums], sets: Sequence[int]) -> bytes:
    """Return a rank's checksums of these sets as bytes to be sent to the leader."""
    return msgspec.json.encode({str(one.number): one.sums for one in sums if one.number in sets})


def find_difference(messages: Sequence[bytes], division: Division, sets: Sequence[int]) -> str:
    """Return the first tensor on whose bytes its holders differ, with the ranks; sums and ranks in order.

    Raises:
        AbortedError: A rank's sums cannot be decoded.
    """
    try:
        told = [msgspec.json.decode(message, type=dict[str, dict[str, int]]) for message in messages]
    except msgspec.DecodeError as exc:
        raise AbortedError("the checksums of a rank cannot be decoded", found=str(exc)) from exc
    for number in sets:
        by_rank = {rank: told[rank].get(str(number), {}) for rank in division.holders[number]}
        boxes = sorted({box for sums in by_rank.values() for box in sums})
        for box in boxes:
            found = {rank: sums.get(box) for rank, sums in by_rank.items()}
            if len(set(found.values())) > 1:
                return f"{box}: {describe_sides(found)}"
    return "none: the checksums agree, and their digests did not"


def describe_agreement(division: Division, difference: str, *, is_leaders_own: bool) -> str:
    """Return what the manifest says of replicas that were compared."""
    text = f"{sum(division.box_counts)} replicated boxes compared"
    text += f", different: {difference}" if difference else ", equal"
    return f"{text}, but for buffers, of which the lowest rank's are stored" if is_leaders_own else text


def describe_sides(values: Mapping[int, Hashable]) -> str:
    """Return for people which ranks hold the same, the lowest first."""
    sides: dict[Hashable, list[int]] = {}
    for rank in sorted(values):
        sides.setdefault(values[rank], []).append(rank)
    return " unlike ".join(map(_ranks, sides.values()))


def _ranks(ranks: Sequence[int]) -> str:
    shown = ", ".join(map(str, ranks[:16]))
    rest = f" and {len(ranks) - 16} more" if len(ranks) > 16 else ""
    return f"rank {shown}" if len(ranks) == 1 else f"ranks {shown}{rest}"
