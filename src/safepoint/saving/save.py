"""Save one boundary: capture → plan → stage → write → vote → check → publish → tell.

`begin` runs at the boundary. `finish` runs there too, and reads live memory as it writes; or, where `begin` has made a
copy, in another thread while training goes on. It talks by the group's messages alone, and touches no live object.

If we die before `publish` has given the manifest its name, the previous checkpoint is the newest; afterwards this one.

Spec: C2-C7.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from functools import partial
from typing import NoReturn

from safepoint.catalog import list_generations
from safepoint.errors import (
    AbortedError,
    CorruptionError,
    OutcomeUnknownError,
    SafepointError,
    StorageError,
    TornSnapshotError,
)
from safepoint.format.ballot import Ballot
from safepoint.format.names import GENERATIONS, GenerationName, generation_path, next_nonce
from safepoint.group.agreement import lead
from safepoint.joining.claim import check_not_fenced, loss_of_run
from safepoint.saving.capture import Snapshot
from safepoint.saving.commit import explained, settle
from safepoint.saving.context import PhaseClock, SaveContext, SaveResult, StagedSave
from safepoint.saving.copying import Copying
from safepoint.saving.crossing import Copier, Crossing
from safepoint.saving.describe import Place
from safepoint.saving.entries import compare_entries
from safepoint.saving.form import FileForm
from safepoint.saving.increment import Increment, find_kept, full, without_kept
from safepoint.saving.parts import written
from safepoint.saving.pieces import ReplicaSums, sources_of, sum_replicas
from safepoint.saving.plan import UNKNOWN, Agreed, Plan
from safepoint.saving.pour import Origin
from safepoint.saving.ring import LiveOrigin
from safepoint.saving.room import check_room
from safepoint.saving.stage import ImageOrigin
from safepoint.saving.vote import vote
from safepoint.saving.write import Stored, discard, write
from safepoint.state.far import far_among
from safepoint.state.item import Owned, Source

_ENTROPY_BYTES = 3


def begin(context: SaveContext, snapshot: Callable[[], Snapshot], *, copies: bool) -> StagedSave:
    """Capture a boundary, and agree on it.

    Args:
        context: What all saves share.
        snapshot: Captures this rank's state; called once, before any other rank is waited for.
        copies: Whether the state is copied into an image: what an optimizer owns while `finish` runs, and until the
            result's `copying` is settled it must not step; all else before this returns. Otherwise live memory is
            read in `finish`.

    Raises:
        SafepointError: A rank could not capture its state, or the ranks do not fit each other; on all ranks.

    Spec: C2.
    """
    clock = PhaseClock(context, {})
    if context.group.world_size > 1:
        clock.enter("meet")
    agreed = context.planner.agree(context.claim.incarnation, snapshot, lambda step: _name(context, step))
    context.on_agreed(agreed.snapshot)
    try:
        noted = compare_entries(
            context.group, agreed, refuses=context.refuses_difference, deadline_s=context.deadline_s
        )
    except SafepointError:
        context.planner.use_up(f"save/{agreed.plan.generation}")
        raise
    sums: tuple[ReplicaSums, ...] = ()
    try:
        if agreed.plan.compares:
            clock.enter("compare")
            sums = sum_replicas(agreed.layout, agreed.tensors, agreed.part)
        clock.enter("stage")
        form, increment, origin, copying = _prepare(context, agreed, clock, copies=copies)
    except Exception as exc:
        if context.group.world_size == 1:
            raise
        raise _refuse(context, agreed.plan, exc) from exc
    clock.leave()
    place = _place(context, agreed)
    return StagedSave(
        agreed.plan,
        agreed.snapshot,
        place,
        form,
        increment,
        origin,
        copying,
        agreed.division,
        sums,
        noted,
        clock.timings_s,
    )


def finish(context: SaveContext, save: StagedSave) -> SaveResult:
    """Make what was begun durable, agree on it, and publish it.

    An attempt that published nothing for certain deletes its own objects.

    Raises:
        StorageError: The leader's storage failed, or the run's folder is gone; nothing was published.
        AbortedError: A rank could not store its part or was absent, replicas differ, or what is stored is not what was
            voted; nothing was published.
        TornSnapshotError: The state changed while it was read; nothing was published.
        FencedError: A newer incarnation owns the run.
        OutcomeUnknownError: It may have been published.

    Spec: C2-C7.
    """
    clock = PhaseClock(context, save.timings_s)
    try:
        result = _finish(context, save, clock)
    except (StorageError, AbortedError, CorruptionError, TornSnapshotError):
        # None of these comes once the manifest may have its name. The objects of a fenced start are the newer one's.
        context.planner.note(save.generation, "aborted")
        discard(context.storage, save.place)
        raise
    except OutcomeUnknownError:
        context.planner.note(save.generation, UNKNOWN)
        raise
    finally:
        save.origin.end()
    context.planner.note(save.generation, "committed")
    return result


def _finish(context: SaveContext, save: StagedSave, clock: PhaseClock) -> SaveResult:
    group, generation, increments = context.group, save.generation, context.workspace.increments
    context.planner.use_up(f"save/{generation}")
    before = increments.take()

    clock.enter("plan")
    lead(
        group,
        f"save/{generation}/open",
        lambda: explained(context, lambda: _open(context, generation)),
        deadline_s=2 * context.deadline_s,
    )
    # Not before: the other ranks wait to write.
    context.planner.settle()

    clock.enter("write")
    stored, failure = _write(context, save)

    clock.enter("vote")
    own = _ballot(context, save.plan, stored, save.form.layout, save.sums, refusal=_text(failure))
    try:
        result = settle(context, save, own, vote(group, own, deadline_s=context.deadline_s), clock)
    except SafepointError as exc:
        if failure is not None and exc.__cause__ is None:
            # What went wrong here, with its traceback, is lost on the way over the leader.
            exc.__cause__ = failure
        raise
    if stored.index is not None:
        increments.note(stored.index, before, incarnation=context.claim.incarnation, is_full=save.increment.is_full)
    return result


def _name(context: SaveContext, step: int) -> str:
    """Return a name that no attempt has had."""
    incarnation = context.claim.incarnation
    entropy = context.ambient.token(_ENTROPY_BYTES)
    # Folders of our number are made by this manager alone, so a step beyond all its attempts has none.
    existing = [] if context.workspace.attempts.begin(incarnation, step) else list_generations(context.storage)
    nonce = next_nonce(existing, step=step, incarnation=incarnation, entropy=entropy)
    return str(GenerationName(step, incarnation, nonce))


def _open(context: SaveContext, generation: str) -> bytes:
    """Make the generation's folder, durably; nobody writes before.

    Spec: C2, C5.3.
    """
    loss = loss_of_run(context.storage, context.claim)
    if loss is not None:
        raise loss
    check_not_fenced(context.storage, context.claim, ambient=context.ambient)
    context.storage.make_folder(generation_path(generation))
    context.storage.sync_folder(GENERATIONS)
    return b""


def _prepare(
    context: SaveContext, agreed: Agreed, clock: PhaseClock, *, copies: bool
) -> tuple[FileForm, Increment, Origin, Copier | None]:
    """Return what this rank's data file looks like, what lies elsewhere, and where the bytes come from.

    They come from live memory, or from an image; of that, what must be copied at the boundary is copied here.
    """
    layout, tensors, part, workspace = agreed.layout, agreed.tensors, agreed.part, context.workspace
    is_alone = context.group.world_size == 1
    form = workspace.forms.of(agreed.plan.division, partial(written, layout, part), is_alone=is_alone)
    sources: Sequence[Source] = sources_of(layout, tensors, part)
    owned = agreed.snapshot.owned
    increment = full(form)
    base = workspace.increments.base(context.claim.incarnation)
    if base is not None:
        clock.enter("digest")
        increment = find_kept(form, sources, base)
        form, sources = without_kept(increment, sources)
        # What is left lies in other boxes, and little of it is worth looking for whose they are.
        owned = Owned()
        clock.enter("stage")
    all_ranks = agreed.division if increment.is_full else None
    group = context.group
    check_room(context.storage, form.size_bytes, division=all_ranks, rank=group.rank, world_size=group.world_size)
    far = far_among(sources, workspace.streams)
    if not copies or form.size_bytes > workspace.most_bytes:
        return form, increment, LiveOrigin(form, sources, workspace.ring, far=far), None
    image = workspace.buffer.view(form.size_bytes, far.carrier if far is not None else None)
    copier = Copying if far is None else partial(Crossing, far=far)
    copying = copier(form, sources, image, owned=owned, habits=workspace.habits, turn=workspace.buffer.turn)
    copying.leave_boundary()
    return form, increment, ImageOrigin(image, copying, piece_bytes=workspace.ring.piece_bytes), copying


def _place(context: SaveContext, agreed: Agreed) -> Place:
    rank, items = context.group.rank, agreed.plan.items
    return Place(
        generation=agreed.plan.generation,
        rank=rank,
        world_size=context.group.world_size,
        trees=frozenset(name for name, item in items.items() if item.keeper in (None, rank)),
        per_rank=frozenset(name for name, item in items.items() if item.kind == "per_rank"),
        has_own_tree=frozenset(name for name, item in items.items() if item.keeper is None),
    )


def _write(context: SaveContext, save: StagedSave) -> tuple[Stored, Exception | None]:
    """Write this rank's part; of several ranks, a failure is returned, to be voted with."""

    def work() -> Stored:
        stored = write(
            context.storage,
            save.form,
            save.origin,
            save.snapshot.items,
            save.place,
            save.increment,
            clock=context.ambient.monotonic,
            spent=save.spent,
        )
        context.check_boundary()
        return stored

    if context.group.world_size == 1:
        return explained(context, work), None
    try:
        return work(), None
    except Exception as exc:  # noqa: BLE001 (told to the other ranks, which would wait in vain, and raised by the vote)
        return Stored(), exc


def _refuse(context: SaveContext, plan: Plan, error: Exception) -> AbortedError:
    """Tell the other ranks that this one could not prepare its part, and return an error of the class that they raise.

    They would wait for it in vain; and where ranks raise other classes, some go on training and some do not.
    """
    group = context.group
    context.planner.use_up(f"save/{plan.generation}")
    told = AbortedError("a rank could not prepare its part of a save", where=f"rank {group.rank}", found=_text(error))
    with contextlib.suppress(SafepointError):
        if group.rank == 0:
            lead(group, f"save/{plan.generation}/open", partial(_raise, told), deadline_s=context.deadline_s)
        else:
            vote(group, _ballot(context, plan, Stored(), "", (), refusal=_text(error)), deadline_s=context.deadline_s)
    return told


def _ballot(
    context: SaveContext,
    plan: Plan,
    stored: Stored,
    layout: str,
    sums: Sequence[ReplicaSums],
    *,
    refusal: str,
) -> Ballot:
    return Ballot(
        run=context.claim.run,
        generation=plan.generation,
        incarnation=context.claim.incarnation,
        rank=context.group.rank,
        world_size=context.group.world_size,
        layout=layout,
        objects=stored.objects,
        refusal=refusal,
        shares=stored.shares,
        replicas={str(one.number): one.digest for one in sums},
        referenced_bytes=stored.referenced_bytes,
    )


def _text(error: Exception | None) -> str:
    if error is None:
        return ""
    return str(error) if isinstance(error, SafepointError) else f"{type(error).__name__}: {error}"


def _raise(error: SafepointError) -> NoReturn:
    raise error
