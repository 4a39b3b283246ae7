"""The small records beside the manifest: run, incarnation, resumed, refused, tombstone, verified, pin.

Spec: F6.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from safepoint.errors import CorruptionError
from safepoint.format.index import Count
from safepoint.format.names import GenerationName


class LineageLink(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """State that an incarnation resumed a generation at a step, or nothing (then `step` is 0)."""

    incarnation: Count
    resumed: str | None
    step: Count


class RunRecord(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Give a run its identity; written once."""

    format: Count
    flags: tuple[str, ...]
    run: str
    created: str
    nonce: str


class Holder(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Name the process that holds a run; the fields are those of `safepoint.ambient.ProcessIdentity`."""

    host: str
    user: str
    boot: str
    namespace: str
    pid: Count
    start: str


class IncarnationRecord(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Claim a number for one start of the job."""

    format: Count
    run: str
    incarnation: Count
    nonce: str
    holder: Holder
    world_size: Count
    started: str
    versions: dict[str, str]
    elastic_run: str = ""
    elastic_restart: Count = 0


class Refusal(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Say why a generation was not chosen, at the level of a file."""

    generation: str
    file: str
    reason: str


class ResumedRecord(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Record what an incarnation resumed from: a generation, or nothing.

    `chain` ends with this incarnation's own link. `source` names another run that the generation is of, as the user
    called it: then the chain begins with this link.
    """

    format: Count
    run: str
    incarnation: Count
    resumed: str | None
    step: Count
    chain: tuple[LineageLink, ...]
    refused: tuple[Refusal, ...]
    branch: bool
    nonce: str
    source: str = ""


class RefusedRecord(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Close a claim that lost: readers and fences pass it over."""

    format: Count
    run: str
    incarnation: Count
    reason: str
    nonce: str


class TombstoneRecord(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Mark a generation for deletion."""

    format: Count
    run: str
    generation: str
    incarnation: Count
    reason: str
    nonce: str


class VerifiedRecord(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Note that every byte of a generation was read back and matched."""

    format: Count
    run: str
    generation: str
    manifest: str
    verified: str
    nonce: str


class PinRecord(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Keep a generation whatever retention decides. `pinned` is the time, for people."""

    format: Count
    run: str
    generation: str
    reason: str
    pinned: str
    nonce: str


def check_chain(chain: Sequence[LineageLink], *, incarnation: int, where: str) -> None:
    """Raise `CorruptionError` unless a lineage chain holds together and ends with an incarnation.

    Spec: C9.
    """
    if not chain or chain[-1].incarnation != incarnation:
        raise CorruptionError("a lineage does not end with its own incarnation", where=where, expected=incarnation)
    before: LineageLink | None = None
    for link in chain:
        resumed = GenerationName.parse(link.resumed) if link.resumed is not None else None
        step = resumed.step if resumed is not None else 0
        if (resumed is None) != (link.resumed is None) or step != link.step:
            raise CorruptionError("a link of a lineage contradicts itself", where=where, found=repr(link)[:200])
        follows = resumed is not None and before is not None and resumed.incarnation == before.incarnation
        if before is not None and not (follows and before.incarnation < link.incarnation and before.step <= link.step):
            raise CorruptionError(
                "a link of a lineage does not follow the one before it", where=where, found=repr(link)[:200]
            )
        before = link


def check_resumed(record: ResumedRecord, *, where: str) -> None:
    """Raise `CorruptionError` unless a resumed record's chain holds together and ends with what the record says.

    Spec: C9.
    """
    check_chain(record.chain, incarnation=record.incarnation, where=where)
    own = LineageLink(record.incarnation, record.resumed, record.step)
    if record.chain[-1] != own:
        raise CorruptionError("a record contradicts its own chain", where=where, found=repr(own)[:200])
    is_foreign = len(record.chain) == 1 and record.resumed is not None
    if is_foreign != bool(record.source):
        found = repr(record.source)[:200]
        raise CorruptionError("a record's source contradicts its chain", where=where, found=found)


def is_on_chain(chain: Sequence[LineageLink], *, incarnation: int, step: int) -> bool:
    """Return whether what an incarnation saved at a step is part of the history that a chain tells.

    Spec: C9.
    """
    for position, link in enumerate(chain):
        if link.incarnation == incarnation:
            following = chain[position + 1 :]
            return not following or step <= following[0].step
    return False
