"""The boundary: what was counted since the last one, and whether we stand on one now.

1. Progress changes in `close` and `end_epoch` only.
2. We stand on a boundary when nothing has happened since: no microbatch, no batch handed out, no optimizer step.
3. Loaders and cursors are committed here and nowhere else, so that what is saved of them is of this boundary.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Protocol, cast, runtime_checkable

from safepoint.data.sampler import ResumableSampler
from safepoint.errors import RequestError
from safepoint.progress import Progress
from safepoint.state.steps import StepMonitor


@runtime_checkable
class Position(Protocol):
    """A position in the input that separates what was handed out from what is finished with."""

    @property
    def uncommitted(self) -> int:
        """Return how much was handed out since the last commit."""

    def commit(self, batches: int | None = None, /) -> None:
        """Count what was handed out as finished with; None for all of it."""


class Boundary:
    """Count microbatches, batches and optimizer steps between boundaries."""

    def __init__(self, monitor: StepMonitor) -> None:
        self.progress = Progress()
        self.uses_end_epoch = False
        self.longest_window = 0
        self.epoch_batches = 0
        self._monitor = monitor
        self.untold = self.foreign_workers = 0
        self._entries: list[object] = []
        self._positions: dict[str, Position] = {}
        self._loaders: list[_Loader] = []
        self._ahead: dict[str, int] = {}
        self._microbatches = 0
        self._dropped = 0
        self._foreign_handed = 0
        self._foreign_ahead = 0
        self._foreign_in_epoch = 0
        self._last_is_out = self._last_keeps_itself = False
        self._is_resumed_at_end = False

    def watch(self, name: str, item: object) -> None:
        """Note a registered object, and commit its position at each boundary, if it has one."""
        self._entries.append(item)
        if isinstance(item, Position):
            self._positions[name] = item
            if hasattr(item, "last_ids"):
                self._loaders.append(cast(_Loader, item))

    def unwatch(self, name: str, item: object) -> None:
        """Forget an object that was noted last."""
        self._entries = [entry for entry in self._entries if entry is not item]
        self._loaders = [loader for loader in self._loaders if loader is not item]
        self._positions.pop(name, None)

    def is_told(self, loader: object) -> bool:
        """Return whether the position of a loader belongs to some item: itself, a part of it, or a cursor."""
        parts = [getattr(loader, name, None) for name in ("dataset", "sampler", "batch_sampler")]
        return self._is_item(loader, *parts) or (bool(self._positions) and not hasattr(loader, "dataset"))

    def is_watched(self, entry: object) -> bool:
        """Return whether an object keeps its own position and is committed here."""
        return any(position is entry for position in self._positions.values())

    def begin_at(self, progress: Progress, counts: Mapping[str, int]) -> None:
        """Stand on the boundary of a restored checkpoint, with the counts that it recorded."""
        self.progress = progress
        self.epoch_batches = counts.get("epoch_batches", 0)
        self.uses_end_epoch = self.uses_end_epoch or bool(counts.get("uses_end_epoch"))
        self.longest_window = self.untold = self.foreign_workers = 0
        self._ahead = {}
        self._foreign_in_epoch = counts.get("foreign_in_epoch", 0)
        self._last_is_out = self._last_keeps_itself = bool(counts.get("end_is_open"))
        self._is_resumed_at_end = progress.epoch_end_due
        self._microbatches = self._dropped = self._foreign_handed = self._foreign_ahead = 0
        self._monitor.reset()

    def counts(self) -> dict[str, int]:
        """Return what a checkpoint records besides progress, for `begin_at`."""
        return {
            "epoch_batches": self.epoch_batches,
            "uses_end_epoch": int(self.uses_end_epoch),
            "batches_ahead": self.ahead,
            "foreign_in_epoch": self._foreign_in_epoch,
            "end_is_open": int(self.end_is_open),
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
    def ahead(self) -> int:
        """Return the number of batches of foreign loaders that are handed out and belong to no finished update."""
        return self._foreign_ahead

    def open_because(self) -> str:
        """Return why we do not stand on a boundary; empty when we do."""
        if self._microbatches:
            return f"{self._microbatches} microbatches since the last update"
        for name, position in self._positions.items():
            if isinstance(position, ResumableSampler):
                continue
            if position.uncommitted > self._ahead.get(name, 0) + self._dropped:
                return f"a batch of {name!r} was handed out since the last update"
        if self._foreign_handed > self._foreign_ahead + self._dropped:
            return "a batch was handed out since the last update"
        return ""

    def check_not_moved(self) -> None:
        """Raise `RequestError` when an optimizer has stepped since the last boundary."""
        moved = {name: count for name, count in self._monitor.counts().items() if count}
        if moved:
            raise RequestError(
                "an optimizer has stepped since the last boundary, so the state is of no boundary",
                where=", ".join(moved),
                expected=f"the state after update {self.progress.step}",
                found=", ".join(f"{count} more steps of {name!r}" for name, count in moved.items()),
                remedy="Call after_update() after each optimizer step and before saving.",
            )

    def add_microbatch(self) -> None:
        """Count one forward and backward within the window."""
        self._microbatches += 1

    def hand_out(self, loader: object) -> None:
        """Count one batch of a loader that keeps no count itself, and whether its position is saved at all."""
        if self.progress.epoch_end_due:
            # Its length said that the batch before was the last one.
            self.progress = replace(self.progress, epoch_end_due=False)
        self._foreign_handed += 1
        self._foreign_in_epoch += 1
        self._last_is_out = self._foreign_in_epoch == _length(loader)
        self._last_keeps_itself = self._is_item(loader, getattr(loader, "dataset", None))
        self.untold += not self.is_told(loader)
        self.foreign_workers = max(self.foreign_workers, getattr(loader, "num_workers", 0))

    def drop_batch(self) -> None:
        """Count a batch that was handed out and not used."""
        self._dropped += 1

    def close(self, *, samples: int | None, tokens: int, batches: int | None) -> None:
        """Close the window: one update is complete, and we stand on its boundary.

        Args:
            samples: What this rank consumed; None takes the loader's own count.
            batches: How many batches belong to the update; None for all that were handed out.
        """
        for name, number in (("samples", samples), ("tokens", tokens), ("batches", batches)):
            if number is not None and (type(number) is not int or number < 0):
                raise RequestError("an update counts whole things", where=name, found=repr(number))
        if self.progress.epoch_end_due:
            self.end_epoch()
        window = self._window(batches)
        held = self._samples_held() if samples is None else 0
        for name, position in self._positions.items():
            self._commit(position, batches, window)
            self._ahead[name] = position.uncommitted
        if samples is None:
            samples = held - self._samples_held()
        counted = self._foreign_handed if batches is None else min(batches + self._dropped, self._foreign_handed)
        self._foreign_handed = self._foreign_ahead = self._foreign_handed - counted
        steps = self._monitor.counts()
        was_skipped = bool(steps) and not any(steps.values())
        self.longest_window = max(self.longest_window, window)
        self.epoch_batches += window
        self.progress = replace(
            self.progress,
            step=self.progress.step + 1,
            microbatches=self.progress.microbatches + window,
            samples=self.progress.samples + samples,
            tokens=self.progress.tokens + tokens,
            skipped=self.progress.skipped + was_skipped,
            epoch_end_due=self._is_epoch_finished(),
        )
        self._is_resumed_at_end = False
        self._microbatches = self._dropped = 0
        self._monitor.reset()

    def mark_epoch_end(self) -> None:
        """Note that a loader without a count of its own has come to its end."""
        self.progress = replace(self.progress, epoch_end_due=True)
        self._last_is_out = False

    def begin_pass(self) -> bool:
        """Begin a pass over a loader and return whether it has batches left.

        Directly after a restore at an epoch's end it has none, so that what follows the epoch is done. Otherwise an
        epoch that was not closed is over.
        """
        if not self.progress.epoch_end_due:
            return True
        has_to_end, is_resumed_at_end = self.end_is_open, self._is_resumed_at_end
        self._is_resumed_at_end = False
        if not is_resumed_at_end:
            self.end_epoch()
        return has_to_end or not is_resumed_at_end

    def end_epoch(self) -> None:
        """Close the epoch."""
        self.progress = replace(self.progress, epoch=self.progress.epoch + 1, epoch_end_due=False)
        self.epoch_batches = self.untold = self.foreign_workers = self._foreign_in_epoch = 0
        self._last_is_out = False

    def last_ids(self) -> dict[str, list[int]]:
        """Return the sample indices handed out since the last boundary, for each loader that knows them."""
        loaders = {name: position for name, position in self._positions.items() if hasattr(position, "last_ids")}
        return {name: cast(_Loader, loader).last_ids() for name, loader in loaders.items()}

    def _window(self, batches: int | None) -> int:
        if self._microbatches:
            return self._microbatches
        if batches is not None:
            return batches
        handed = [position.uncommitted for position in self._loaders]
        return max([1, self._foreign_handed - self._dropped, *(count - self._dropped for count in handed)])

    def _commit(self, position: Position, batches: int | None, window: int) -> None:
        if isinstance(position, ResumableSampler):
            # A sampler does not see which of its batches the loop has received: each microbatch is one.
            position.commit(min(window + self._dropped, position.uncommitted))
        elif batches is None or not hasattr(position, "last_ids"):
            position.commit(None)
        else:
            position.commit(min(batches + self._dropped, position.uncommitted))

    def _is_item(self, *parts: object) -> bool:
        return any(entry is part for entry in self._entries for part in parts)

    def _is_epoch_finished(self) -> bool:
        is_foreign_finished = self._last_is_out and not self._foreign_ahead
        return is_foreign_finished or any(_epochs_finished(one) > self.progress.epoch for one in self._loaders)

    def _samples_held(self) -> int:
        return sum(len(loader.last_ids()) for loader in self._loaders)


class _Loader(Position, Protocol):
    """A position in a data set, which knows its epoch and the samples it handed out."""

    @property
    def epoch(self) -> int: ...

    @property
    def position(self) -> int: ...

    def last_ids(self) -> list[int]: ...


def _length(loader: object) -> int | None:
    try:
        return len(loader)  # type: ignore[arg-type]  # what has no length says so
    except (TypeError, NotImplementedError):
        return None


def _epochs_finished(loader: _Loader) -> int:
    """Return how many epochs a loader's committed batches complete; it may have handed out some of the next one."""
    return loader.epoch - (loader.uncommitted > loader.position)
