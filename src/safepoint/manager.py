"""The checkpoint manager: the one object that a training loop holds.

`restore()` joins the run and goes on from its newest good checkpoint; `after_update()` marks each boundary and saves
when it is time; `close()` waits and raises what is owed. The phases themselves are in `saving/` and `restoring/`.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping
from types import TracebackType
from typing import Any

from safepoint.ambient import Ambient, SystemAmbient
from safepoint.boundary import Boundary
from safepoint.checkpoints import Checkpoint, list_checkpoints
from safepoint.conditions import Circumstances
from safepoint.contract import Contract
from safepoint.due import DueSaves
from safepoint.enrolment import enrol
from safepoint.evidence import Evidence, watched_url
from safepoint.format.asked import asked_of
from safepoint.group.torch_store import find_group
from safepoint.iteration import epochs_left, rest_of_epoch
from safepoint.membership import Membership
from safepoint.progress import Progress
from safepoint.restoration import Restoration
from safepoint.restoring.outcome import RestoreReport
from safepoint.restoring.restore import RestoreContext
from safepoint.restoring.select import Wish
from safepoint.restoring.together import SHORTEST_SILENCE_S, Ranks
from safepoint.retention.after_save import Retention
from safepoint.retention.policy import Keep
from safepoint.saver import Saver
from safepoint.saving.background import SaveHandle
from safepoint.schedule import Schedule
from safepoint.settings import (
    as_numbers,
    check_kinds,
    check_switches,
    check_values,
    compared_every,
    config_of,
    full_every,
    read_back_of,
    staging_of,
)
from safepoint.signals import DEFAULT_SIGNALS, Signals
from safepoint.state.placement import StreamPlacement, undisturbed_streams
from safepoint.state.probe import Probe, as_probe
from safepoint.state.registry import Registry
from safepoint.state.steps import StepMonitor
from safepoint.stats import Stats
from safepoint.stop import Stop
from safepoint.storage.base import Storage
from safepoint.storage.url import open_storage

# How long the leader waits at the end for ranks that may still read its last word.
FAREWELL_S = 10.0


class CheckpointManager:
    """Save and restore one training run.

    Args:
        url: The run's folder, or a URL such as ``memory://``. Created by the first start.
        state: The items by name: modules, optimizers, schedulers, gradient scalers, generators, dicts, loaders,
            anything with ``state_dict`` and ``load_state_dict``. The global random streams are captured unasked.
        contract: What a restore must keep, and which changes it accepts.
        save: When `after_update` saves; None saves only on `save()`.
        keep: Which checkpoints stay; None keeps all.
        background: Write while training goes on. What only an optimizer's step changes is copied behind the loop.
        staging_memory: The most bytes, from 32 MiB on, that a background save copies into; of a larger state it blocks.
        copy_behind: Whether anything is copied behind the loop at all; else all of it at the boundary.
        incremental: Write what has changed since the last save, and refer to the rest where it lies. Of so many saves
            one is full; True stands for 16.
        config: The user's own settings, a plain value; a restore compares them.
        accumulation: Microbatches per update, if declared; else it is observed.
        probe: A function without side effects that gives numbers for a fixed batch, compared after a restore.
        takeover: Fence out a process that holds the run, instead of being refused.
        restart: Begin at step 0 although there are checkpoints; they become superseded.
        deadline_s: How long a save waits for other ranks; where it is above 30 also how long a rank may show no sign of
            life in a restore, which is 30 otherwise.
        restore_deadline_s: How long a restore waits for the slowest rank, which may be reading all that it holds.
        process_group: The ranks that save one checkpoint together; all of the job if absent. Making a manager is then a
            collective call, and every rank calls the same methods at the same boundaries.
        agreement: When replicas on several ranks are compared: at ``"every"`` save, at every so manieth, or ``"off"``.
        on_disagreement: ``"refuse"`` a save whose replicas differ, or ``"warn"`` and save the lowest rank's.
        signals: Which signals ask for a save at the next boundary and an end, from `on_signals`; None leaves all alone.
            Listened to from here to `close`, in the main thread.
        on_exception: ``"save"`` the boundary also when an exception leaves the ``with`` block, where nothing has moved
            since it and there is one rank; else that is left out, and logged.
        read_back: Capture the live state after a restore and compare it; ``"full"`` digests every byte again.
        storage: Where the bytes go, in place of `url`.
        ambient: The reader of clock, entropy and environment; replaced in tests.

    Raises:
        RequestError: An item cannot be captured, or a setting is wrong.
    """

    def __init__(
        self,
        url: str | os.PathLike[str],
        state: Mapping[str, object],
        *,
        contract: Contract | None = None,
        save: Schedule | None = None,
        keep: Keep | None = None,
        background: bool = False,
        staging_memory: int | None = None,
        copy_behind: bool = True,
        incremental: bool | int = False,
        config: object = None,
        accumulation: int | None = None,
        probe: Probe | Any = None,
        takeover: bool = False,
        restart: bool = False,
        deadline_s: float = 60.0,
        restore_deadline_s: float = 1800.0,
        process_group: Any = None,
        agreement: str | int = "every",
        on_disagreement: str = "refuse",
        signals: Signals | None = DEFAULT_SIGNALS,
        on_exception: str | None = None,
        read_back: bool | str = True,
        storage: Storage | None = None,
        ambient: Ambient | None = None,
    ) -> None:
        check_values(state, accumulation, deadline_s=deadline_s, restore_deadline_s=restore_deadline_s)
        check_kinds(contract=contract, save=save, keep=keep, signals=signals, on_exception=on_exception)
        check_switches(background=background, copy_behind=copy_behind, takeover=takeover, restart=restart)
        compares_every = compared_every(agreement, on_disagreement)
        self._ambient = ambient = ambient or SystemAmbient()
        self._storage = storage or open_storage(watched_url(url, ambient))
        self._contract, self._reads_back = (contract := contract or Contract()), read_back_of(read_back)
        self._probe, plain = as_probe(probe), config_of(config)
        self._group = group = find_group(ambient=ambient, process_group=process_group, deadline_s=deadline_s)
        self._registry, ranks = (registry := Registry()), group.world_size
        self._evidence, self._stop = Evidence.find(ambient, registry.items), Stop(signals, group, ambient)
        self._saver = saver = Saver(
            self._storage,
            group,
            self._ambient,
            schedule=save or Schedule(),
            retention=Retention(ambient, policy=keep, accepts=contract.accepts),
            background=staging_of(staging_memory, background=background, copies_behind=copy_behind),
            full_every=full_every(incremental),
            deadline_s=deadline_s,
            evidence=self._evidence,
            compares_every=compares_every,
            refuses_difference=on_disagreement == "refuse",
            stop=self._stop,
        )
        self._ranks = Ranks(group, deadline_s=restore_deadline_s, silence_s=max(deadline_s, SHORTEST_SILENCE_S))
        self._placement, self._monitor = StreamPlacement(), (steps := StepMonitor(registry.optimizers))
        self._boundary = boundary = Boundary(steps, world_size=ranks)
        self._circumstances = facts = Circumstances(
            registry, boundary, contract, world_size=ranks, config=plain, accumulation=accumulation, ambient=ambient
        )
        self._membership = members = Membership(
            self._storage,
            self._ambient,
            group=group,
            environment=self._circumstances.environment,
            takeover=takeover,
            restart=restart,
            deadline_s=deadline_s,
        )
        self._due = DueSaves(boundary, facts, saver, self._placement, steps, members.require, self._probe, self._stop)
        self._begin(state, deadline_s, saves_on_exception=on_exception == "save")

    @property
    def progress(self) -> Progress:
        """Return the counters at the last boundary."""
        return self._boundary.progress

    @property
    def epoch_end_due(self) -> bool:
        """Return whether an epoch's last update is done and `end_epoch` has not been called."""
        return self._boundary.progress.epoch_end_due

    @property
    def should_stop(self) -> bool:
        """Return whether a signal asked for the end, and its save was made, or had no time; on all ranks at once."""
        return self._stop.should_stop

    @property
    def exit_code(self) -> int:
        """Return what the process should end with: 0; 75 after a save on a signal; 128 + its number without one."""
        return self._stop.exit_code

    @property
    def stats(self) -> Stats:
        """Return what saving has cost this process so far: each save, and steps with and without one beside them."""
        return self._saver.costs.stats()

    def checkpoints(self) -> list[Checkpoint]:
        """Return the usable checkpoints of the run, newest first."""
        return list_checkpoints(self._storage) if self._storage.root_exists() else []

    def register(self, name: str, entry: object) -> None:
        """Add an item. Between a restore and the first update it gets its state at once; later it is a new one.

        Raises:
            RequestError: The name is taken, or the object cannot be captured.
            MismatchError: The restored checkpoint does not fit it, or has no such item.
            ContractError: With it the promise asked for cannot be kept.
        """
        self._enrol({name: entry})
        self._restoration.give_late(name)

    def restore(
        self,
        *,
        step: int | str | None = None,
        branch: bool = False,
        required: bool = False,
        skip: Iterable[str] = (),
        items: Iterable[str] | None = None,
        late: Iterable[str] = (),
        source: str | os.PathLike[str] | None = None,
    ) -> RestoreReport:
        """Join the run and restore its newest good checkpoint, or report a fresh start.

        A second call goes back within one process: it joins anew. Iterators of loaders made before are void.

        Args:
            step: Restore this step and no other; a generation's name where several have it.
            branch: Go back to an older step on purpose; newer checkpoints become superseded.
            required: Finding nothing is an error, not a fresh start.
            skip: Items to leave as they are.
            items: The only items to restore.
            late: Items that are registered after this call, before the next optimizer step.
            source: Another run, ``RUN`` or ``RUN@STEP``, whose checkpoint this run begins with. Once the run has one
                of its own, that is restored, whole, and the report notes it.

        Raises:
            NotFoundError: Nothing matches, and a step was asked for or `required`; nothing was created.
            CorruptionError: Only damaged checkpoints were found.
            MismatchError: The checkpoint does not fit; nothing was touched.
            ContractError: The promise asked for cannot be kept; nothing was touched.
            FencedError: Another living process holds the run.
        """
        wish = Wish(None if step is None else asked_of(step), branch, required)
        report = self._restoration.restore(wish, source=source, skip=skip, items=items, late=late)
        self._evidence.tell("restored", **report.facts())
        return report

    def after_microbatch(self) -> None:
        """Count one forward and backward of an accumulation window, the last one of the window included."""
        self._boundary.add_microbatch()

    def skip_batch(self) -> None:
        """Count a batch that was handed out and is not used for an update."""
        self._boundary.drop_batch()

    def after_update(
        self,
        *,
        samples: int | None = None,
        tokens: int = 0,
        batches: int | None = None,
        metrics: Mapping[str, Any] | None = None,
    ) -> None:
        """Mark the boundary after a completed update; save here when it is time.

        Args:
            samples: What this rank consumed in the update; the loader's own count if absent.
            tokens: Tokens that this rank consumed.
            batches: Batches that belong to the update, for loops that fetch ahead; all handed out if absent.
            metrics: Numbers of this update (0-dim tensors too); stored with the checkpoint, used by ``keep(best=...)``.

        Raises:
            SafepointError: A background save failed and its policy is to raise; a save made here failed.
            SystemExit: After a signal: see `on_signals`.
        """
        session = self._membership.require()
        self._saver.costs.end_step()
        self._due.metrics = numbers = as_numbers(metrics)
        self._placement.disarm()
        ids = self._boundary.last_ids() if self._evidence.is_watched else {}
        self._boundary.close(samples=samples, tokens=tokens, batches=batches)
        self._circumstances.check_accumulation()
        self._circumstances.note_schedules()
        session.journal.update(self.progress.step)
        self._evidence.show_update(self.progress.step, numbers, ids)
        self._saver.raise_owed(waits=False)
        self._due.after_update()
        self._saver.costs.begin_step(is_beside=self._saver.is_saving)

    def end_epoch(self, *, metrics: Mapping[str, Any] | None = None) -> None:
        """Close the epoch whose last update is done: after the per-epoch scheduler step and validation.

        A save that fell due at the epoch's last update is made here. `metrics` are numbers of the epoch, such as those
        of validation: stored beside those of its last update, used by ``keep(best=...)``.

        Raises:
            RequestError: No epoch's end is due, or a metric is no number.
        """
        self._membership.require()
        self._due.end_epoch(as_numbers(metrics))

    def epochs(self, total: int) -> Iterator[int]:
        """Yield the numbers of the epochs that are left of `total`, closing each after the loop's body."""
        self._due.closes_epochs = True
        return epochs_left(total, self._boundary, self._placement, self.end_epoch, self._stop)

    def batches(self, loader: Iterable[Any]) -> Iterator[Any]:
        """Yield the batches of the rest of one epoch, with the random streams in place before the first one.

        Needed for loaders other than safepoint's own; right for all. Directly after a restore at an epoch's end it
        yields nothing, so that what follows the epoch is done.
        """
        return rest_of_epoch(loader, self._boundary, self._placement, self._due)

    def save(self) -> SaveHandle:
        """Save this boundary now; inside an accumulation window, at its end.

        Returns:
            A handle: `staged`, `committed`, `wait()`, and `deferred` when the save is made at the end of the window.

        Raises:
            SafepointError: The save failed (not in the background), or the one before it did.
        """
        self._membership.require()
        why = self._boundary.open_because()
        if why:
            return self._saver.defer(f"{why}; saved after update {self.progress.step + 1}")
        return self._due.save(SaveHandle(is_explicit=True))

    def wait(self, *, deadline_s: float | None = None) -> None:
        """Wait for the save in flight and raise its failure; `AbortedError` where it takes longer, and goes on."""
        self._saver.raise_owed(waits=True, deadline_s=deadline_s, is_explicit=True)

    def close(self) -> None:
        """Save only what is due (`save()` keeps the last updates), wait, raise what is owed, and let the run go."""
        try:
            self._due.end(is_joined=self._membership.is_joined)
            self._evidence.tell("closed")
        finally:
            self._release()
        self._stop.get_its_way()

    def __enter__(self) -> CheckpointManager:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if error is None:
            self.close()
            return
        try:
            self._due.end_after(error, is_usable=self._membership.is_joined and not self._membership.unusable)
        finally:
            self._release()

    def _begin(self, state: Mapping[str, object], deadline_s: float, *, saves_on_exception: bool) -> None:
        """Take the items in; where that fails, all that was begun is let go."""
        self._due.saves_on_exception = saves_on_exception
        due, saver, membership, placement = self._due, self._saver, self._membership, self._placement
        facts, boundary = self._circumstances, self._boundary
        self._restoration = Restoration(
            self._storage, self._ranks, membership, facts, boundary, due, saver, placement, self._context
        )
        self._monitor.guard(due.before_step, barrier=saver.behind.wait)
        try:
            self._enrol(state)
            self._stop.listen(deadline_s=deadline_s)
        except BaseException:
            self._release()
            raise

    def _enrol(self, entries: Mapping[str, object]) -> None:
        enrol(entries, self._registry, self._circumstances, self._boundary, self._due)

    def _context(self) -> RestoreContext:
        return RestoreContext(
            storage=self._storage,
            ambient=self._ambient,
            items=self._registry.items,
            contract=self._contract,
            conditions=self._circumstances.now(),
            further=self._circumstances.reasons_for,
            on_touch=self._membership.mark_touched,
            probe=self._probe,
            reads_back=self._reads_back,
            undisturbed=undisturbed_streams,
            ranks=self._ranks,
            own=self._registry.each_ranks_own,
        )

    def _release(self) -> None:
        self._monitor.close()
        self._saver.close()
        self._membership.close()
        self._group.close(deadline_s=FAREWELL_S)
        self._stop.close()
