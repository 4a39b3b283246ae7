"""The saver: runs a manager's saves one after the other, and owns up to failures.

The policy for a save that failed on schedule: warn, keep the older checkpoints, raise at the third in a row. A fenced
start, a torn snapshot, a bug, an explicit `save()`, `wait()` and `close()` always raise. Retention runs after a
committed save and never after a failed one: beside the training where much may have to be deleted, and the next save
waits for it.
"""

from __future__ import annotations

import functools
import logging
import warnings
from collections.abc import Callable
from typing import NoReturn

from safepoint.ambient import Ambient
from safepoint.behind import Behind
from safepoint.errors import (
    AbortedError,
    FencedError,
    InternalError,
    LeaderLostError,
    OutcomeUnknownError,
    SafepointError,
    StorageError,
    TornSnapshotError,
)
from safepoint.evidence import Evidence
from safepoint.group.agreement import lead
from safepoint.group.base import Group
from safepoint.joining.follower import RankSession
from safepoint.retention.after_save import Retention
from safepoint.saving.background import BackgroundSaver, SaveHandle, mark_begun, tidy
from safepoint.saving.capture import Snapshot
from safepoint.saving.context import SaveContext, SaveResult, StagedSave, Staging
from safepoint.saving.increment import Increments
from safepoint.saving.plan import Planner
from safepoint.saving.save import begin, finish
from safepoint.schedule import DueClock, Schedule
from safepoint.stats import Costs, Running
from safepoint.stop import Stop
from safepoint.storage.base import Storage

TOLERATED_FAILURES = 2
_LONGEST_SWEEP_S = 1800.0
# A leader that shows no sign of life for so long while it deletes is not waited for.
_SHORTEST_SILENCE_S = 30.0
# To delete a file of this size may take as long as many steps.
_LARGE_BYTES = 64 << 20

_log = logging.getLogger(__name__)


class Saver:
    """Save the snapshots of one manager.

    Args:
        schedule: When a save is due.
        retention: Which checkpoints stay, decided after each committed save.
        background: Whether the second half of a save runs beside the training, and with which memory.
        full_every: Of so many saves one refers to no earlier one.
        deadline_s: How long a save waits for other ranks.
        evidence: Told each phase and each commit.
        compares_every: Replicas on several ranks are compared at every so manieth save; 0 for never.
        refuses_difference: Whether replicas that differ abort a save, or are noted.
        stop: The stop that signals ask for; none by default.
    """

    def __init__(
        self,
        storage: Storage,
        group: Group,
        ambient: Ambient,
        *,
        schedule: Schedule,
        retention: Retention,
        background: bool | Staging,
        full_every: int = 1,
        deadline_s: float,
        evidence: Evidence,
        compares_every: int = 1,
        refuses_difference: bool = True,
        stop: Stop | None = None,
    ) -> None:
        self._storage = storage
        self._group = group
        self._ambient = ambient
        self._planner = Planner(
            group, deadline_s=deadline_s, compares_every=compares_every, refuses_difference=refuses_difference
        )
        self._stop = stop or Stop(None, group, ambient)
        self._due = DueClock(schedule, self._stop, group, ambient, deadline_s=deadline_s)
        self._refuses_difference = refuses_difference
        self._retention = retention
        self._is_background = bool(background)
        self._staging = background if isinstance(background, Staging) else Staging()
        self._deadline_s = deadline_s
        self._evidence = evidence
        self._workspace = self._staging.workspace(Increments(full_every))
        self._thread = BackgroundSaver(ambient)
        self._failures = 0
        self._unknown: set[str] = set()
        self._deferred: SaveHandle | None = None
        self._last_step, self._last_time = 0, ambient.monotonic()
        self._was_due = False
        self.committed_step: int | None = None
        self.costs = Costs(ambient, lambda: self.is_saving, is_background=self._is_background)
        self.behind = Behind(ambient, self.costs)
        # When the save in flight began, and how long the last committed one took.
        self._began_s = self._took_s = 0.0

    def begin_at(self, step: int) -> None:
        """Count the schedule from this step and from now on."""
        self._last_step, self._last_time, self._was_due = step, self._ambient.monotonic(), False

    def defer(self, why: str) -> SaveHandle:
        """Promise a save at the next boundary, and return its handle."""
        self._deferred = self._deferred or SaveHandle(deferred=why, is_explicit=True)
        return self._deferred

    @property
    def world_size(self) -> int:
        """Return the number of ranks."""
        return self._group.world_size

    @property
    def copies_behind(self) -> bool:
        """Return whether what only an optimizer's step changes is copied while the training goes on."""
        return self._is_background and self._staging.copies_behind

    @property
    def is_saving(self) -> bool:
        """Return whether a save is in flight."""
        return self._thread.is_busy

    @property
    def is_asked(self) -> bool:
        """Return whether a save was promised for the next boundary."""
        return self._deferred is not None

    def take_due(
        self, step: int, *, incarnation: Callable[[], int], is_explicit: bool = False, only_stops: bool = False
    ) -> SaveHandle | None:
        """Return the handle of the save that is to be made at this boundary; None when none is due, on all ranks alike.

        Where a signal asks for a stop, this is the boundary of the last save, and the stop has its order from here on.

        Args:
            step: The boundary's step.
            incarnation: Returns the number of the start that saves; asked only where ranks have to talk.
            is_explicit: Whether the training has ended: the failure of a save that is due always raises.
            only_stops: Whether a save that falls due by the schedule is left to the next call.

        Raises:
            LeaderLostError: The leader did not say whether a save is due.
        """
        needs_s = self._needs_s()
        word = self._due.ask(
            incarnation,
            step=step,
            last_step=self._last_step,
            last_time=self._last_time,
            needs_s=needs_s,
            is_end=is_explicit,
        )
        is_due, order = word.is_due or self._was_due, word.order
        self._was_due = is_due and only_stops
        if order is not None:
            self._stop.follow(order, step=step, needs_s=needs_s)
        elif only_stops:
            return None
        is_due = is_due if order is None else order.has_time
        handle, self._deferred = self._deferred, None
        if is_due and self._group.world_size > 1:
            # Whatever comes of it on one rank: the next one is due on all at the same step.
            self.begin_at(step)
        return handle or (SaveHandle(is_explicit=is_explicit or order is not None) if is_due else None)

    def save(
        self,
        session: RankSession,
        snapshot: Callable[[], Snapshot],
        handle: SaveHandle,
        *,
        on_agreed: Callable[[Snapshot], None] = lambda snapshot: None,
    ) -> None:
        """Save what `snapshot` captures; return when it is done or, in the background, when live memory may change.

        Args:
            snapshot: Captures the boundary; called after the save before has ended.
            handle: Told what comes of it.
            on_agreed: Told the snapshot with the totals of all ranks, before the boundary is left.

        Raises:
            SafepointError: This save or the one before failed, and the policy is to raise.
        """
        with self.behind.boundary(), self._thread.held_back(), self.costs.blocked(session.journal.event) as running:
            self._save(session, snapshot, handle, running, on_agreed)

    def prepare(self, size_bytes: int) -> None:
        """Have memory ready for a copy of this size, if one is going to be made."""
        if self._is_background and size_bytes <= self._workspace.most_bytes:
            self._workspace.buffer.prepare(size_bytes)

    def _save(
        self,
        session: RankSession,
        snapshot: Callable[[], Snapshot],
        handle: SaveHandle,
        running: Running,
        on_agreed: Callable[[Snapshot], None],
    ) -> None:
        try:
            self.raise_owed(waits=True, is_explicit=handle.is_explicit)
        except BaseException as exc:
            # This save is not made, and somebody may wait for it.
            handle.run(functools.partial(_raise, exc))
            raise
        self.behind.leave()
        context = SaveContext(
            storage=self._storage,
            group=self._group,
            ambient=self._ambient,
            claim=session.claim,
            chain=session.chain,
            deadline_s=self._deadline_s,
            planner=self._planner,
            refuses_difference=self._refuses_difference,
            workspace=self._workspace,
            on_phase=lambda phase: self._evidence.tell("phase", phase=phase),
            on_agreed=on_agreed,
            check_boundary=self.behind.witness(),
        )
        self._began_s = self._ambient.monotonic()
        mark_begun(handle)

        def counted() -> Snapshot:
            taken = snapshot()
            self.begin_at(taken.progress.step)
            return taken

        try:
            staged = begin(context, counted, copies=self._is_background)
        except BaseException as exc:
            handle.run(functools.partial(_raise, exc))
            if not isinstance(exc, StorageError | AbortedError):
                raise
            self._own_up(handle, is_explicit=handle.is_explicit)
            return
        work = functools.partial(self._finish, context, session, staged, running)
        then = functools.partial(self._tidy, session, staged.generation, staged.plan.step)
        if self._is_background:
            copying = staged.copying
            if copying is not None:
                self.behind.follow(copying, running)
            try:
                self._thread.launch(handle, work, then, may_wait=copying is not None)
            except BaseException as exc:
                if not (self._thread.is_busy or handle.done):
                    # An interrupt came before anything was begun.
                    handle.run(functools.partial(_raise, exc))
                raise
            finally:
                self._leave_boundary(staged, handle)
            return
        handle.run(work)
        handle.mark_staged()
        is_large = handle.result is not None and handle.result.size_bytes >= _LARGE_BYTES
        if not is_large:
            tidy(handle, then)
        self._own_up(handle, is_explicit=handle.is_explicit)
        if is_large:
            self._thread.follow(handle, then)

    def _leave_boundary(self, staged: StagedSave, handle: SaveHandle) -> None:
        """Return when the training may go on, also after an interrupt: the save's thread may read live memory."""
        try:
            if self._thread.is_busy:
                staged.origin.leave_boundary()
        finally:
            if staged.copying is None:
                handle.mark_staged()
            else:
                staged.copying.when_complete(handle.mark_staged)

    def raise_owed(self, *, waits: bool, deadline_s: float | None = None, is_explicit: bool = False) -> None:
        """Raise or warn about the failure of a background save that has ended; by the policy, unless explicit.

        Of several ranks, only a call that waits does: else each would leave at another boundary, and the others wait.

        Raises:
            AbortedError: A wait took longer than `deadline_s`; the save goes on.
        """
        if not waits and self._group.world_size > 1:
            return
        handle = self._thread.settle(waits=waits, deadline_s=deadline_s)
        if handle is not None:
            self._own_up(handle, is_explicit=is_explicit or handle.is_explicit)

    def close(self) -> None:
        """End; what is owed must have been raised."""
        try:
            self.give_up_deferred()
        except AbortedError as exc:
            _log.warning("%s", exc)
        self._thread.close()
        self.costs.tell()

    def give_up_deferred(self) -> None:
        """End the handle of a promised save whose boundary never came.

        Raises:
            AbortedError: There is one.
        """
        handle, self._deferred = self._deferred, None
        if handle is None:
            return
        error = AbortedError("a save asked for inside a window was not made", found=f"{handle.deferred}, never came")
        handle.run(functools.partial(_raise, error))
        raise error

    def _needs_s(self) -> float:
        """Return how long a save is expected to take from here, with what is left of the one in flight."""
        elapsed_s = self._ambient.monotonic() - self._began_s
        return self._took_s + (max(0.0, self._took_s - elapsed_s) if self._thread.is_busy else 0.0)

    def _finish(self, context: SaveContext, session: RankSession, staged: StagedSave, running: Running) -> SaveResult:
        try:
            result = finish(context, staged)
        except OutcomeUnknownError:
            self._unknown.add(str(staged.generation))
            raise
        self._took_s, self.committed_step = self._ambient.monotonic() - self._began_s, result.step
        self.costs.note(running, result, staged.spent)
        if self._group.rank == 0:
            session.journal.event("committed", generation=result.generation, step=result.step)
        return result

    def _tidy(self, session: RankSession, generation: str, step: int) -> None:
        """Do what follows a committed save."""
        self._retain_together(session, generation)
        self._evidence.tell("committed", step=step, generation=generation)

    def _retain_together(self, session: RankSession, generation: str) -> None:
        """Delete on the leader, while the other ranks wait here and not in a collective, which has a time-out."""

        def act() -> bytes:
            self._retain(session)
            return b""

        if self._group.world_size == 1:
            self._retain(session)
            return
        try:
            with self._group.watched(silence_s=max(self._deadline_s, _SHORTEST_SILENCE_S)):
                lead(self._group, f"save/{generation}/swept", act, deadline_s=_LONGEST_SWEEP_S)
        except LeaderLostError as exc:
            # The checkpoint is committed; what the leader has deleted is not for this rank to know.
            _log.warning("the leader was not heard of after a save: %s", exc)

    def _retain(self, session: RankSession) -> None:
        claim = session.claim
        deleted = self._retention.retain(
            self._storage, run=claim.run, incarnation=claim.incarnation, unknown=self._unknown
        )
        for generation in deleted:
            session.journal.event("deleted", generation=generation)

    def _own_up(self, handle: SaveHandle, *, is_explicit: bool) -> None:
        error = handle.error
        if error is None:
            self._failures = 0
            return
        self._failures += 1
        always = not isinstance(error, SafepointError) or isinstance(
            error, FencedError | TornSnapshotError | InternalError
        )
        if always or is_explicit or self._failures > TOLERATED_FAILURES:
            raise error
        _log.warning("a save failed, training goes on (%d in a row): %s", self._failures, error)
        warnings.warn(f"safepoint: a save failed, training goes on: {error}", RuntimeWarning, stacklevel=2)


def _raise(error: BaseException) -> NoReturn:
    raise error
