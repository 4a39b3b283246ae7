"""Restore: select → validate → plan → read → apply, each step by all ranks together.

Nothing live is touched before a candidate has passed everything that can be known without its data. A candidate that
turns out damaged while it is read has filled some targets already: the next older one is restored over them. When
there is no next one, the live objects hold a mixture, and the error says so.

Spec: C10, C11.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from operator import attrgetter
from typing import TYPE_CHECKING, Literal, Protocol, runtime_checkable

import msgspec

from safepoint.ambient import Ambient
from safepoint.catalog import Lineage
from safepoint.contract import Contract, Promise, Reason, lowest
from safepoint.errors import ContractError, CorruptionError, ObjectMissingError, SafepointError, advise
from safepoint.format.manifest import Conditions, Manifest
from safepoint.format.names import generation_path
from safepoint.format.records import Refusal
from safepoint.restoring.ahead import Ahead, own_file, reading_ahead
from safepoint.restoring.apply import apply
from safepoint.restoring.arrival import Arrival, BoxKey
from safepoint.restoring.deal import deal_boxes, deal_state, told_manifest
from safepoint.restoring.derive import with_derived_streams
from safepoint.restoring.match import Choice, Match, forgetting, match
from safepoint.restoring.mixture import check_is_covered, of_mixture
from safepoint.restoring.older import name_older, older_that_keeps
from safepoint.restoring.outcome import RestoreReport
from safepoint.restoring.plan import TensorRead, paths_of, plan_reads
from safepoint.restoring.promise import changed_items, find_promise, lowered, with_probe
from safepoint.restoring.read import read
from safepoint.restoring.read_back import ReadBack, merged_read_backs, read_back
from safepoint.restoring.refusal import check_contract
from safepoint.restoring.select import Wish, lost_after, nothing_found, select, superseded_by
from safepoint.restoring.together import Ranks, merged_names
from safepoint.restoring.validate import SavedState, check_headers, kept_of, without_owner
from safepoint.state.item import Item, Permits
from safepoint.storage.base import Storage

if TYPE_CHECKING:
    # Restoring runs without torch, which a probe needs.
    from safepoint.state.probe import Probe

_NAMED: Callable[[TensorRead], tuple[str, str]] = attrgetter("item", "name")
_NOT_TAKEN = "Make the object's state_dict() return what its load_state_dict() was given."


@dataclass(frozen=True, slots=True)
class RestoreContext:
    """Hold what a restore works with.

    `conditions` are those of now; None compares nothing (reading a run without being it). `further` gives reasons that
    only the caller knows. `on_touch` is called just before the first live object is written to. `undisturbed` puts the
    random streams back after a block. `ranks` are those that restore together. `own` names the items that the program
    declares to be each rank's own. `ahead` is what is read ahead already, in the hope that it is the right file.
    `source` is what the user calls another run, if it is one.
    """

    storage: Storage
    ambient: Ambient
    items: Mapping[str, Item]
    contract: Contract
    conditions: Conditions | None
    further: Callable[[Manifest], Sequence[Reason]] = lambda manifest: ()
    on_touch: Callable[[], None] = lambda: None
    probe: Probe | None = None
    # Whether the live objects are captured again and compared; "full" for every byte of them.
    reads_back: bool | Literal["full"] = True
    undisturbed: Callable[[], AbstractContextManager[object]] = nullcontext
    ranks: Ranks = field(default_factory=Ranks)
    own: frozenset[str] = frozenset()
    ahead: Ahead | None = None
    source: str = ""


@dataclass(slots=True)
class Restored:
    """Collect what a restore found and did; `saved` is None for a fresh start."""

    saved: SavedState | None = None
    promise: Promise = field(default_factory=lambda: Promise("exact"))
    refused: dict[str, Refusal] = field(default_factory=dict)
    superseded: tuple[str, ...] = ()
    left_fresh: tuple[str, ...] = ()
    checks: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    durations_s: dict[str, float] = field(default_factory=dict)
    # Between the first byte that is read into live memory and the end of the read-back; what it was read into.
    is_mixed: bool = False
    touched: set[tuple[str, str]] = field(default_factory=set)
    # Another run that the checkpoint is of: what the user called it, and where it lies.
    source: str = ""
    storage: Storage | None = None

    def report(self, *, step: int, replayed: int) -> RestoreReport:
        """Return what the user is told."""
        return RestoreReport(
            step=step,
            generation=None if self.saved is None else self.saved.manifest.generation,
            promise=self.promise,
            refused=tuple(self.refused.values()),
            superseded=self.superseded,
            replayed=replayed,
            checks=tuple(self.checks),
            left_fresh=self.left_fresh,
            notes=tuple(self.notes),
            durations_s=dict(self.durations_s),
            source=self.source,
        )


def restore(context: RestoreContext, lineage: Lineage, wish: Wish, choice: Choice) -> Restored:
    """Restore the newest good checkpoint, or the step that was asked for, into the live items of all ranks.

    Args:
        context: What to work with.
        lineage: That of the run, which the leader alone looks at.
        wish: Which checkpoint.
        choice: Which items.

    Raises:
        NotFoundError: Nothing matches, and a step was asked for or something is required.
        CorruptionError: Only damaged checkpoints are there.
        MismatchError: The chosen one does not fit.
        ContractError: The chosen one keeps less than the contract asks for.
        MismatchError: The user's probe gives other numbers; the live objects hold the restored state.

    No error leaves live objects touched without saying so: when a newer candidate was damaged and has been read into
    them in part, the remedy of whatever ends the restore begins with `MIXED`.

    Spec: C10, C11.
    """
    outcome = Restored()
    try:
        with forgetting(context.items.values()):
            _restore_newest(context, lineage, wish, choice, outcome)
    except SafepointError as exc:
        if outcome.is_mixed:
            advise(exc, of_mixture(exc.remedy))
        raise
    return outcome


class _Chosen(msgspec.Struct, frozen=True):
    """Hold what the leader chose: a committed generation, or none, and what it found unusable on the way.

    `older` tells of an older one that keeps the contract, where the chosen one says of itself that it does not.
    `damage` are records of the run and its starts that could not be read.
    """

    manifest: Manifest | None
    refused: list[Refusal]
    damage: list[Refusal]
    older: str = ""


def _restore_newest(context: RestoreContext, lineage: Lineage, wish: Wish, choice: Choice, outcome: Restored) -> None:
    """Try candidates until one is restored; a fresh start leaves the outcome empty."""
    while True:
        started = context.ambient.monotonic()
        full: list[Manifest] = []
        chosen = context.ranks.led(partial(_choose, context, lineage, wish, outcome, full), _Chosen)
        outcome.refused.update({refusal.generation: refusal for refusal in chosen.refused})
        outcome.durations_s["select"] = context.ambient.monotonic() - started
        outcome.notes = [f"{entry.file} does not hold: {entry.reason}" for entry in chosen.damage]
        manifest = chosen.manifest
        if manifest is None:
            return
        try:
            _restore_one(context, manifest, full, choice, outcome)
        except (CorruptionError, ObjectMissingError) as exc:
            outcome.refused[manifest.generation] = _refusal(manifest.generation, exc)
            continue
        except ContractError as exc:
            name_older(exc, manifest, chosen.older)
            raise
        left = context.ranks.led(
            partial(_left_behind, context, lineage, wish, manifest), tuple[list[Refusal], list[str]]
        )
        outcome.refused.update({refusal.generation: refusal for refusal in left[0]})
        outcome.superseded = tuple(left[1])
        return


def _choose(context: RestoreContext, lineage: Lineage, wish: Wish, outcome: Restored, full: list[Manifest]) -> _Chosen:
    generation, met = select(context.storage, lineage, wish, outcome.refused)
    if generation is None:
        refused = outcome.refused | {refusal.generation: refusal for refusal in met}
        nothing_found(context.storage, lineage, wish, refused)
        return _Chosen(None, met, list(lineage.damage))
    manifest = generation.manifest
    full.extend(filter(None, [manifest]))
    older = "" if manifest is None else older_that_keeps(context, lineage, manifest)
    return _Chosen(told_manifest(context.ranks, manifest), met, list(lineage.damage), older)


def _left_behind(
    context: RestoreContext, lineage: Lineage, wish: Wish, manifest: Manifest
) -> tuple[list[Refusal], list[str]]:
    """Return what is lost, and what becomes superseded, above the restored checkpoint."""
    lost = lost_after(context.storage, lineage, manifest.step) if wish.asked is None else []
    return lost, superseded_by(context.storage, lineage, manifest)


def restore_late(context: RestoreContext, saved: SavedState, name: str, *, storage: Storage | None = None) -> None:
    """Give one item that was registered after the restore its state from the same checkpoint.

    A scheduler writes to its optimizer when it is made, so the optimizers' hyper-parameters are applied once more.

    Args:
        storage: Where the checkpoint lies, if not in the run itself.

    Raises:
        MismatchError: The checkpoint has no such item, or it does not fit; nothing was touched.
        ContractError: With the item the checkpoint keeps less than the contract asks for; nothing was touched.
        CorruptionError: Its bytes are damaged; the object may hold a mixture.
    """
    item, ranks = context.items[name], context.ranks
    saved = _derived(context, saved)
    only = Choice(only=frozenset({name}))
    matched = match(saved, {name: item}, only, context.contract.words, ranks=ranks)
    promise = _promise(context, saved, matched)
    permits = Permits(context.contract.words, context.contract.current)
    _, reads = _planned(context, saved, matched, permits)
    arrivals: dict[BoxKey, Arrival] = {}
    if matched.items:
        context.on_touch()
    try:
        ranks.all(lambda: read(storage or context.storage, reads, arrivals=arrivals if context.reads_back else None))
    except SafepointError as exc:
        advise(exc, of_mixture(exc.remedy))
        raise
    ranks.all(lambda: apply(saved, matched.items, permits))
    if item.type == "scheduler" and matched.items:
        optimizers = [entry for entry in context.items.values() if entry.type == "optimizer"]
        for optimizer in optimizers:
            if isinstance(optimizer, Reappliable) and optimizer.name in saved.items:
                optimizer.reapply_hyperparameters()
    if context.reads_back:
        _read_back(context, saved, matched, promise, arrivals)


@runtime_checkable
class Reappliable(Protocol):
    """An item whose settings can be applied again without its tensors."""

    def reapply_hyperparameters(self) -> None:
        """Set the hyper-parameters to the saved ones."""


def _restore_one(
    context: RestoreContext, manifest: Manifest, full: Sequence[Manifest], choice: Choice, outcome: Restored
) -> None:
    clock, ranks, storage = context.ambient.monotonic, context.ranks, context.storage
    times = [clock()]
    permits = Permits(context.contract.words, context.contract.current)
    with reading_ahead(storage, own_file(manifest, ranks.rank), begun=context.ahead) as ahead:
        saved = deal_state(ranks, storage, manifest, full=full)
        saved = ranks.all(lambda: _derived(context, saved))
        matched = match(saved, context.items, choice, context.contract.words, ranks=ranks)
        promise = _promise(context, saved, matched)
        times.append(clock())

        saved, reads = _planned(context, saved, matched, permits, storage=storage)
        times.append(clock())
        near = ahead.end()
        context.on_touch()
        outcome.is_mixed = True
        named = set(map(_NAMED, reads))
        written_before = outcome.touched - named
        outcome.touched |= named
        arrivals: dict[BoxKey, Arrival] = {}
        taken = arrivals if context.reads_back else None
        counts = ranks.joined(
            lambda: [len(reads), read(storage, reads, arrivals=taken, near=near)],
            lambda parts: [sum(column) for column in zip(*parts, strict=True)],
            list[int],
        )
        times.append(clock())

    left = ranks.joined(lambda: _applied(saved, matched, permits, written_before), merged_names, list[str])
    times.append(clock())
    outcome.promise, outcome.left_fresh = promise, tuple(left)
    outcome.checks = [
        f"manifest, index and header of {manifest.generation}",
        f"{counts[0]} tensors, {counts[1]} bytes, each chunk by digest on arrival",
    ]
    if context.reads_back:
        found = _read_back(context, saved, matched, promise, arrivals)
        promise = outcome.promise = lowered(promise, found.reasons)
        outcome.notes += found.notes
        outcome.checks.append(f"{found.equal} of {len(matched.items)} items read back equal")
    outcome.saved = kept_of(saved, world_size=ranks.world_size)
    outcome.is_mixed = False
    outcome.touched.clear()
    if manifest.probe is not None:
        outcome.promise = with_probe(promise, context.probe, manifest, permitted=context.contract.words, ranks=ranks)
        outcome.checks += ["the probe's numbers"] if context.probe is not None else []
    times.append(clock())
    phases = ("validate", "plan", "read", "apply", "check")
    outcome.durations_s.update({name: times[n + 1] - times[n] for n, name in enumerate(phases)})


def _derived(context: RestoreContext, saved: SavedState) -> SavedState:
    """Return the saved state as far as it is this job's, with random streams for it where the contract says so."""
    saved = without_owner(saved, context.own, world_size=context.ranks.world_size)
    if context.contract.rng != "derive":
        return saved
    return with_derived_streams(saved, context.items, rank=context.ranks.rank)


def _planned(
    context: RestoreContext, saved: SavedState, matched: Match, permits: Permits, *, storage: Storage | None = None
) -> tuple[SavedState, tuple[TensorRead, ...]]:
    """Return the saved state with this rank's boxes, and what it reads; the headers of those files are checked."""
    ranks = context.ranks
    targets = ranks.all(lambda: {item.name: item.targets(saved.items[item.name], permits) for item in matched.items})
    dealt = deal_boxes(ranks, saved, targets)

    def plan() -> tuple[TensorRead, ...]:
        reads = plan_reads(dealt.tensors, targets)
        if storage is not None and _is_split(context, saved):
            check_headers(storage, dealt, paths_of(reads))
        return reads

    return dealt, ranks.all(plan)


def _applied(saved: SavedState, matched: Match, permits: Permits, written_before: set[tuple[str, str]]) -> list[str]:
    """Apply, and return what this rank leaves as it was."""
    left = [*matched.left_fresh, *apply(saved, matched.items, permits)]
    check_is_covered(saved.manifest.generation, written_before, left)
    return left


def _is_split(context: RestoreContext, saved: SavedState) -> bool:
    """Return whether no rank has the whole state."""
    return context.ranks.world_size > 1 or saved.manifest.world_size > 1


def _promise(context: RestoreContext, saved: SavedState, matched: Match) -> Promise:
    return find_promise(
        saved,
        matched,
        contract=context.contract,
        conditions=context.conditions,
        further=context.further,
        ranks=context.ranks,
    )


def _read_back(
    context: RestoreContext, saved: SavedState, matched: Match, promise: Promise, arrivals: Mapping[BoxKey, Arrival]
) -> ReadBack:
    """Read the items back, and raise `ContractError` when one did not take its state and that is not permitted."""
    found = context.ranks.joined(
        lambda: read_back(
            saved,
            matched.items,
            changed=changed_items(promise, context.items, context.contract.words),
            arrivals=arrivals,
            is_split=_is_split(context, saved),
            is_full=context.reads_back == "full",
            undisturbed=context.undisturbed,
        ),
        merged_read_backs,
        ReadBack,
    )
    reached = Promise(lowest(reason.level for reason in found.reasons), found.reasons)
    check_contract(context.contract, reached, where=saved.manifest.generation, aftermath=_NOT_TAKEN)
    return found


def _refusal(generation: str, error: CorruptionError | ObjectMissingError) -> Refusal:
    """Return the refusal, its file named within the generation's folder; a storage names it below its own URL."""
    file = error.where.rpartition(generation_path(generation) + "/")[2].split(":")[0]
    return Refusal(generation, file, str(error))
