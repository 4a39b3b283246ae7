"""Commit: what the leader makes of the ballots, and how all ranks hear of it.

1. The leader acts, and its word, a result or an error, is every rank's. Every exchange is one of messages; whoever does
   not hear the word has voted, and thus does not know the outcome.
2. The leader itself knows what it did, also where it cannot tell it any more.

Spec: C4-C7.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import TypeVar

import msgspec

from safepoint.errors import (
    AbortedError,
    CorruptionError,
    FencedError,
    InternalError,
    LeaderLostError,
    OutcomeUnknownError,
    SafepointError,
    StorageError,
)
from safepoint.format.ballot import Ballot
from safepoint.format.digest import digest_bytes
from safepoint.format.index import ObjectReference
from safepoint.format.manifest import Conditions, ItemSummary, Manifest
from safepoint.format.state_digest import joint_digest
from safepoint.format.version import FORMAT_VERSION
from safepoint.group.agreement import lead
from safepoint.joining.claim import check_not_fenced, loss_of_run, utc_text
from safepoint.saving.context import PhaseClock, SaveContext, SaveResult, StagedSave
from safepoint.saving.divide import Division
from safepoint.saving.plan import Plan
from safepoint.saving.publish import publish
from safepoint.saving.replicas import Doubts, describe_agreement, encode_sums, find_difference, find_doubts
from safepoint.saving.vote import check_planned, check_stored, count, unknown

_NONCE_BYTES = 4

_log = logging.getLogger(__name__)

_Result = TypeVar("_Result")


def settle(
    context: SaveContext, save: StagedSave, own: Ballot, messages: list[bytes] | None, clock: PhaseClock
) -> SaveResult:
    """Return the result of a save once the vote is over, or raise why there is none; the same on all ranks.

    Args:
        context: What all saves share.
        save: This rank's part.
        own: This rank's ballot.
        messages: All ballots, on the leader.
        clock: Told the leader's phases.

    Raises:
        SafepointError: As `safepoint.saving.save.finish` does.

    Spec: C4-C7.
    """
    told: list[SaveResult | SafepointError] = []

    def decide(sums: list[bytes] | None, doubts: Doubts) -> bytes:
        try:
            if not save.plan.compares:
                explained(context, count_them)
            result = explained(context, lambda: _decide(context, save, ballots, clock, sums, doubts))
        except SafepointError as exc:
            told.append(exc)
            raise
        told.append(result)
        return msgspec.json.encode(result)

    def count_them() -> None:
        ballots.extend(_counted(save, own, messages))

    ballots: list[Ballot] = []
    try:
        # Where nothing is compared, nothing can be in doubt, and counting is the first step to the verdict.
        doubts = _doubts(context, save, ballots, count_them) if save.plan.compares else Doubts()
        sums = _sums(context, save, doubts)
        word = lead(
            context.group,
            f"save/{save.generation}/verdict",
            lambda: decide(sums, doubts),
            deadline_s=2 * context.deadline_s,
        )
    except LeaderLostError as exc:
        return _without_word(context, save, exc, told, own)
    return msgspec.json.decode(word, type=SaveResult)


def explained(context: SaveContext, act: Callable[[], _Result]) -> _Result:
    """Act, and raise what a failure comes from where a newer start, or the loss of the run's folder, explains it.

    A newer start sweeps what we write, and its absence then looks like a failing storage.
    """
    try:
        return act()
    except (StorageError, AbortedError, CorruptionError) as exc:
        loss = loss_of_run(context.storage, context.claim)
        if loss is not None:
            raise loss from exc
        try:
            check_not_fenced(context.storage, context.claim, ambient=context.ambient)
        except FencedError as fence:
            raise fence from exc
        except StorageError as failure:
            _log.debug("whether a newer start explains a failed save could not be seen: %s", failure)
        raise


def _counted(save: StagedSave, own: Ballot, messages: list[bytes] | None) -> list[Ballot]:
    """Return the ballots, all in favour, and each for what was planned; on the leader."""
    if messages is None or save.division is None:
        raise InternalError("a rank that does not lead cannot count votes", where=save.generation)
    ballots = count(messages, own)
    check_planned(ballots, save.division)
    return ballots


def _doubts(
    context: SaveContext, save: StagedSave, ballots: Sequence[Ballot], count_them: Callable[[], None]
) -> Doubts:
    """Count the ballots on the leader, and return what is in doubt on all ranks."""

    def act() -> bytes:
        count_them()
        if save.division is None:
            raise InternalError("a rank that does not lead cannot compare replicas", where=save.generation)
        return msgspec.json.encode(find_doubts(ballots, save.division))

    # Every rank hears it: what a rank shares with others, only the leader can compare.
    word = lead(
        context.group,
        f"save/{save.generation}/counted",
        lambda: explained(context, act),
        deadline_s=2 * context.deadline_s,
    )
    return msgspec.json.decode(word, type=Doubts)


def _sums(context: SaveContext, save: StagedSave, doubts: Doubts) -> list[bytes] | None:
    """Return on the leader the sums of what is in doubt, of all ranks; None where nothing is."""
    if not doubts.sets:
        return None
    sums = encode_sums(save.sums, doubts.sets)
    return context.group.gather(f"save/{save.generation}/sums", sums, deadline_s=context.deadline_s)


def _without_word(
    context: SaveContext,
    save: StagedSave,
    lost: LeaderLostError,
    told: Sequence[SaveResult | SafepointError],
    own: Ballot,
) -> SaveResult:
    """Return or raise what a rank knows that has lost the leader's word after the vote."""
    if told:
        _log.warning("the outcome of a save could not be told to the other ranks: %s", lost)
        (known,) = told
        if isinstance(known, SafepointError):
            raise known
        return known
    if context.group.rank == 0 or own.refusal:
        # Nothing was published: the leader comes to it after this, or not without our vote.
        raise lost
    raise unknown(save.generation, lost) from lost


def _decide(
    context: SaveContext,
    save: StagedSave,
    ballots: Sequence[Ballot],
    clock: PhaseClock,
    sums: list[bytes] | None,
    doubts: Doubts,
) -> SaveResult:
    """Check what is stored, and publish; on the leader."""
    if save.division is None:
        raise InternalError("a rank that does not lead cannot publish", where=save.generation)
    clock.enter("check")
    found = find_difference(sums, save.division, doubts.sets) if sums is not None else ""
    difference = "; ".join(filter(None, [save.noted, found]))
    agreement = _agreement(context, save, save.division, difference, doubts)
    voted = tuple(reference for ballot in ballots for reference in ballot.objects)
    patience_s = context.deadline_s if context.group.world_size > 1 else 0.0
    check_stored(context.storage, voted, ambient=context.ambient, deadline_s=patience_s)

    clock.enter("publish")
    manifest = _manifest(context, save, ballots, voted, agreement, clock.timings_s)
    if difference:
        text = f"the ranks held other values, and the lowest rank's are stored: {difference}"
        manifest = msgspec.structs.replace(manifest, conditions=_lowered(manifest.conditions, text))
    try:
        publish(context.storage, manifest, context.claim, ambient=context.ambient)
    except SafepointError:
        raise
    except Exception as exc:
        raise OutcomeUnknownError(
            "a publish failed in a way that does not tell whether it was made",
            where=save.generation,
            found=f"{type(exc).__name__}: {exc}",
        ) from exc
    clock.leave()
    size_bytes = sum(reference.size_bytes for reference in voted if reference.generation == save.generation)
    referenced_bytes = sum(ballot.referenced_bytes for ballot in ballots)
    durability = context.storage.durability
    return SaveResult(save.generation, save.plan.step, size_bytes, referenced_bytes, durability, clock.timings_s)


def _agreement(context: SaveContext, save: StagedSave, division: Division, difference: str, doubts: Doubts) -> str:
    """Return what the manifest says of replicas, or raise `AbortedError` when they differ and that is refused."""
    if context.group.world_size == 1:
        return "one rank"
    if not save.plan.compares:
        return "not compared"
    if difference and context.refuses_difference:
        raise AbortedError(
            "ranks that hold the same tensor hold different values",
            where=difference,
            remedy="Find what changed it on one rank alone, or go back to the last checkpoint on all ranks. Where it "
            "is a buffer that DistributedDataParallel hands out, register that wrapper in place of the module in it. "
            "Where it is each rank's own (BatchNorm under fully_shard), let the layer keep it alike, as SyncBatchNorm "
            "does, or save the lowest rank's with on_disagreement='warn'.",
        )
    if difference:
        _log.warning(
            "ranks that hold the same tensor hold different values, and the lowest's are saved: %s", difference
        )
    return describe_agreement(division, difference, is_leaders_own=doubts.is_leaders_own)


def _manifest(
    context: SaveContext,
    save: StagedSave,
    ballots: Sequence[Ballot],
    objects: tuple[ObjectReference, ...],
    agreement: str,
    timings_s: dict[str, float],
) -> Manifest:
    snapshot = save.snapshot
    return Manifest(
        format=FORMAT_VERSION,
        flags=(),
        run=context.claim.run,
        generation=save.generation,
        incarnation=context.claim.incarnation,
        step=save.plan.step,
        boundary="after_update",
        created=utc_text(context.ambient.now()),
        lineage=context.chain,
        progress=snapshot.progress,
        world_size=context.group.world_size,
        mesh=None if context.group.world_size == 1 else _divisions(save.plan),
        contract=snapshot.contract,
        items=_summaries(save, ballots),
        objects=objects,
        layout=digest_bytes("".join(ballot.layout for ballot in ballots).encode("ascii")),
        conditions=snapshot.conditions,
        metrics=dict(snapshot.metrics),
        probe=snapshot.probe,
        agreement=agreement,
        timings_s=dict(timings_s),
        nonce=context.ambient.token(_NONCE_BYTES),
    )


def _lowered(conditions: Conditions, text: str) -> Conditions:
    """Return conditions that also say what a restore cannot give back."""
    return msgspec.structs.replace(conditions, reasons={**conditions.reasons, "replicas": text})


def _divisions(plan: Plan) -> dict[str, list[str]]:
    """Return by item how the ranks that have it divide its tensors, unless none divides any."""
    return {name: list(item.divisions) for name, item in plan.items.items() if any(item.divisions)}


def _summaries(save: StagedSave, ballots: Sequence[Ballot]) -> dict[str, ItemSummary]:
    """Return what the manifest says of each item: type, kind, number and bytes of tensors, and digest of the state."""
    if save.division is None:
        raise InternalError("a rank that does not lead knows of no other rank's items", where=save.generation)
    summaries = {}
    for name, item in save.plan.items.items():
        shares = [ballot.shares[name] for ballot in ballots if name in ballot.shares]
        digest = shares[0] if len(ballots) == 1 else joint_digest(item.type, shares)
        counts, sizes = save.division.tensor_counts, save.division.sizes_bytes
        summaries[name] = ItemSummary(item.type, item.kind, counts.get(name, 0), sizes.get(name, 0), digest, item.ranks)
    return summaries
