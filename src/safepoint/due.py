"""Due saves: at which moment the save that a schedule asks for is made.

1. Within an epoch at the boundary itself.
2. At an epoch's last update when the epoch is closed: by `end_epoch`, by the first batch of the next epoch while we
   still stand on the boundary, or by the end of the manager. What follows an epoch is then in it.
3. Never inside a window: it stays due.
4. What a signal asks for is saved at an epoch's last update at once, if the script closes its epochs: a resumed run
   then does what follows the epoch. In other scripts that is done before the save, as in 2.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import replace

from safepoint.boundary import Boundary
from safepoint.collector import collector_at_rest
from safepoint.conditions import Circumstances
from safepoint.errors import RequestError, SafepointError
from safepoint.joining.follower import RankSession
from safepoint.saver import Saver
from safepoint.saving.background import SaveHandle
from safepoint.saving.capture import Snapshot
from safepoint.state.afterwards import Afterwards
from safepoint.state.placement import StreamPlacement, undisturbed_streams
from safepoint.state.probe import Probe
from safepoint.state.randomness import RandomStreams
from safepoint.state.steps import StepMonitor
from safepoint.stop import Stop

_log = logging.getLogger(__name__)


class DueSaves:
    """Make the saves of one manager, and what belongs between two boundaries.

    Args:
        session: Returns the session that is held.
    """

    def __init__(
        self,
        boundary: Boundary,
        circumstances: Circumstances,
        saver: Saver,
        placement: StreamPlacement,
        monitor: StepMonitor,
        session: Callable[[], RankSession],
        probe: Probe | None,
        stop: Stop,
    ) -> None:
        self._boundary = boundary
        self._circumstances = circumstances
        self._saver = saver
        self._placement = placement
        self._monitor = monitor
        self._session = session
        self._probe = probe
        self._stop = stop
        self._is_held = self._is_prepared = False
        self._afterwards = Afterwards(with_tensors=True)
        # What the save at work has of the random streams.
        self._streams: RandomStreams | None = None
        self.closes_epochs = self.saves_on_exception = False
        self.metrics: Mapping[str, float] = {}
        self.late: frozenset[str] = frozenset()

    def after_update(self) -> None:
        """Make the save that is due at a boundary, or hold it until the epoch is closed.

        Raises:
            SystemExit: The run stops here, or should have stopped.
        """
        if not self._is_prepared:
            self._is_prepared = True
            self._saver.prepare(self._monitor.owned_bytes(world_size=self._saver.world_size))
        self._stop.end_if_ignored()
        self._is_held = self._boundary.progress.epoch_end_due
        if not self._is_held or self._saver.is_asked:
            self.make()
        elif self.closes_epochs:
            self.make(only_stops=True)
        if self.saves_on_exception:
            self._circumstances.watch_afterwards(self._afterwards)

    def end_epoch(self, metrics: Mapping[str, float]) -> None:
        """Close the epoch whose end is due, with the numbers that it came to, and make the save that was held.

        Raises:
            RequestError: No epoch's end is due.
        """
        progress = self._boundary.progress
        if not progress.epoch_end_due:
            raise RequestError(
                "no epoch has come to its end",
                expected="the last batch of a loader that is iterated by manager.batches()",
                found=f"step {progress.step}, {progress}",
                remedy="Iterate over manager.batches(loader), or leave end_epoch() out where nothing tells of epochs.",
            )
        self.metrics = {**self.metrics, **metrics}
        self._boundary.end_epoch()
        self.closes_epochs = True
        self.begin_epoch()

    def begin_epoch(self) -> None:
        """Make the save that was held at an epoch's last update, if the epoch is closed and no window is open."""
        if self._boundary.progress.epoch_end_due:
            return
        self._circumstances.note_schedules()
        if self._is_held and not self._boundary.open_because():
            self._is_held = False
            self.make()

    def make(self, *, is_explicit: bool = False, only_stops: bool = False) -> None:
        """Make the save that is due here, if one is; and where a signal asks for it, the last one.

        Raises:
            SystemExit: It was the last one, and the process ends after it.
        """
        handle = self._saver.take_due(
            self._boundary.progress.step, incarnation=self._incarnation, is_explicit=is_explicit, only_stops=only_stops
        )
        if not self._stop.is_saving:
            if handle is not None:
                self.save(handle)
            return
        try:
            if handle is not None:
                # Of a save before it that has failed, the policy alone decides whether this one is made.
                self._saver.raise_owed(waits=True)
                self.save(handle)
            self._saver.raise_owed(waits=True, is_explicit=True)
        finally:
            self._stop.conclude(is_committed=handle is not None and handle.committed)
        self._stop.end()

    def save(self, handle: SaveHandle) -> SaveHandle:
        """Save the boundary on which we stand."""
        self._streams = None
        with collector_at_rest():
            self._saver.save(self._session(), self._snapshot, handle, on_agreed=self._show_totals)
        if self._boundary.is_within_epoch:
            self._circumstances.watch_afterwards(streams=self._streams)
        return handle

    def end(self, *, is_joined: bool) -> None:
        """Make the save that is due at the end, wait for the one in flight, and raise what is owed."""
        if is_joined and not self._boundary.open_because():
            self.make(is_explicit=True)
        self._saver.raise_owed(waits=True, is_explicit=True)
        self._saver.give_up_deferred()

    def end_after(self, error: BaseException, *, is_usable: bool) -> None:
        """Wait for the save in flight, and make a last one where that is asked for; what fails is logged."""
        try:
            self._saver.raise_owed(waits=True, is_explicit=True)
            if is_usable:
                self.save_after(error)
        except SafepointError as failure:
            # The exception of the training is the one to be seen.
            _log.error("a save failed while another error ended the training: %s", failure)

    def save_after(self, error: BaseException) -> None:
        """Save the boundary once more to which an exception of the training has come, where that is asked for and safe.

        Raises:
            SafepointError: The save failed.
        """
        step = self._boundary.progress.step
        is_saved = self._boundary.stands_where_restored or self._saver.committed_step == step
        if not self.saves_on_exception or is_saved or self._stop.should_stop or isinstance(error, SafepointError):
            return
        why = self._unsafe_because()
        if why:
            _log.warning("step %d is not saved after %s: %s", step, type(error).__name__, why)
            return
        self.save(SaveHandle(is_explicit=True))
        self._saver.raise_owed(waits=True, is_explicit=True)

    def before_step(self) -> None:
        """Look at what was done since the boundary, before an optimizer steps; none does while it is saved."""
        self._saver.behind.pass_boundary()
        self._check_nothing_is_late("an optimizer is about to step")
        if not self._boundary.goes_on:
            self._circumstances.check_schedules()
        self._circumstances.afterwards.leave()

    def before_batch(self) -> None:
        """Look at what was done since the boundary, before a loader gives its next batch."""
        if not self._boundary.open_because():
            self._circumstances.check_schedules()
            self._circumstances.afterwards.check(self._boundary.progress.step)
        self._circumstances.afterwards.leave()

    def before_handing(self, loader: object) -> None:
        """Make ready for a batch of safepoint's own loader, whoever iterates it."""
        self.before_batch()
        if self._boundary.begins_next_epoch(loader):
            self._boundary.leave_epoch()
            self.begin_epoch()
        self._placement.place()

    def _unsafe_because(self) -> str:
        """Return why the live state may not be that of the boundary, or cannot be saved here; empty where it can."""
        if self._saver.world_size > 1:
            return "an exception is that of one rank, and the others do not come to a save"
        if self._boundary.goes_on:
            return self._boundary.open_because() or "an optimizer has stepped since the boundary"
        moved = self._afterwards.moved()
        return "; ".join(moved[word] for word in sorted(moved))

    def _incarnation(self) -> int:
        return self._session().claim.incarnation

    def _snapshot(self) -> Snapshot:
        self._check_nothing_is_late("a checkpoint is about to be made")
        self._monitor.check_not_moved(self._boundary.progress.step)
        numbers = None if self._probe is None else self._probe.measure()
        # A loader may make its iterator to tell its state, and draw for it.
        with undisturbed_streams() as self._streams:
            taken = self._circumstances.snapshot(metrics=self.metrics, probe=numbers, streams=self._streams)
        return replace(taken, owned=self._monitor.owned()) if self._saver.copies_behind else taken

    def _show_totals(self, snapshot: Snapshot) -> None:
        self._boundary.show_totals(samples=snapshot.progress.samples, tokens=snapshot.progress.tokens)

    def _check_nothing_is_late(self, what: str) -> None:
        if self.late:
            raise RequestError(
                f"{what} before a late item has its state",
                expected="register() of " + ", ".join(sorted(self.late)),
                remedy="Register late items before the first update after a restore.",
            )
