"""The ring: a few aligned pieces of memory, through which a file is written straight from live memory.

Spec: F3.
"""

from __future__ import annotations

import mmap
import threading
from bisect import bisect_right
from collections.abc import Iterator, Sequence

import numpy

from safepoint.errors import InternalError, TornSnapshotError
from safepoint.saving.form import Entry, FileForm
from safepoint.saving.landing import Landing
from safepoint.saving.live import Live
from safepoint.saving.transfer import transfer
from safepoint.state.far import Far
from safepoint.state.item import Divisible, Source
from safepoint.storage.aligned import aligned_memory

_PIECE_BYTES = 8 << 20
_PIECE_COUNT = 4
SMALLEST_BYTES = _PIECE_COUNT * _PIECE_BYTES


class Ring:
    """Keep the pieces, which are made when they are first needed; owned by one save at a time.

    Args:
        piece_bytes: The size of each, a multiple of a page.
        size_bytes: What they may take together; as little as is of use if absent.
    """

    def __init__(self, *, piece_bytes: int = _PIECE_BYTES, size_bytes: int = 0) -> None:
        self.piece_bytes = piece_bytes
        self.count = max(_PIECE_COUNT, size_bytes // piece_bytes)
        self.landing = Landing()
        self._memory: mmap.mmap | None = None

    def piece(self, begin: int, end: int) -> memoryview:
        """Return the memory of a range of a file, which is within one piece; what is all pieces before it is void."""
        if self._memory is None:
            self._memory = aligned_memory(self.count * self.piece_bytes)
        place = begin % len(self._memory)
        return memoryview(self._memory)[place : place + end - begin]


class LiveOrigin:
    """Read a data file from live memory, each byte once.

    Args:
        form: What the file looks like.
        sources: Where its boxes come from, in the order in which the form was given them.
        ring: Where its bytes are brought together.
        far: Which of them lie on accelerators, if any.
    """

    def __init__(self, form: FileForm, sources: Sequence[Source], ring: Ring, *, far: Far | None = None) -> None:
        self._ring, self._far = ring, far
        self._is_read = threading.Event()
        self._is_given_up = False
        self._form, self._live = form, Live(form, sources, far)
        self._begins: list[int] = form.spans.begins.tolist()
        self._ends: list[int] = (form.spans.begins + form.spans.sizes).tolist()
        # The box that is read, and of its bytes those that come next and after them.
        self._number = -1
        self._part = memoryview(form.header)
        self._parts: Iterator[memoryview] = iter(())

    @property
    def piece_bytes(self) -> int:
        """Return the size of a piece of the ring."""
        return self._ring.piece_bytes

    @property
    def depth(self) -> int:
        """Return all pieces but the one that is filled."""
        return self._ring.count - 1

    def piece(self, begin: int, end: int) -> memoryview:
        """Return the next piece of the ring."""
        return self._ring.piece(begin, end)

    def fill(self, view: memoryview) -> None:
        """Copy the next bytes; boxes that lie wholly in the view are copied many at once, with the interpreter held.

        Raises:
            TornSnapshotError: A tensor that was read to its end here was written to since the boundary.
        """
        at = self._go_on(view)
        while not self._part and self._number < len(self._form.entries):
            stop = self._fitting(len(view) - at)
            if stop > self._number:
                at += self._bring(stop, view[at:])
            elif at == len(view):
                break
            else:
                self._parts = self._begun()
                self._part = next(self._parts)
                at += self._go_on(view[at:])
        if self._is_given_up:
            raise TornSnapshotError(
                "the training went on before its state was read: it was interrupted twice",
                remedy="Nothing was published; older checkpoints are untouched.",
            )
        if self._number == len(self._form.entries):
            self._is_read.set()

    def leave_boundary(self) -> None:
        """Wait until all was read, and raise an interrupt after that; a second one at once, with the save given up."""
        self._wait()

    def settle(self) -> None:
        """Wait until all was read; an interrupt is raised as `leave_boundary` raises it."""
        self._wait()

    def end(self) -> None:
        """Let go of whoever waits."""
        self._is_read.set()
        if self._far is not None:
            # What was given up half way is still under way to memory that the next save uses.
            self._far.carrier.wait()

    def _begun(self) -> Iterator[memoryview]:
        """Return the parts of the box that comes next."""
        entry, source = self._form.entries[self._number], self._live.sources[self._number]
        if self._far is not None and self._number in self._live.far:
            return self._ring.landing.parts(entry, source, self._far.carrier)
        return _parts(entry, source)

    def _go_on(self, view: memoryview) -> int:
        """Copy what is left of a box that was begun, as much as there is room for; return how much that was."""
        at = 0
        while self._part and at < len(view):
            size = min(len(view) - at, len(self._part))
            transfer(view[at : at + size], self._part[:size])
            self._part = self._part[size:]
            at += size
            if not self._part:
                # A tensor that was read to its end is looked at before its last bytes are handed on.
                self._part = next(self._parts, memoryview(b""))
                self._number += not self._part
        return at

    def _fitting(self, room: int) -> int:
        """Return the end of the boxes that come next and have a place in so many bytes."""
        return bisect_right(self._ends, self._begins[self._number] + room, self._number)

    def _bring(self, stop: int, view: memoryview) -> int:
        """Copy whole boxes; return how much that was."""
        begin, numbers = self._begins[self._number], numpy.arange(self._number, stop)
        self._live.bring(numbers, view, begin)
        self._live.check(range(self._number, stop))
        self._number = stop
        return self._ends[stop - 1] - begin

    def _wait(self) -> None:
        interrupt: BaseException | None = None
        while not self._is_read.is_set():
            try:
                self._is_read.wait()
            except BaseException as exc:
                if interrupt is not None:
                    # The storage may hang, and somebody wants to leave.
                    self._is_given_up = True
                    raise
                # Raised below: who catches it may change the state.
                interrupt = exc
        if interrupt is not None:
            raise interrupt


def _parts(entry: Entry, source: Source) -> Iterator[memoryview]:
    """Yield the bytes of a box in parts; each is read before the next one is asked for."""
    memory = source.in_place()
    if memory is None:
        yield from _gathered(entry, source)
        return
    if memory.nbytes != entry.size_bytes:
        where = f"{entry.box.item}/{entry.box.name}"
        raise InternalError("a source has other bytes than its box", where=where, found=memory.nbytes)
    yield memory
    source.check()


def _gathered(entry: Entry, source: Source) -> Iterator[memoryview]:
    """Yield the bytes of a source that do not lie in host memory as they are stored: chunk by chunk, if possible."""
    if not isinstance(source, Divisible):
        whole = memoryview(bytearray(source.nbytes))
        source.copy_into(whole)
        yield whole
        return
    for chunk in entry.chunks:
        part = memoryview(bytearray(chunk.size_bytes))
        source.rows(*chunk.rows).copy_into(part)
        yield part
