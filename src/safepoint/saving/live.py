"""Live memory: where the boxes of a file come from, asked and read many at once.

A call for each box takes longer than to copy a small one.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy

from safepoint.errors import InternalError, TornSnapshotError
from safepoint.saving.form import FileForm
from safepoint.saving.spans import Integers, Spans
from safepoint.saving.transfer import address_of, move_all, read_all
from safepoint.state.item import Held, Source, addresses_of, are_unwritten, hold

SAMPLE_BYTES = 64


class Live:
    """Read boxes from live memory; they are numbered in the order of the file.

    `held` is what `hold` found of each that it was asked for; `torn` are those that were seen to be.

    Args:
        form: What the file looks like.
        sources: Where its boxes come from, in the order in which the form was given them.
    """

    __slots__ = ("_entries", "_spans", "held", "sources", "torn")

    def __init__(self, form: FileForm, sources: Sequence[Source]) -> None:
        self._entries, self._spans = form.entries, form.spans
        self.sources: Sequence[Source] = [sources[number] for number in form.spans.numbers]
        self.held: dict[int, Held] = {}
        self.torn: list[int] = []

    def where(self, number: int) -> str:
        """Return what a box is called in messages."""
        box = self._entries[number].box
        return f"{box.item}/{box.name}"

    def hold(self, numbers: Integers) -> None:
        """Keep the memory of boxes, of those that lie in host memory as they are stored."""
        listed = numbers.tolist()
        found = hold([self.sources[number] for number in listed], self._spans.sizes[numbers].tolist())
        self.held.update((number, held) for number, held in zip(listed, found, strict=True) if held is not None)

    def let_go(self) -> None:
        """Keep nothing: no box will be asked for any more."""
        self.sources, self.held = [], {}

    def bring(self, numbers: Integers, view: memoryview, begin: int) -> None:
        """Copy boxes each to its place; those that are held come from where they were then.

        Args:
            numbers: Which ones; all of them are held, or none is.
            view: Memory of a part of the file, writable.
            begin: Where that part begins in the file.

        Raises:
            TornSnapshotError: The memory of one was given back.
        """
        begins, sizes = self._spans.begins[numbers] - begin, self._spans.sizes[numbers]
        if begins.min() < 0 or (begins + sizes).max() > len(view):
            raise InternalError("boxes reach beyond the memory that they shall be copied to", found=len(view))
        addresses = numpy.array(self._addresses(numbers), numpy.int64)
        targets, is_there = address_of(view) + begins, (addresses != 0) & (sizes > 0)
        if is_there.all():
            move_all(targets, addresses, sizes)
            return
        move_all(targets[is_there], addresses[is_there], sizes[is_there])
        for place in numpy.flatnonzero(~is_there & (sizes > 0)).tolist():
            start = int(begins[place])
            self.sources[int(numbers[place])].copy_into(view[start : start + int(sizes[place])])

    def check_held(self, numbers: Sequence[int]) -> None:
        """Raise `TornSnapshotError` if the memory of a box that is held was given back."""
        if not all([self.held[number].is_there for number in numbers]):
            self._look(numbers, lambda number: self.held[number].check(self.where(number)))

    def check(self, numbers: Sequence[int]) -> None:
        """Raise `TornSnapshotError` if a box is known to have been written to since the boundary."""
        if not are_unwritten([self.sources[number] for number in numbers]):
            self._look(numbers, lambda number: self.sources[number].check())

    def _addresses(self, numbers: Integers) -> list[int]:
        listed = numbers.tolist()
        if listed[0] not in self.held:
            return addresses_of([self.sources[number] for number in listed], self._spans.sizes[numbers].tolist())
        self.check_held(listed)
        return [self.held[number].address for number in listed]

    def _look(self, numbers: Sequence[int], look: Callable[[int], None]) -> None:
        for number in numbers:
            try:
                look(number)
            except TornSnapshotError:
                self.torn.append(number)
                raise


class Samples:
    """Remember some bytes of boxes, of each stretch of a size some.

    Args:
        spans: Where the boxes lie in the file.
        numbers: The boxes; each is larger than a sample.
        addresses: Where each is in live memory.
        stretch_bytes: The size of a stretch.
        shift: Where in a stretch they are taken from, below its size.
    """

    __slots__ = ("_ends", "_places", "_seen")

    def __init__(
        self, spans: Spans, numbers: Integers, addresses: Sequence[int], *, stretch_bytes: int, shift: int
    ) -> None:
        sizes = spans.sizes[numbers]
        counts = -(-sizes // stretch_bytes)
        self._ends = numpy.cumsum(counts)
        stretches = numpy.arange(counts.sum()) - numpy.repeat(self._ends - counts, counts)
        lasts = numpy.repeat(sizes - SAMPLE_BYTES, counts)
        within = numpy.minimum(stretches * stretch_bytes + shift, lasts)
        # A box of one stretch is sampled elsewhere each time as well, and not at its end most often.
        within = numpy.where(numpy.repeat(counts == 1, counts), shift % (lasts + 1), within)
        self._places = numpy.repeat(spans.begins[numbers], counts) + within
        self._seen = read_all(numpy.repeat(numpy.array(addresses, numpy.int64), counts) + within, SAMPLE_BYTES)

    def are_same(self, first: int, stop: int, base: int) -> bool:
        """Return whether a range of the boxes has these bytes in the image of the file that begins at an address."""
        begin, end = int(self._ends[first - 1]) if first else 0, int(self._ends[stop - 1])
        found = read_all(base + self._places[begin:end], SAMPLE_BYTES)
        return found == self._seen[begin * SAMPLE_BYTES : end * SAMPLE_BYTES]
