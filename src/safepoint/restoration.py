"""Restoration: how a manager comes to stand on a restored boundary, at its start, when it goes back, or late."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

from safepoint.boundary import Boundary
from safepoint.collector import collector_at_rest
from safepoint.conditions import Circumstances
from safepoint.due import DueSaves
from safepoint.errors import SafepointError
from safepoint.joining.follower import RankSession
from safepoint.membership import Membership, record_start
from safepoint.restoring.ahead import Ahead, likely_ahead
from safepoint.restoring.match import Choice
from safepoint.restoring.outcome import RestoreReport
from safepoint.restoring.restore import RestoreContext, Restored, restore_late
from safepoint.restoring.select import Wish
from safepoint.restoring.together import Ranks
from safepoint.saver import Saver
from safepoint.settings import choose
from safepoint.source import Source, begin, look_for
from safepoint.state.placement import StreamPlacement
from safepoint.storage.base import Storage


class Restoration:
    """Restore for one manager.

    Args:
        context: Returns what a restore works on, as things are now.
    """

    def __init__(
        self,
        storage: Storage,
        ranks: Ranks,
        membership: Membership,
        circumstances: Circumstances,
        boundary: Boundary,
        due: DueSaves,
        saver: Saver,
        placement: StreamPlacement,
        context: Callable[[], RestoreContext],
    ) -> None:
        self._storage = storage
        self._ranks = ranks
        self._membership = membership
        self._circumstances = circumstances
        self._boundary = boundary
        self._due = due
        self._saver = saver
        self._placement = placement
        self._context = context
        self._restored = Restored()

    def restore(self, wish: Wish, *, source: str | os.PathLike[str] | None, **options: Any) -> RestoreReport:
        """Join the run, restore what the wish asks for, and stand on its boundary.

        Args:
            wish: Which checkpoint; where the training has begun, nothing found is nothing to go back to.
            source: Another run to begin with.
            options: What is left out: `skip`, `items`, `late`.

        Raises:
            SafepointError: As `CheckpointManager.restore` does.
        """
        needs_one = wish.required or self._boundary.progress.step > 0 or bool(self._membership.unusable)
        wish = replace(wish, required=needs_one and source is None)
        choice, other = self._ranks.all(lambda: self._checked(wish, source, options))
        is_plain = self._ranks.world_size == 1 and wish.asked is None and not self._membership.restarts
        likely = likely_ahead(self._storage) if is_plain else Ahead(self._storage, "")
        with collector_at_rest(), likely as ahead:
            report = self._membership.enter(
                wish,
                lambda lineage: begin(
                    replace(self._context(), ahead=ahead),
                    lineage,
                    wish,
                    choice,
                    source=other,
                    restarts=self._membership.restarts,
                ),
                partial(self._settle_on, choice=choice, is_branch=wish.branch),
            )
        self._membership.unusable = ""
        return report

    def give_late(self, name: str) -> None:
        """Give an item that was registered on the restored boundary its state; on any other it is a new one.

        Raises:
            MismatchError: The restored checkpoint does not fit it, or has no such item.
            ContractError: With it the promise asked for cannot be kept.
        """
        restored = self._restored
        if restored.saved is None or self._boundary.progress.step != restored.saved.manifest.step:
            return
        before = self._membership.unusable
        try:
            restore_late(self._context(), restored.saved, name, storage=restored.storage)
        except SafepointError:
            self._circumstances.forget(name)
            raise
        self._membership.unusable = before
        self._due.late -= {name}
        self._placement.settle()

    def _checked(
        self, wish: Wish, source: str | os.PathLike[str] | None, options: Mapping[str, Any]
    ) -> tuple[Choice, Source | None]:
        """Do at once what can fail on one rank alone, so that no other one waits for it in vain."""
        self._saver.raise_owed(waits=True, is_explicit=True)
        choice = choose(**options)
        self._membership.check_covers(choice)
        return choice, look_for(source, own=self._storage, wish=wish, is_leader=self._ranks.rank == 0)

    def _settle_on(self, session: RankSession, restored: Restored, *, choice: Choice, is_branch: bool) -> RestoreReport:
        """Stand on the restored boundary, record it, and make the report."""
        self._circumstances.resume(restored, late=choice.late)
        replayed = record_start(session, restored, is_branch=is_branch)
        step = self._boundary.progress.step
        self._restored, self._due.late = restored, choice.late
        self._saver.begin_at(step)
        self._placement.disarm()
        if restored.saved is not None:
            self._placement.arm(is_within_epoch=self._boundary.is_within_epoch)
        return restored.report(step=step, replayed=replayed)
