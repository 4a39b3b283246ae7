"""Save one boundary: capture → stage → write → vote → publish.

`begin` runs at the boundary and returns when nothing of the save refers to live memory any more; `finish` may run in
another thread while training goes on. The live objects are not touched by either.

If we die before `publish` has given the manifest its name, the previous checkpoint is the newest; afterwards this one.

Spec: C2-C7.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass, field

from safepoint.ambient import Ambient
from safepoint.catalog import list_generations
from safepoint.errors import AbortedError, CorruptionError, FencedError, InternalError, SafepointError, StorageError
from safepoint.format.ballot import Ballot
from safepoint.format.digest import digest_bytes
from safepoint.format.index import ObjectReference
from safepoint.format.manifest import Manifest
from safepoint.format.names import GENERATIONS, GenerationName, generation_path, next_nonce
from safepoint.format.records import LineageLink
from safepoint.format.version import FORMAT_VERSION
from safepoint.group.base import Group
from safepoint.joining.claim import Claim, check_not_fenced, loss_of_run, utc_text
from safepoint.saving.capture import Snapshot
from safepoint.saving.publish import publish
from safepoint.saving.stage import StagedRank, StagingBuffer, stage
from safepoint.saving.vote import check_stored, check_whole, vote
from safepoint.saving.write import discard, write
from safepoint.storage.base import Durability, Storage

_NONCE_BYTES = 4
_ENTROPY_BYTES = 3

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class SaveContext:
    """Hold what all saves of one incarnation share.

    `on_phase` is told the name of each phase as it begins, from whichever thread runs it.
    """

    storage: Storage
    group: Group
    ambient: Ambient
    claim: Claim
    chain: tuple[LineageLink, ...]
    deadline_s: float
    buffer: StagingBuffer = field(default_factory=StagingBuffer)
    on_phase: Callable[[str], None] = lambda phase: None


@dataclass(frozen=True, slots=True)
class StagedSave:
    """Hold a save whose copy is complete; refers to no live memory."""

    generation: GenerationName
    snapshot: Snapshot
    staged: StagedRank
    timings_s: dict[str, float]


@dataclass(frozen=True, slots=True)
class SaveResult:
    """Report a committed save: every sync was seen to succeed and the manifest was read back.

    `durability` says what it survives: ``process`` death, ``power`` loss, or loss of a disk (``replicated``).
    """

    generation: str
    step: int
    size_bytes: int
    durability: Durability
    timings_s: dict[str, float]


def begin(context: SaveContext, snapshot: Snapshot) -> StagedSave:
    """Copy a snapshot, at the boundary. Live memory may change as soon as this returns.

    Spec: C2.
    """
    started = context.ambient.monotonic()
    context.on_phase("stage")
    step, incarnation = snapshot.progress.step, context.claim.incarnation
    entropy = context.ambient.token(_ENTROPY_BYTES)
    nonce = next_nonce(list_generations(context.storage), step=step, incarnation=incarnation, entropy=entropy)
    name = GenerationName(step, incarnation, nonce)
    staged = stage(
        snapshot.items,
        generation=str(name),
        rank=context.group.rank,
        world_size=context.group.world_size,
        buffer=context.buffer,
    )
    return StagedSave(name, snapshot, staged, {"stage": context.ambient.monotonic() - started})


def finish(context: SaveContext, save: StagedSave) -> SaveResult:
    """Make a staged save durable, agree on it, and publish it.

    An attempt that published nothing for certain deletes its own objects.

    Raises:
        StorageError: It could not be stored, or the run's folder is gone; nothing was published.
        AbortedError: A rank refused or was absent, or what is stored is not what was voted; nothing was published.
        FencedError: A newer incarnation owns the run.
        OutcomeUnknownError: It may have been published.

    Spec: C2-C7.
    """
    loss = loss_of_run(context.storage, context.claim)
    if loss is not None:
        raise loss
    try:
        return _finish(context, save)
    except (StorageError, AbortedError, CorruptionError) as exc:
        # None of these comes once the manifest may have its name. The objects of a fenced start are the newer one's.
        _raise_deeper_cause(context, exc)
        discard(context.storage, save.staged.index)
        raise


def _finish(context: SaveContext, save: StagedSave) -> SaveResult:
    clock = _PhaseClock(context, save.timings_s)
    generation = str(save.generation)

    clock.enter("plan")
    check_not_fenced(context.storage, context.claim, ambient=context.ambient)
    context.storage.make_folder(generation_path(generation))
    context.storage.sync_folder(GENERATIONS)

    clock.enter("write")
    objects = write(context.storage, save.staged)

    clock.enter("vote")
    ballots = vote(context.group, _ballot(context, save, objects), deadline_s=context.deadline_s)
    if ballots is None:
        raise InternalError("a rank that does not lead cannot publish", where=generation)
    voted = tuple(reference for ballot in ballots for reference in ballot.objects)

    clock.enter("check")
    check_whole([save.staged.index])
    check_stored(context.storage, voted)

    clock.enter("publish")
    publish(context.storage, _manifest(context, save, voted, clock.timings_s), context.claim, ambient=context.ambient)
    clock.leave()

    size_bytes = sum(reference.size_bytes for reference in voted if reference.generation == generation)
    return SaveResult(generation, save.generation.step, size_bytes, context.storage.durability, clock.timings_s)


def _raise_deeper_cause(context: SaveContext, failure: SafepointError) -> None:
    """Raise what a failure comes from where a newer start, or the loss of the run's folder, explains it.

    A newer start sweeps what we write, and its absence then looks like a failing storage.
    """
    loss = loss_of_run(context.storage, context.claim)
    if loss is not None:
        raise loss from failure
    try:
        check_not_fenced(context.storage, context.claim, ambient=context.ambient)
    except FencedError as exc:
        raise exc from failure
    except StorageError as exc:
        _log.debug("whether a newer start explains a failed save could not be seen: %s", exc)


def _ballot(context: SaveContext, save: StagedSave, objects: tuple[ObjectReference, ...]) -> Ballot:
    return Ballot(
        run=context.claim.run,
        generation=str(save.generation),
        incarnation=context.claim.incarnation,
        rank=context.group.rank,
        world_size=context.group.world_size,
        layout=save.staged.layout,
        objects=objects,
    )


def _manifest(
    context: SaveContext, save: StagedSave, objects: tuple[ObjectReference, ...], timings_s: dict[str, float]
) -> Manifest:
    snapshot = save.snapshot
    return Manifest(
        format=FORMAT_VERSION,
        flags=(),
        run=context.claim.run,
        generation=str(save.generation),
        incarnation=context.claim.incarnation,
        step=snapshot.progress.step,
        boundary="after_update",
        created=utc_text(context.ambient.now()),
        lineage=context.chain,
        progress=snapshot.progress,
        world_size=context.group.world_size,
        mesh=None,
        contract=snapshot.contract,
        items=save.staged.summaries,
        objects=objects,
        layout=digest_bytes(save.staged.layout.encode("ascii")),
        conditions=snapshot.conditions,
        metrics=dict(snapshot.metrics),
        probe=snapshot.probe,
        agreement="one rank",
        timings_s=dict(timings_s),
        nonce=context.ambient.token(_NONCE_BYTES),
    )


class _PhaseClock:
    """Time the phases, in seconds, and announce them."""

    def __init__(self, context: SaveContext, timings_s: dict[str, float]) -> None:
        self.timings_s = dict(timings_s)
        self._context = context
        self._phase = ""
        self._since = 0.0

    def enter(self, phase: str) -> None:
        """End the phase before, and begin this one."""
        self.leave()
        self._phase, self._since = phase, self._context.ambient.monotonic()
        self._context.on_phase(phase)

    def leave(self) -> None:
        """End the phase at work, if there is one."""
        if self._phase:
            self.timings_s[self._phase] = self._context.ambient.monotonic() - self._since
            self._phase = ""
