"""Copying: bring the state into its image, as much of it as can be while the training computes.

1. A part is copied by one thread. The thread that writes takes parts from the front, whoever must wait for the copy
   takes them from the back, and so the two meet.
2. What is copied behind the training is looked at twice: the tensor's count of writes, and a sample of its bytes that
   was taken at the boundary, are compared with what was copied. What differs is torn, and nothing is published.
3. What has not been seen to lie still from a boundary to the next step of an optimizer, every byte of it, is copied at
   the boundary; and so is what is small, which takes no longer than to follow it.
4. After `leave_image` no thread uses the image, which the next save writes into.
"""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from operator import itemgetter

import numpy

from safepoint.errors import TornSnapshotError
from safepoint.saving.form import Entry, FileForm
from safepoint.saving.live import SAMPLE_BYTES, Live, Samples
from safepoint.saving.spans import Integers
from safepoint.saving.transfer import address_of, is_same, move
from safepoint.state.item import Held, Owned, Source

# What was just copied is digested while it is still in the processor's cache.
_PART_BYTES = 1 << 20
# Where somebody waits for it: two threads that come back to the interpreter more often hold each other up.
_MOST_PARTS = 16
# Up to here a box is small.
_SMALL_BYTES = 4096
# From here on a second thread copies faster than it takes to start it.
_LARGE_BYTES = 32 << 20

Key = tuple[str, str, tuple[int, ...]]


@dataclass(slots=True)
class Habits:
    """Remember of each box by item, name and offset whether it lay still from a boundary to the next step."""

    lies_still: dict[Key, bool] = field(default_factory=dict)

    def known(self, entries: Sequence[Entry], held: Iterable[Held], owned: Owned) -> list[bool | None]:
        """Return which boxes are to be copied behind the training; None of those that have to be looked at first."""
        named = (
            (entry.box.item, entry.box.name, one.address, entry.size_bytes)
            for entry, one in zip(entries, held, strict=True)
        )
        return [
            self.lies_still.get(key_of(entry)) if is_owned else False
            for entry, is_owned in zip(entries, owned.among(named), strict=True)
        ]


@dataclass(slots=True)
class _Batch:
    """Follow the copy of boxes that are looked at together: several that are not large, or one.

    `left` counts the parts that are not copied. Of what is copied behind the training, `first` is the place of the
    first box among all that is.
    """

    numbers: Integers
    is_behind: bool
    left: int = 1
    first: int = 0


@dataclass(frozen=True, slots=True)
class _Unknown:
    """Keep a box of which is not known whether it lies still."""

    number: int
    held: Held
    source: Source


class Copying:
    """Copy the sources of a data file to their places in its image.

    Args:
        form: What the file looks like.
        sources: Where its boxes come from, in the order in which the form was given them.
        image: The memory of the whole file.
        owned: What belongs to optimizers that have stepped in the update just finished: nothing but their next step
            should change it.
        habits: What was seen before.
        turn: A number that differs from save to save; the sample is taken elsewhere each time.
        elsewhere: Boxes, in the order of the file, that somebody else copies.
    """

    def __init__(
        self,
        form: FileForm,
        sources: Sequence[Source],
        image: memoryview,
        *,
        owned: Owned,
        habits: Habits,
        turn: int = 0,
        elsewhere: Sequence[int] = (),
    ) -> None:
        self._image, self._habits = image, habits
        self._base = address_of(image)
        self._entries, self._spans, self._live = form.entries, form.spans, Live(form, sources)
        self._changed = threading.Condition()
        self._failure: BaseException | None = None
        self._has_ended = self._is_left = self._is_waited_for = False
        self._in_flight = 0
        self._told: list[Callable[[], object]] = []
        self._next = 0
        self._unknown: list[_Unknown] = []
        self._left = {True: 0, False: 0}
        image[: len(form.header)] = form.header
        behind, others = self._divide(owned, numpy.array(elsewhere, numpy.int64))
        addresses = [self._live.held[number].address for number in behind.tolist()]
        self._samples = Samples(form.spans, behind, stretch_bytes=_PART_BYTES, shift=shift_at(turn))
        self._samples.take(addresses)
        parts = [part for numbers in others for part in self._cut(numbers, is_behind=False)]
        parts += self._cut(behind, is_behind=True)
        parts.sort(key=itemgetter(0))
        self._starts, self._of = [start for start, _ in parts], [batch for _, batch in parts]
        self._is_taken = bytearray(len(parts))
        self._is_copied = bytearray(len(parts))
        self._is_large = sum(int(form.spans.sizes[numbers].sum()) for numbers in others) >= _LARGE_BYTES

    @property
    def is_complete(self) -> bool:
        """Return whether live memory is no longer needed."""
        return not any(self._left.values())

    @property
    def is_wanted(self) -> bool:
        """Return whether `settle` has something to do."""
        return bool(self._unknown) or not (self.is_complete or self._has_ended)

    def when_complete(self, tell: Callable[[], object]) -> None:
        """Call `tell` once the image is complete, from whichever thread completes it; at once if it is."""
        with self._changed:
            if not self.is_complete:
                self._told.append(tell)
                return
        tell()

    def leave_boundary(self) -> None:
        """Copy what must not wait; the rest stays for `advance` and `settle`.

        Raises:
            TornSnapshotError: A tensor was written to since the boundary.
        """
        work = functools.partial(self._help, is_behind=False)
        try:
            helper = _started(work) if self._is_large else None
            work()
            if helper is not None:
                helper.join()
            self._wait_until(lambda: not self._left[False])
        except BaseException:
            # Nobody follows this copy, and the next save has the image.
            self.leave_image()
            raise
        self._raise_failure()

    def advance(self, end: int) -> None:
        """Have the image complete up to here.

        Raises:
            TornSnapshotError: The state changed while it was copied.
        """
        if self._is_waited_for:
            # Digests and writes can wait, the training does.
            self._help(is_behind=True)
        while self._next < len(self._starts) and self._starts[self._next] < end:
            index = self._next
            self._copy(index)
            if not self._is_copied[index]:
                self._wait_until(functools.partial(self._is_copied.__getitem__, index))
            self._raise_failure()
            self._next += 1
        if self._next == len(self._starts):
            # A box is looked at when its last part was copied, which may be in another thread.
            self._wait_until(lambda: self.is_complete)
            self._raise_failure()

    def settle(self) -> None:
        """Return when live memory may change: help to copy what is left, and learn what lay still since the boundary.

        A failure is that of the save, and is raised where the file is written.
        """
        self._is_waited_for = True
        self._help(is_behind=True)
        self._wait_until(lambda: self.is_complete)
        self._learn()

    def end(self) -> None:
        """Copy no more, and let go of whoever waits; also where the image is not complete."""
        with self._changed:
            self._has_ended = True
            self._changed.notify_all()

    def leave_image(self) -> None:
        """Let go of the image: when this returns, no thread reads it or writes into it any more."""
        self.end()
        with self._changed:
            self._unknown, self._is_left = [], True
            self._changed.wait_for(lambda: not self._in_flight)

    def _divide(self, owned: Owned, elsewhere: Integers) -> tuple[Integers, list[Integers]]:
        """Return the boxes that are copied behind the training, and the others by what is done with them alike."""
        live, sizes = self._live, self._spans.sizes
        is_ours = numpy.ones(len(sizes), numpy.bool_)
        is_ours[elsewhere] = False
        is_small = sizes <= _SMALL_BYTES
        larges = numpy.flatnonzero(~is_small & is_ours)
        live.hold(larges)
        held = list(live.held)
        known = self._habits.known([self._entries[number] for number in held], live.held.values(), owned)
        self._unknown = [
            _Unknown(number, live.held[number], live.sources[number])
            for number, is_known in zip(held, known, strict=True)
            if is_known is None
        ]
        is_behind = numpy.array(known, numpy.bool_)
        kept = numpy.array(held, numpy.int64)
        gathered = numpy.setdiff1d(larges, kept, assume_unique=True)
        alone = [gathered[place : place + 1] for place in range(len(gathered))]
        return kept[is_behind], [numpy.flatnonzero(is_small & is_ours), kept[~is_behind], *alone]

    def _cut(self, numbers: Integers, *, is_behind: bool) -> Iterator[tuple[int, _Batch]]:
        """Yield the parts in which boxes are copied: where each begins, and the boxes that are looked at with it."""
        first = 0
        for chosen in self._spans.batches(numbers, _PART_BYTES):
            batch = _Batch(chosen, is_behind, first=first)
            first += len(chosen)
            begin, size = int(self._spans.begins[chosen[0]]), int(self._spans.sizes[chosen[0]])
            is_cut = len(chosen) == 1 and int(chosen[0]) in self._live.held
            starts = range(begin, begin + size, _PART_BYTES) if is_cut else (begin,)
            batch.left = len(starts)
            self._left[is_behind] += 1
            yield from ((start, batch) for start in starts)

    def _help(self, *, is_behind: bool) -> None:
        """Copy parts from the back; of what is behind the training all, else only what must not wait."""
        batches = self._of
        for index in reversed(range(len(batches))):
            if self._has_ended:
                return
            if not self._is_taken[index] and (is_behind or not batches[index].is_behind):
                self._copy(index, most=_MOST_PARTS)

    def _copy(self, index: int, *, most: int = 1) -> None:
        """Copy a part, unless it is somebody's already, and with it so many in all of those before it in its box."""
        failure: BaseException | None = None
        is_ours = is_last = False
        try:
            with self._changed:
                if self._has_ended or self._is_taken[index]:
                    return
                batch = self._of[index]
                first = index
                while index - first + 1 < most and self._is_free(first - 1, batch):
                    first -= 1
                count = index - first + 1
                self._is_taken[first : index + 1] = b"\1" * count
                self._in_flight += 1
                is_ours = True
            self._bring(batch, self._starts[first], count)
            with self._changed:
                batch.left -= count
                is_last = not batch.left
            if is_last:
                self._check(batch)
        except BaseException as exc:
            failure, is_last = exc, False
            if isinstance(exc, TornSnapshotError):
                # The next save copies it at the boundary.
                self._habits.lies_still.update((key_of(self._entries[number]), False) for number in self._live.torn)
            if not isinstance(exc, Exception):
                # An interrupt is that of the thread that it came to, besides.
                raise
        finally:
            if is_ours:
                self._note(first, count, batch, is_last=is_last, failure=failure)

    def _is_free(self, index: int, batch: _Batch) -> bool:
        return index >= 0 and self._of[index] is batch and not self._is_taken[index]

    def _note(self, first: int, count: int, batch: _Batch, *, is_last: bool, failure: BaseException | None) -> None:
        told: list[Callable[[], object]] = []
        with self._changed:
            self._in_flight -= 1
            self._is_copied[first : first + count] = b"\1" * count
            self._left[batch.is_behind] -= is_last
            if failure is not None:
                self._failure, self._has_ended = self._failure or failure, True
            if self.is_complete:
                told, self._told = self._told, []
                # What is held is let go: all parts are taken, so nobody asks for it.
                self._of = []
                self._live.let_go()
            self._changed.notify_all()
        for tell in told:
            tell()

    def _bring(self, batch: _Batch, begin: int, count: int) -> None:
        """Copy boxes, or so many parts of one, from where the first of them begins."""
        first = int(batch.numbers[0])
        if len(batch.numbers) == 1 and first in self._live.held:
            entry = self._entries[first]
            self._live.check_held([first])
            source = self._live.held[first].address + begin - entry.offset_bytes
            move(self._base + begin, source, min(count * _PART_BYTES, entry.offset_bytes + entry.size_bytes - begin))
            return
        self._live.bring(batch.numbers, self._image, 0)

    def _check(self, batch: _Batch) -> None:
        """Raise `TornSnapshotError` if a box that was copied is known to have been changed before."""
        self._live.check(batch.numbers.tolist())
        if batch.is_behind:
            stop = batch.first + len(batch.numbers)
            self._samples.check(batch.first, stop, self._base, self._live, batch.numbers)

    def _learn(self) -> None:
        """Compare, every byte, what was copied at the boundary with what is there before the next step."""
        with self._changed:
            unknown, self._unknown = self._unknown, []
            if not self.is_complete or not unknown:
                return
        work = functools.partial(self._compare, iter(unknown))
        helper = _started(work)
        work()
        if helper is not None:
            helper.join()

    def _compare(self, left: Iterator[_Unknown]) -> None:
        is_ours = False
        try:
            with self._changed:
                if self._is_left:
                    return
                self._in_flight += 1
                is_ours = True
            for one in left:
                if self._is_left:
                    return
                self._habits.lies_still[key_of(self._entries[one.number])] = self._lay_still(one)
        finally:
            with self._changed:
                self._in_flight -= is_ours
                self._changed.notify_all()

    def _lay_still(self, one: _Unknown) -> bool:
        entry = self._entries[one.number]
        with contextlib.suppress(TornSnapshotError):
            one.held.check(self._live.where(one.number))
            one.source.check()
            return is_same(self._base + entry.offset_bytes, one.held.address, entry.size_bytes)
        return False

    def _wait_until(self, holds: Callable[[], object]) -> None:
        with self._changed:
            self._changed.wait_for(lambda: self._has_ended or holds())

    def _raise_failure(self) -> None:
        if self._failure is not None:
            raise self._failure


def shift_at(turn: int) -> int:
    """Return where in a part of a box the sample is taken at one of the turns."""
    return turn * 4099 * SAMPLE_BYTES % _PART_BYTES


def key_of(entry: Entry) -> Key:
    """Return what the habits know a box by."""
    return (entry.box.item, entry.box.name, entry.box.offset)


def _started(work: Callable[[], object]) -> threading.Thread | None:
    thread = threading.Thread(target=work, name="safepoint-copy", daemon=True)
    try:
        thread.start()
    except RuntimeError:
        # At a limit of the system one thread does it all.
        return None
    return thread
