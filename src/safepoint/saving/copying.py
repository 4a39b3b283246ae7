"""Copying: bring the state into its image, as much of it as can be while the training computes.

1. A part is copied by one thread. The thread that writes takes parts from the front, whoever must wait for the copy
   takes them from the back, and so the two meet.
2. What is copied behind the training is looked at twice: the tensor's count of writes, and a sample of its bytes that
   was taken at the boundary, are compared with what was copied. What differs is torn, and nothing is published.
3. What has not been seen to lie still from a boundary to the next step of an optimizer, every byte of it, is copied at
   the boundary.
4. After `leave_image` no thread uses the image, which the next save writes into.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

from safepoint.errors import TornSnapshotError
from safepoint.saving.form import Entry, FileForm
from safepoint.saving.transfer import address_of, is_same, move
from safepoint.state.item import Held, Source, holding

# What was just copied is digested while it is still in the processor's cache.
_PART_BYTES = 1 << 20
# Where somebody waits for it: two threads that come back to the interpreter more often hold each other up.
_MOST_PARTS = 16
_SAMPLE_BYTES = 64
# From here on a second thread copies faster than it takes to start it.
_LARGE_BYTES = 32 << 20

Key = tuple[str, str, tuple[int, ...]]


@dataclass(slots=True)
class Habits:
    """Remember of each box by item, name and offset whether it lay still from a boundary to the next step."""

    lies_still: dict[Key, bool] = field(default_factory=dict)


@dataclass(slots=True)
class _Region:
    """Follow the copy of one box; `left` counts the parts that are not copied."""

    entry: Entry
    size_bytes: int
    source: Source
    held: Held | None
    is_behind: bool
    left: int
    sample: bytes = b""

    @property
    def where(self) -> str:
        return f"{self.entry.box.item}/{self.entry.box.name}"


class Copying:
    """Copy the sources of a data file to their places in its image.

    Args:
        form: What the file looks like.
        sources: Where its boxes come from, in the order in which the form was given them.
        image: The memory of the whole file.
        owned: Which sources an optimizer owns that has stepped in the update just finished: nothing but its next step
            should change them.
        habits: What was seen before.
        turn: A number that differs from save to save; the sample is taken elsewhere each time.
    """

    def __init__(
        self,
        form: FileForm,
        sources: Sequence[Source],
        image: memoryview,
        *,
        owned: Sequence[bool],
        habits: Habits,
        turn: int = 0,
    ) -> None:
        self._image, self._habits = image, habits
        self._base = address_of(image)
        self._shift = turn * 4099 * _SAMPLE_BYTES % _PART_BYTES
        self._changed = threading.Condition()
        self._failure: BaseException | None = None
        self._has_ended = self._is_left = self._is_waited_for = False
        self._in_flight = 0
        self._told: list[Callable[[], object]] = []
        self._next = 0
        self._starts: list[int] = []
        self._of: list[_Region] = []
        self._left = {True: 0, False: 0}
        self._unknown: list[tuple[_Region, Held]] = []
        boundary_bytes = 0
        image[: len(form.header)] = form.header
        for entry in form.entries:
            size = entry.size_bytes
            if not self._region(entry, size, sources[entry.number], is_owned=owned[entry.number]):
                boundary_bytes += size
        self._is_taken = bytearray(len(self._starts))
        self._is_copied = bytearray(len(self._starts))
        self._is_large = boundary_bytes >= _LARGE_BYTES

    @property
    def is_complete(self) -> bool:
        """Return whether live memory is no longer needed."""
        return not any(self._left.values())

    @property
    def is_wanted(self) -> bool:
        """Return whether `settle` has something to do."""
        return not self.is_complete or bool(self._unknown)

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

    def _region(self, entry: Entry, size: int, source: Source, *, is_owned: bool) -> bool:
        """Take a box in, and return whether it is copied behind the training."""
        if not size:
            source.check()
            return False
        held, known = holding(source), self._habits.lies_still.get(_key(entry)) if is_owned else False
        is_behind = held is not None and bool(known)
        parts = range(0, size, _PART_BYTES) if held is not None else (0,)
        region = _Region(entry, size, source, held, is_behind, len(parts))
        if held is not None and is_behind:
            region.sample = self._sample(held.address, size)
        if held is not None and known is None:
            self._unknown.append((region, held))
        self._left[is_behind] += 1
        self._starts.extend(entry.offset_bytes + start for start in parts)
        self._of.extend([region] * len(parts))
        return is_behind

    def _sample(self, address: int, size: int) -> bytes:
        last = max(0, size - _SAMPLE_BYTES)
        if size <= _PART_BYTES:
            return ctypes.string_at(address + min(self._shift, last), min(_SAMPLE_BYTES, size))
        starts = range(self._shift, size + self._shift, _PART_BYTES)
        return b"".join(ctypes.string_at(address + min(start, last), _SAMPLE_BYTES) for start in starts)

    def _help(self, *, is_behind: bool) -> None:
        """Copy parts from the back; of what is behind the training all, else only what must not wait."""
        regions = self._of
        for index in reversed(range(len(regions))):
            if self._has_ended:
                return
            if not self._is_taken[index] and (is_behind or not regions[index].is_behind):
                self._copy(index, most=_MOST_PARTS)

    def _copy(self, index: int, *, most: int = 1) -> None:
        """Copy a part, unless it is somebody's already, and with it so many in all of those before it in its box."""
        failure: BaseException | None = None
        is_ours = is_last = False
        try:
            with self._changed:
                if self._has_ended or self._is_taken[index]:
                    return
                region = self._of[index]
                first = index
                while index - first + 1 < most and self._is_free(first - 1, region):
                    first -= 1
                count = index - first + 1
                self._is_taken[first : index + 1] = b"\1" * count
                self._in_flight += 1
                is_ours = True
            self._bring(region, self._starts[first], count)
            with self._changed:
                region.left -= count
                is_last = not region.left
            if is_last:
                self._check(region)
        except BaseException as exc:
            failure, is_last = exc, False
            if isinstance(exc, TornSnapshotError):
                # The next save copies it at the boundary.
                self._habits.lies_still[_key(region.entry)] = False
            if not isinstance(exc, Exception):
                # An interrupt is that of the thread that it came to, besides.
                raise
        finally:
            if is_ours:
                self._note(first, count, region, is_last=is_last, failure=failure)

    def _is_free(self, index: int, region: _Region) -> bool:
        return index >= 0 and self._of[index] is region and not self._is_taken[index]

    def _note(self, first: int, count: int, region: _Region, *, is_last: bool, failure: BaseException | None) -> None:
        told: list[Callable[[], object]] = []
        with self._changed:
            self._in_flight -= 1
            self._is_copied[first : first + count] = b"\1" * count
            self._left[region.is_behind] -= is_last
            if failure is not None:
                self._failure, self._has_ended = self._failure or failure, True
            if self.is_complete:
                told, self._told = self._told, []
                # What is held is let go: all parts are taken, so nobody asks for it.
                self._of = []
            self._changed.notify_all()
        for tell in told:
            tell()

    def _bring(self, region: _Region, begin: int, count: int) -> None:
        """Copy so many parts of a box, from where the first of them begins."""
        box_begin = region.entry.offset_bytes
        box_end = box_begin + region.size_bytes
        if region.held is None:
            region.source.copy_into(self._image[box_begin:box_end])
            return
        size = min(count * _PART_BYTES, box_end - begin)
        region.held.check(region.where)
        move(self._base + begin, region.held.address + begin - box_begin, size)

    def _check(self, region: _Region) -> None:
        """Raise `TornSnapshotError` if a box that was copied is known to have been changed before."""
        region.source.check()
        self._compare_sample(region)

    def _compare_sample(self, region: _Region) -> None:
        there = self._base + region.entry.offset_bytes
        if region.sample and self._sample(there, region.size_bytes) != region.sample:
            raise TornSnapshotError(
                "a tensor was changed between its boundary and the next step, while it was being copied",
                where=region.where,
                expected="that only a step of its optimizer changes it",
                found="other bytes than at the boundary",
                remedy="Nothing was published. Change the state before after_update(), or call wait() first; or make "
                "the manager with copy_behind=False.",
            )

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

    def _compare(self, left: Iterator[tuple[_Region, Held]]) -> None:
        is_ours = False
        try:
            with self._changed:
                if self._is_left:
                    return
                self._in_flight += 1
                is_ours = True
            for region, held in left:
                if self._is_left:
                    return
                self._habits.lies_still[_key(region.entry)] = self._lay_still(region, held)
        finally:
            with self._changed:
                self._in_flight -= is_ours
                self._changed.notify_all()

    def _lay_still(self, region: _Region, held: Held) -> bool:
        with contextlib.suppress(TornSnapshotError):
            held.check(region.where)
            region.source.check()
            return is_same(self._base + region.entry.offset_bytes, held.address, region.size_bytes)
        return False

    def _wait_until(self, holds: Callable[[], object]) -> None:
        with self._changed:
            self._changed.wait_for(lambda: self._has_ended or holds())

    def _raise_failure(self) -> None:
        if self._failure is not None:
            raise self._failure


def _key(entry: Entry) -> Key:
    return (entry.box.item, entry.box.name, entry.box.offset)


def _started(work: Callable[[], object]) -> threading.Thread | None:
    thread = threading.Thread(target=work, name="safepoint-copy", daemon=True)
    try:
        thread.start()
    except RuntimeError:
        # At a limit of the system one thread does it all.
        return None
    return thread
