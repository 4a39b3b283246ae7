"""Due saves: at which moment the save that a schedule asks for is made.

1. Within an epoch at the boundary itself.
2. At an epoch's last update when the epoch is closed: by `end_epoch`, by the first batch of the next epoch while we
   still stand on the boundary, or by the end of the manager. What follows an epoch is then in it.
3. Never inside a window: it stays due.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from safepoint.boundary import Boundary
from safepoint.conditions import Circumstances
from safepoint.errors import RequestError
from safepoint.joining.follower import RankSession
from safepoint.saver import Saver
from safepoint.saving.background import SaveHandle
from safepoint.saving.capture import Snapshot
from safepoint.state.placement import StreamPlacement
from safepoint.state.probe import Probe
from safepoint.state.steps import StepMonitor


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
    ) -> None:
        self._boundary = boundary
        self._circumstances = circumstances
        self._saver = saver
        self._placement = placement
        self._monitor = monitor
        self._session = session
        self._probe = probe
        self._is_held = False
        self.metrics: Mapping[str, float] = {}
        self.late: frozenset[str] = frozenset()

    def after_update(self) -> None:
        """Make the save that is due at a boundary, or hold it until the epoch is closed."""
        self._is_held = self._boundary.progress.epoch_end_due
        if not self._is_held or self._saver.is_asked:
            self.make()

    def begin_epoch(self) -> None:
        """Make the save that was held at an epoch's last update, if the epoch is closed and no window is open."""
        if self._boundary.progress.epoch_end_due:
            return
        self._circumstances.note_schedules()
        if self._is_held and not self._boundary.open_because():
            self._is_held = False
            self.make()

    def make(self, *, is_explicit: bool = False) -> None:
        """Make the save that is due here, if one is."""
        step = self._boundary.progress.step
        handle = self._saver.take_due(step, incarnation=self._incarnation, is_explicit=is_explicit)
        if handle is not None:
            self.save(handle)

    def save(self, handle: SaveHandle) -> SaveHandle:
        """Save the boundary on which we stand."""
        self._saver.save(self._session(), self._snapshot, handle, on_agreed=self._show_totals)
        if self._boundary.is_within_epoch:
            self._circumstances.watch_afterwards()
        return handle

    def before_step(self) -> None:
        """Look at what was done since the boundary, before an optimizer steps."""
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

    def _incarnation(self) -> int:
        return self._session().claim.incarnation

    def _snapshot(self) -> Snapshot:
        self._check_nothing_is_late("a checkpoint is about to be made")
        self._monitor.check_not_moved(self._boundary.progress.step)
        numbers = None if self._probe is None else self._probe.measure()
        return self._circumstances.snapshot(metrics=self.metrics, probe=numbers)

    def _show_totals(self, snapshot: Snapshot) -> None:
        self._boundary.show_totals(samples=snapshot.progress.samples, tokens=snapshot.progress.tokens)

    def _check_nothing_is_late(self, what: str) -> None:
        if self.late:
            raise RequestError(
                f"{what} before a late item has its state",
                expected="register() of " + ", ".join(sorted(self.late)),
                remedy="Register late items before the first update after a restore.",
            )
