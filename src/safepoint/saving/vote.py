"""Vote and check: planned == voted == stored, or nothing is published.

Spec: C4, C5.
"""

from __future__ import annotations

import msgspec

from safepoint.errors import AbortedError, CorruptionError, ObjectMissingError
from safepoint.format.ballot import Ballot, check_ballots
from safepoint.format.extent import Box, check_tiling
from safepoint.format.index import Index, ObjectReference
from safepoint.format.names import generation_path
from safepoint.group.base import Group
from safepoint.storage.base import Storage


def vote(group: Group, ballot: Ballot, *, deadline_s: float) -> list[Ballot] | None:
    """Send this rank's ballot; return all of them on the leader, None elsewhere.

    Raises:
        AbortedError: A ballot is missing, late, refusing or foreign.

    Spec: C4.
    """
    messages = group.gather(f"ballot/{ballot.generation}", msgspec.json.encode(ballot), deadline_s=deadline_s)
    if messages is None:
        return None
    try:
        ballots = [msgspec.json.decode(message, type=Ballot) for message in messages]
    except msgspec.DecodeError as exc:
        raise AbortedError("a ballot cannot be decoded", where=ballot.generation, found=str(exc)) from exc
    check_ballots(
        ballots,
        run=ballot.run,
        generation=ballot.generation,
        incarnation=ballot.incarnation,
        world_size=ballot.world_size,
    )
    return ballots


def check_stored(storage: Storage, objects: tuple[ObjectReference, ...]) -> None:
    """Raise `AbortedError` unless every object that was voted for is there with its size.

    Spec: C5.
    """
    for reference in objects:
        path = generation_path(reference.generation, reference.name)
        try:
            found: object = storage.size(path)
        except ObjectMissingError:
            found = "no such object"
        if found != reference.size_bytes:
            raise AbortedError(
                "an object that was voted for is not stored as voted",
                where=path,
                expected=f"{reference.size_bytes} bytes",
                found=found,
            )


def check_whole(indexes: list[Index]) -> None:
    """Raise `AbortedError` unless the ranks' boxes tile every tensor exactly.

    Spec: C5.
    """
    boxes: dict[tuple[str, str, tuple[int, ...]], list[Box]] = {}
    for index in indexes:
        for tensor in index.tensors:
            key = (tensor.item, tensor.name, tensor.global_shape)
            boxes.setdefault(key, []).append(Box(tensor.offset, tensor.shape))
    for (item, name, shape), parts in boxes.items():
        try:
            check_tiling(shape, parts, where=f"{item}/{name}")
        except CorruptionError as exc:
            raise AbortedError(
                "the ranks' parts do not make a whole tensor", where=f"{item}/{name}", found=str(exc)
            ) from exc
