"""Restore: select → validate → plan → read → apply.

Nothing live is touched before a candidate has passed everything that can be known without its data. A candidate that
turns out damaged while it is read has filled some targets already: the next older one is restored over them. When
there is no next one, the live objects hold a mixture, and the error says so.

Spec: C10, C11.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol, runtime_checkable

from msgspec.structs import replace

from safepoint.ambient import Ambient
from safepoint.catalog import Generation, Lineage, list_generations
from safepoint.contract import UNCHANGED, Contract, Promise, Reason, check_contract, judge, lowest
from safepoint.errors import CorruptionError, InternalError, MismatchError, ObjectMissingError, SafepointError, advise
from safepoint.format.manifest import Conditions, Manifest
from safepoint.format.names import generation_path
from safepoint.format.records import LineageLink, Refusal
from safepoint.restoring.apply import ReadBack, apply, read_back
from safepoint.restoring.match import Choice, Match, match
from safepoint.restoring.outcome import RestoreReport
from safepoint.restoring.plan import plan_reads
from safepoint.restoring.read import read
from safepoint.restoring.select import Wish, lost_after, nothing_found, select
from safepoint.restoring.validate import SavedState, validate
from safepoint.state.item import STREAMS_ITEM, Item, Permits
from safepoint.storage.base import Storage

if TYPE_CHECKING:
    # Restoring runs without torch, which a probe needs.
    from safepoint.state.probe import Probe

MIXED = (
    "The live objects may hold a mixture of states: restore a good checkpoint into them, or make them anew, before "
    "they are used."
)
_NOT_TAKEN = "Make the object's state_dict() return what its load_state_dict() was given."


@dataclass(frozen=True, slots=True)
class RestoreContext:
    """Hold what a restore works with.

    `conditions` are those of now; None compares nothing (reading a run without being it). `further` gives reasons that
    only the caller knows. `on_touch` is called just before the first live object is written to. `undisturbed` puts the
    random streams back after a block.
    """

    storage: Storage
    ambient: Ambient
    items: Mapping[str, Item]
    contract: Contract
    conditions: Conditions | None
    further: Callable[[Manifest], Sequence[Reason]] = lambda manifest: ()
    on_touch: Callable[[], None] = lambda: None
    probe: Probe | None = None
    reads_back: bool = True
    undisturbed: Callable[[], AbstractContextManager[None]] = nullcontext


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
    # Between the first byte that is read into live memory and the end of the read-back.
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
    """Restore the newest good checkpoint, or the step that was asked for, into the live items.

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
        _restore_newest(context, lineage, wish, choice, outcome)
    except SafepointError as exc:
        if outcome.is_mixed:
            advise(exc, _of_mixture(exc.remedy))
        raise
    return outcome


def _restore_newest(context: RestoreContext, lineage: Lineage, wish: Wish, choice: Choice, outcome: Restored) -> None:
    """Try candidates until one is restored; a fresh start leaves the outcome empty."""
    while True:
        started = context.ambient.monotonic()
        generation, met = select(context.storage, lineage, wish, outcome.refused)
        outcome.refused.update({refusal.generation: refusal for refusal in met})
        outcome.durations_s["select"] = context.ambient.monotonic() - started
        if generation is None:
            nothing_found(context.storage, lineage, wish, outcome.refused)
            return
        try:
            saved = _restore_one(context, generation, choice, outcome)
        except (CorruptionError, ObjectMissingError) as exc:
            outcome.refused[generation.text] = _refusal(generation, exc)
            continue
        if wish.step is None:
            lost = lost_after(context.storage, lineage, generation.name.step)
            outcome.refused.update({refusal.generation: refusal for refusal in lost})
        outcome.superseded = _superseded(context.storage, lineage, saved.manifest)
        return


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
    item = context.items[name]
    only = Choice(only=frozenset({name}))
    matched = match(saved, {name: item}, only, context.contract.words)
    promise = _promise(context, saved, matched)
    permits = Permits(context.contract.words, context.contract.current)
    if not matched.items:
        return
    reads = plan_reads(saved, {name: item.targets(saved.items[name], permits)})
    context.on_touch()
    try:
        read(storage or context.storage, reads)
    except SafepointError as exc:
        advise(exc, _of_mixture(exc.remedy))
        raise
    apply(saved, matched.items, permits)
    if item.type == "scheduler":
        optimizers = [entry for entry in context.items.values() if entry.type == "optimizer"]
        for optimizer in optimizers:
            if isinstance(optimizer, Reappliable) and optimizer.name in saved.items:
                optimizer.reapply_hyperparameters()
    if context.reads_back:
        _read_back(context, saved, matched, promise)


@runtime_checkable
class Reappliable(Protocol):
    """An item whose settings can be applied again without its tensors."""

    def reapply_hyperparameters(self) -> None:
        """Set the hyper-parameters to the saved ones."""


def _restore_one(context: RestoreContext, generation: Generation, choice: Choice, outcome: Restored) -> SavedState:
    if generation.manifest is None:
        raise InternalError("a committed generation has no manifest", where=generation.text)
    clock = context.ambient.monotonic
    times = [clock()]

    saved = validate(context.storage, generation.manifest)
    matched = match(saved, context.items, choice, context.contract.words)
    promise = _promise(context, saved, matched)
    times.append(clock())

    permits = Permits(context.contract.words, context.contract.current)
    targets = {item.name: item.targets(saved.items[item.name], permits) for item in matched.items}
    reads = plan_reads(saved, targets)
    context.on_touch()
    outcome.is_mixed = True
    written_before = outcome.touched - {(one.item, one.name) for one in reads}
    outcome.touched |= {(one.item, one.name) for one in reads}
    size_bytes = read(context.storage, reads)
    times.append(clock())

    left = apply(saved, matched.items, permits)
    _check_is_covered(generation, written_before, (*matched.left_fresh, *left))
    times.append(clock())
    outcome.saved, outcome.promise = saved, promise
    outcome.left_fresh = (*matched.left_fresh, *left)
    outcome.checks = [
        f"manifest, index and header of {generation.text}",
        f"{len(reads)} tensors, {size_bytes} bytes, each chunk by digest on arrival",
    ]
    if context.reads_back:
        found = _read_back(context, saved, matched, promise)
        promise = outcome.promise = _lowered(promise, found.reasons)
        outcome.notes += found.notes
        outcome.checks.append(f"{found.equal} of {len(matched.items)} items read back equal")
    outcome.is_mixed = False
    if context.probe is not None and generation.manifest.probe is not None:
        outcome.promise = _probed(context.probe, generation.manifest, promise, permitted=context.contract.words)
        outcome.checks.append("the probe's numbers")
    times.append(clock())
    phases = ("validate", "read", "apply", "check")
    outcome.durations_s.update({name: times[n + 1] - times[n] for n, name in enumerate(phases)})
    return saved


def _of_mixture(remedy: str) -> str:
    """Return a remedy that says in what state the live objects are left."""
    return f"{MIXED} {remedy.removeprefix(UNCHANGED).lstrip()}".rstrip()


def _check_is_covered(generation: Generation, written_before: set[tuple[str, str]], left: Sequence[str]) -> None:
    """Raise `MismatchError` when something is left as it is that a damaged candidate was read into.

    Args:
        written_before: (item, tensor) of earlier candidates that this one does not hold.
        left: Items, and ``<item>/<name>`` within items, that this candidate leaves as they are.
    """
    items = sorted({item for item, _ in written_before})
    stale = [item for item in items if any(name == item or name.startswith(f"{item}/") for name in left)]
    if stale:
        raise MismatchError(
            "a damaged checkpoint was read into what the older one that is good does not hold",
            where=generation.text,
            found=", ".join(stale),
        )


def _promise(context: RestoreContext, saved: SavedState, matched: Match) -> Promise:
    """Return the promise, or raise `ContractError` when it is less than the contract asks for."""
    reasons = [*matched.reasons, *context.further(saved.manifest)]
    if context.conditions is None:
        return Promise("approximate", tuple(reasons))
    names = {item.name for item in matched.items}
    judged = judge(_of_items(saved.manifest.conditions, names), _of_items(context.conditions, names))
    told = {reason.word for reason in judged.reasons}
    # Where an item's own differences are listed, that its structure is another one says nothing more.
    listed = {reason.word.split(".")[0] for reason in matched.reasons if "." in reason.word}
    general = {f"{name}.{what}" for name in listed for what in ("structure", "parameters")}
    found = [reason for reason in judged.reasons if reason.word not in general]
    found += [reason for reason in reasons if reason.word not in told]
    promise = Promise(lowest(reason.level for reason in found), tuple(found))
    asked_for = {reason.word for reason in matched.reasons if reason.word.endswith(".skipped")}
    contract = Contract(context.contract.level, context.contract.permit | asked_for)  # type: ignore[operator]
    check_contract(contract, promise, where=saved.manifest.generation)
    return promise


def _of_items(conditions: Conditions, names: set[str]) -> Conditions:
    """Return the conditions without those of items that are left out or come later; a loader tells the batch."""
    parts = {part: getattr(conditions, part) for part in ("structure", "configuration", "datasets")}
    kept = {part: {name: one for name, one in named.items() if name in names} for part, named in parts.items()}
    batch = conditions.global_batch if conditions.datasets.keys() <= names else None
    return replace(conditions, global_batch=batch, **kept)


def _probed(probe: Probe, manifest: Manifest, promise: Promise, *, permitted: frozenset[str]) -> Promise:
    """Return the promise with what the probe finds, which must be permitted."""
    differences = probe.compare(manifest.probe)
    if differences and "probe" not in permitted:
        raise MismatchError(
            "the restored state gives other numbers than the saved one",
            where=manifest.generation,
            expected=f"equal within {probe.tolerance}",
            differences=differences,
            remedy="The live objects hold the restored state; find what it does not cover before training on.",
        )
    return _lowered(
        promise, [Reason("probe", "approximate", one.subject, one.saved, one.current) for one in differences]
    )


def _read_back(context: RestoreContext, saved: SavedState, matched: Match, promise: Promise) -> ReadBack:
    """Read the items back, and raise `ContractError` when one did not take its state and that is not permitted."""
    found = read_back(saved, matched.items, changed=_changed(context, promise), undisturbed=context.undisturbed)
    lowered = Promise(lowest(reason.level for reason in found.reasons), found.reasons)
    check_contract(context.contract, lowered, where=saved.manifest.generation, aftermath=_NOT_TAKEN)
    return found


def _lowered(promise: Promise, found: Sequence[Reason]) -> Promise:
    """Return the promise with reasons that showed after the restore."""
    reasons = (*promise.reasons, *found)
    return Promise(lowest(reason.level for reason in reasons), reasons)


def _changed(context: RestoreContext, promise: Promise) -> frozenset[str]:
    """Return the items that a permitted difference makes other than they were saved."""
    if any(reason.word == "device" and reason.subject == "device" for reason in promise.reasons):
        # What an item says of itself names the kind of device it lies on.
        return frozenset(context.items)
    words = {reason.word for reason in promise.reasons} & context.contract.words
    named = frozenset(word.split(".")[0] for word in words if "." in word or word == STREAMS_ITEM)
    return named | _with_scheduler(context, promise)


def _with_scheduler(context: RestoreContext, promise: Promise) -> frozenset[str]:
    """Return the schedulers and optimizers when a schedule's permitted change makes their state another one."""
    if not any(reason.word == "scheduler" for reason in promise.reasons):
        return frozenset()
    return frozenset(name for name, item in context.items.items() if item.type in ("scheduler", "optimizer"))


def _refusal(generation: Generation, error: CorruptionError | ObjectMissingError) -> Refusal:
    """Return the refusal, its file named within the generation's folder; a storage names it below its own URL."""
    file = error.where.rpartition(generation_path(generation.text) + "/")[2].split(":")[0]
    return Refusal(generation.text, file, str(error))


def _superseded(storage: Storage, lineage: Lineage, chosen: Manifest) -> tuple[str, ...]:
    """Return the live generations that going on from the chosen one leaves behind, newest first.

    Spec: C10.5
    """
    start = LineageLink(lineage.newest + 1, chosen.generation, chosen.step)
    following = Lineage(lineage.run, chain=(*chosen.lineage, start))
    return tuple(
        str(name) for name in list_generations(storage) if lineage.is_live(name) and not following.is_live(name)
    )
