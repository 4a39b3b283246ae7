"""The boundary: what was counted since the last one, and whether we stand on one now.

1. The step changes in `close` only, the epoch in `end_epoch` only.
2. We stand on a boundary when nothing has happened since: no microbatch, no batch handed out, no optimizer step.
3. Loaders are committed here and nowhere else, so that what is saved of them is of this boundary.
4. One loader counts an epoch: the first whose batches the epoch's updates use. Passes over others move nothing.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import cast

from safepoint.data.cursor import Cursor
from safepoint.data.sampler import ResumableSampler
from safepoint.passes import (
    Loader,
    Pass,
    Position,
    check_cursors,
    commit_window,
    committed_offsets,
    epochs_finished,
    handed_out,
    held_samples,
    length_of,
    parts_in_step,
)
from safepoint.progress import Consumed, Progress, check_whole
from safepoint.state.steps import StepMonitor


class Boundary:
    """Count microbatches, batches and optimizer steps between boundaries."""

    def __init__(self, monitor: StepMonitor, *, world_size: int = 1) -> None:
        self.progress = Progress()
        self.consumed = Consumed()
        self._has_ranks = world_size > 1
        self.leaves_epochs_open = self.has_moved = False
        self.longest_window = 0
        self.epoch_batches = 0
        self.restores = 0
        self.stands_where_restored = False
        self._monitor = monitor
        self._untold = self._foreign_workers = 0
        self._entries: list[object] = []
        self._positions: dict[str, Position] = {}
        self._loaders: list[Loader] = []
        self._ahead: dict[str, int] = {}
        self._microbatches = 0
        self._dropped = 0
        self._foreign_handed = 0
        self.ahead = 0
        self._foreign_in_epoch = 0
        self._last_is_out = self._last_keeps_itself = False
        self._is_resumed_at_end = False
        self._cursors: dict[str, int] = {}
        self._passes: list[Pass] = []
        self._counting: Pass | None = None
        self._before: Pass | None = None
        self._is_training = self._is_pass_over = self._has_leftover = self._is_carried = False
        self._counted_before = (0, 0)

    def watch(self, name: str, item: object) -> None:
        """Note a registered object, and commit its position at each boundary, if it has one."""
        self._entries.append(item)
        if isinstance(item, Position):
            self._positions[name] = item
            if hasattr(item, "last_ids"):
                self._loaders.append(cast(Loader, item))
        self._cursors = committed_offsets(self._positions)

    def unwatch(self, name: str, item: object) -> None:
        """Forget an object that was noted last."""
        self._entries = [entry for entry in self._entries if entry is not item]
        self._loaders = [loader for loader in self._loaders if loader is not item]
        self._positions.pop(name, None)

    def is_told(self, loader: object) -> bool:
        """Return whether the position of a loader may be an item's: its own, that of a part of it, or of its source."""
        return self._is_part_of_item(loader) or (bool(self._positions) and not hasattr(loader, "dataset"))

    def is_watched(self, entry: object) -> bool:
        """Return whether an object keeps its own position and is committed here."""
        return any(position is entry for position in self._positions.values())

    def begin_at(self, progress: Progress, counts: Mapping[str, int]) -> None:
        """Stand on the boundary of a restored checkpoint, with the counts that it recorded."""
        self.progress = progress
        self.consumed = Consumed(progress.samples, progress.tokens)
        self.epoch_batches = counts.get("epoch_batches", 0)
        self.leaves_epochs_open = self.leaves_epochs_open or bool(counts.get("leaves_epochs_open"))
        self.longest_window = self._untold = self._foreign_workers = 0
        self.restores += 1
        self.stands_where_restored = True
        self._passes = []
        self._counting = self._before = None
        self._is_training = self._is_pass_over = self._has_leftover = self._is_carried = False
        self._cursors = committed_offsets(self._positions)
        self._ahead = {}
        self._foreign_in_epoch = counts.get("foreign_in_epoch", 0)
        self.has_moved = bool(counts) and bool(counts.get("has_moved", True))
        self._last_is_out = self._last_keeps_itself = bool(counts.get("end_is_open"))
        self._is_resumed_at_end = progress.epoch_end_due
        self._microbatches = self._dropped = self._foreign_handed = self.ahead = 0
        self._monitor.reset()

    def counts(self) -> dict[str, int]:
        """Return what a checkpoint records besides progress, for `begin_at`."""
        return {
            "epoch_batches": self.epoch_batches,
            "leaves_epochs_open": int(self.leaves_epochs_open),
            "batches_ahead": self.ahead,
            "foreign_in_epoch": self._foreign_in_epoch,
            "end_is_open": int(self.end_is_open),
            "has_moved": int(self.has_moved),
        }

    @property
    def is_within_epoch(self) -> bool:
        """Return whether an epoch is begun and its loader has not come to its end."""
        return self.epoch_batches > 0 and (self.end_is_open or not self.progress.epoch_end_due)

    @property
    def end_is_open(self) -> bool:
        """Return whether a loader that is an item has given its last batch and was not asked for one more."""
        return self._last_is_out and self._last_keeps_itself

    @property
    def untold(self) -> int:
        """Return how many batches of this epoch came from loaders that are no item."""
        return self._untold + sum(one.in_all for one in self._others() if not one.is_told)

    @property
    def foreign_workers(self) -> int:
        """Return the number of worker processes of foreign loaders in this epoch."""
        return max([self._foreign_workers, *(getattr(one.loader, "num_workers", 0) for one in self._others())])

    def open_because(self) -> str:
        """Return why we do not stand on a boundary; empty when we do."""
        if self._microbatches:
            return f"{self._microbatches} microbatches since the last update"
        for name, position in self._positions.items():
            if isinstance(position, ResumableSampler):
                continue
            if position.uncommitted > self._ahead.get(name, 0) + self._dropped:
                return f"a batch of {name!r} was handed out since the last update"
        if self._foreign_handed > self.ahead + self._dropped:
            return "a batch was handed out since the last update"
        return ""

    @property
    def tells_length(self) -> bool:
        """Return whether the loader that counts the epoch says how many batches an epoch has."""
        return self._counting is not None and length_of(self._counting.loader) is not None

    @property
    def goes_on(self) -> bool:
        """Return whether an optimizer has stepped, or a batch was handed out, since the last boundary."""
        return bool(self.open_because()) or any(self._monitor.counts().values())

    def begins_next_epoch(self, loader: object) -> bool:
        """Return whether a batch of this loader means that the epoch whose end is due is over."""
        is_counting = self._counting is not None and self._counting.loader is loader
        return is_counting and self.progress.epoch_end_due and not self._is_resumed_at_end

    def add_microbatch(self) -> None:
        """Count one forward and backward within the window."""
        self._microbatches += 1
        self._is_training = True

    def drop_batch(self) -> None:
        """Count a batch that was handed out and not used."""
        self._dropped += 1
        self._is_training = True

    def close(self, *, samples: int | None, tokens: int, batches: int | None) -> None:
        """Close the window: one update is complete, and we stand on its boundary.

        Args:
            samples: What this rank consumed; None takes the loader's own count.
            batches: How many batches belong to the update; None for all that were handed out.
        """
        check_whole(samples=0 if samples is None else samples, tokens=tokens, batches=0 if batches is None else batches)
        if batches is not None:
            check_cursors(self._positions, self._cursors)
        if self.progress.epoch_end_due and not self._has_leftover:
            self.leave_epoch()
        if self._counting is None:
            self._count_by(self._first_used())
        self._note_told()
        window = self._window(batches)
        held = held_samples(self._used_loader())
        for name, position in self._positions.items():
            commit_window(position, batches, window=window, dropped=self._dropped)
            self._ahead[name] = position.uncommitted
        own, planned = (before - after for before, after in zip(held, held_samples(self._used_loader()), strict=True))
        samples = own if samples is None else samples
        is_planned = samples == own
        self.consumed = self.consumed.add(samples=samples, tokens=tokens, planned=planned, is_planned=is_planned)
        counted = self._foreign_handed if batches is None else min(batches + self._dropped, self._foreign_handed)
        self._foreign_handed = self.ahead = self._foreign_handed - counted
        steps = self._monitor.counts()
        was_skipped = bool(steps) and not any(steps.values())
        if not self._is_carried:
            # A window that began in the epoch before has microbatches of both.
            self.longest_window = max(self.longest_window, window)
        self.epoch_batches += window
        self.progress = replace(
            self.progress,
            step=self.progress.step + 1,
            microbatches=self.progress.microbatches + window,
            samples=self.progress.samples + (planned if self._has_ranks and is_planned else samples),
            tokens=self.progress.tokens + tokens,
            skipped=self.progress.skipped + was_skipped,
            epoch_end_due=self._has_leftover or self._is_epoch_finished(),
        )
        self._is_resumed_at_end = self._has_leftover = self._is_carried = self.stands_where_restored = False
        self._is_training = True
        self._microbatches = self._dropped = 0
        for one in self._passes:
            one.handed = 0
        self._cursors = committed_offsets(self._positions)
        self._monitor.reset()

    def show_totals(self, *, samples: int, tokens: int) -> None:
        """Count from now on from what all ranks have consumed together, as they found at a save."""
        self.progress = replace(self.progress, samples=samples, tokens=tokens)

    def begin_pass(self, loader: object) -> Pass | None:
        """Begin a pass over a loader and return it; None when the loader has no batches left.

        Directly after a restore at an epoch's end it has none, so that what follows the epoch is done. Otherwise an
        epoch that was not closed is over when its own loader begins anew.
        """
        self.stands_where_restored = False
        if self._is_pass_over and not self._is_training:
            # Nothing was trained on that pass: it was no part of an epoch.
            self._foreign_handed = self.ahead
            self._counting, self._is_pass_over = None, False
            self._foreign_in_epoch, self._foreign_workers = self._counted_before
        if self.progress.epoch_end_due:
            has_to_end, is_resumed_at_end = self.end_is_open, self._is_resumed_at_end
            self._is_resumed_at_end = False
            if is_resumed_at_end and not has_to_end:
                return None
            if not is_resumed_at_end and (self._counting is None or self._counting.loader is loader):
                self.leave_epoch()
        epoch = cast(Loader, loader).epoch if self.is_watched(loader) and hasattr(loader, "last_ids") else 0
        self._passes.append(Pass(loader, epoch, held=handed_out(self._positions.values())))
        return self._passes[-1]

    def hand_out(self, one: Pass) -> None:
        """Count one batch of a pass, and whether its loader's position is saved at all."""
        one.handed += 1
        one.in_all += 1
        if one.in_all == 1:
            one.is_told = self._is_part_of_item(one.loader) or handed_out(self._positions.values()) > one.held
        if self._counting is None and not self.progress.epoch_end_due:
            self._count_by(one)
        elif self._counting is not None and self._counting.loader is one.loader:
            self._counting = one
            self._count_batches(one, 1)

    def finish_pass(self, one: Pass) -> None:
        """Note that a pass has come to its end: with it the epoch, when updates are made on it."""
        is_counting = self._counting is not None and self._counting.loader is one.loader
        is_to_end = self._counting is None and self.end_is_open
        is_empty = one.in_all == 0 and self._counting is None and not self.is_watched(one.loader)
        if is_counting:
            self._is_pass_over = True
            has_batches_ahead = any(self._ahead.values()) and self.is_watched(one.loader)
            if not self._is_training or has_batches_ahead:
                return
        if is_counting or is_to_end or is_empty:
            self.mark_epoch_end()

    def leave_pass(self, one: Pass) -> None:
        """Forget a pass that nobody goes on with."""
        self._passes = [other for other in self._passes if other is not one]

    def mark_epoch_end(self) -> None:
        """Note that the epoch's loader has come to its end. What is left over belongs to the epoch until the next."""
        if not self.open_because():
            self._commit_dropped()
        self._has_leftover = bool(self.open_because() or self.ahead)
        self.progress = replace(self.progress, epoch_end_due=True)
        self._last_is_out = False

    def finish_epoch(self) -> bool:
        """Mark the end of an epoch whose loader has nothing left, and return whether it is so."""
        if not self.progress.epoch_end_due:
            one = self._counting or self._first_used()
            is_handed_out = (
                one is not None and self._is_loader(one.loader) and cast(Loader, one.loader).epoch > one.begun
            )
            if self._is_pass_over or is_handed_out:
                self.mark_epoch_end()
        return self.progress.epoch_end_due

    def leave_epoch(self) -> None:
        """Close an epoch that the script went on from without a word."""
        self.leaves_epochs_open = True
        self.end_epoch()

    def end_epoch(self) -> None:
        """Close the epoch."""
        self.progress = replace(self.progress, epoch=self.progress.epoch + 1, epoch_end_due=False)
        self.epoch_batches = self._untold = self._foreign_workers = self._foreign_in_epoch = 0
        self._is_carried = self._has_leftover
        self._last_is_out = self._is_training = self._is_pass_over = self._has_leftover = False
        self._is_resumed_at_end = self.stands_where_restored = False
        self._before, self._counting = self._counting or self._before, None

    def last_ids(self) -> dict[str, list[int]]:
        """Return the sample indices handed out since the last boundary, for each loader that knows them."""
        return {name: cast(Loader, one).last_ids() for name, one in self._positions.items() if hasattr(one, "last_ids")}

    def _others(self) -> list[Pass]:
        """Return the passes that are open and do not count the epoch."""
        used = None if self._counting is None else self._counting.loader
        return [one for one in self._passes if one.loader is not used and not self.is_watched(one.loader)]

    def _first_used(self) -> Pass | None:
        """Return the pass whose batches were handed out since the last boundary, the one begun first."""
        begun = [one for one in self._passes if one.handed]
        if begun:
            return begun[0]
        used = [loader for loader in self._loaders if loader.uncommitted]
        return Pass(used[0], epochs_finished(used[0])) if used else None

    def _count_by(self, one: Pass | None) -> None:
        """Let a pass count the epoch."""
        if one is None:
            return
        if self._before is not None and self._before.loader is one.loader:
            # A window may have begun in the epoch before.
            one.begun = max(one.begun, self._before.begun + 1)
        self._counting = one
        self._counted_before = (self._foreign_in_epoch, self._foreign_workers)
        self._count_batches(one, one.handed)

    def _count_batches(self, one: Pass, number: int) -> None:
        """Count batches of a pass that counts the epoch; a loader that is watched counts its own."""
        if self.is_watched(one.loader):
            return
        if self.progress.epoch_end_due:
            # Its length said that the batch before was the last one.
            self.progress = replace(self.progress, epoch_end_due=False)
        self._foreign_handed += number
        self._foreign_in_epoch += number
        self._last_is_out = self._foreign_in_epoch == length_of(one.loader)
        self._last_keeps_itself = self._is_item(one.loader, getattr(one.loader, "dataset", None))
        self._foreign_workers = max(self._foreign_workers, getattr(one.loader, "num_workers", 0))

    def _commit_dropped(self) -> None:
        """Count the batches that were dropped after the last update as finished with."""
        for name, position in self._positions.items():
            if isinstance(position, ResumableSampler) or self._is_loader(position):
                position.commit(min(self._dropped, position.uncommitted))
                self._ahead[name] = position.uncommitted
        self._foreign_handed, self._dropped = self.ahead, 0

    def _is_loader(self, entry: object) -> bool:
        return any(loader is entry for loader in self._loaders)

    def _window(self, batches: int | None) -> int:
        if self._microbatches:
            return self._microbatches
        if batches is not None:
            return batches
        used = self._used_loader()
        return max(1, (self._foreign_handed if used is None else used.uncommitted) - self._dropped)

    def _used_loader(self) -> Loader | None:
        used = None if self._counting is None else self._counting.loader
        return cast(Loader, used) if self._is_loader(used) else None

    def _note_told(self) -> None:
        """Look at the end of a window whether a position has moved that tells where its batches came from."""
        self.has_moved |= any(one.uncommitted for one in self._positions.values())
        one = self._counting
        if one is not None and not self.is_watched(one.loader):
            # A cursor may be moved by the loop's body, after the batch was handed out.
            one.is_told |= any(isinstance(item, Cursor) and item.uncommitted for item in self._positions.values())
            self._untold += 0 if one.is_told else one.handed

    def _is_part_of_item(self, loader: object) -> bool:
        return self._is_item(loader, *parts_in_step(loader))

    def _is_item(self, *parts: object) -> bool:
        return any(entry is part for entry in self._entries for part in parts)

    def _is_epoch_finished(self) -> bool:
        one, used = self._counting, self._used_loader()
        if one is not None and used is not None:
            return epochs_finished(used) > one.begun
        return not self.ahead and (self._last_is_out or self._is_pass_over)
