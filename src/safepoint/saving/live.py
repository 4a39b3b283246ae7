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
from safepoint.state.far import Far
from safepoint.state.item import Held, Source, addresses_of, are_unwritten, hold

SAMPLE_BYTES = 64


class Live:
    """Read boxes from live memory; they are numbered in the order of the file.

    `held` is what `hold` found of each that it was asked for; `torn` are those that were seen to be.

    Args:
        form: What the file looks like.
        sources: Where its boxes come from, in the order in which the form was given them.
        far: Which of them lie on accelerators, for `bring` to have them carried.
    """

    __slots__ = ("_carrier", "_entries", "_spans", "far", "held", "sources", "torn")

    def __init__(self, form: FileForm, sources: Sequence[Source], far: Far | None = None) -> None:
        self._entries, self._spans = form.entries, form.spans
        self._carrier = far.carrier if far is not None else None
        self.far = frozenset(form.spans.places_of(far.numbers).tolist() if far is not None else ())
        self.sources: Sequence[Source] = list(map(sources.__getitem__, form.spans.numbers))
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
        left = numpy.flatnonzero(~is_there & (sizes > 0)).tolist()
        if self._carrier is not None:
            carried = [place for place in left if int(numbers[place]) in self.far]
            left = [place for place in left if int(numbers[place]) not in self.far]
            sources = [self.sources[int(numbers[place])] for place in carried]
            self._carrier.fetch(sources, view, begins[carried].tolist()).wait()
        for place in left:
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

    `within` tells where in its box each begins, and `ends` how many there are up to the end of each box. `seen` is what
    they were at the boundary.

    Args:
        spans: Where the boxes lie in the file.
        numbers: The boxes; each is larger than a sample.
        stretch_bytes: The size of a stretch.
        shift: Where in a stretch they are taken from, below its size.
    """

    __slots__ = ("_places", "ends", "seen", "within")

    def __init__(self, spans: Spans, numbers: Integers, *, stretch_bytes: int, shift: int) -> None:
        sizes = spans.sizes[numbers]
        counts = -(-sizes // stretch_bytes)
        self.ends = numpy.cumsum(counts)
        stretches = numpy.arange(counts.sum()) - numpy.repeat(self.ends - counts, counts)
        lasts = numpy.repeat(sizes - SAMPLE_BYTES, counts)
        within = numpy.minimum(stretches * stretch_bytes + shift, lasts)
        # A box of one stretch is sampled elsewhere each time as well, and not at its end most often.
        self.within = numpy.where(numpy.repeat(counts == 1, counts), shift % (lasts + 1), within)
        self._places = numpy.repeat(spans.begins[numbers], counts) + self.within
        self.seen: bytes | bytearray = b""

    def take(self, addresses: Sequence[int]) -> None:
        """Read them from host memory, where each box begins at an address."""
        counts = numpy.diff(self.ends, prepend=0)
        self.seen = read_all(numpy.repeat(numpy.array(addresses, numpy.int64), counts) + self.within, SAMPLE_BYTES)

    def are_same(self, first: int, stop: int, base: int) -> bool:
        """Return whether a range of the boxes has these bytes in the image of the file that begins at an address."""
        begin, end = (int(self.ends[place - 1]) if place else 0 for place in (first, stop))
        found = read_all(base + self._places[begin:end], SAMPLE_BYTES)
        return found == self.seen[begin * SAMPLE_BYTES : end * SAMPLE_BYTES]

    def check(self, first: int, stop: int, base: int, live: Live, numbers: Integers) -> None:
        """Raise `TornSnapshotError` if one of a range of the boxes has other bytes in the image; these are they."""
        if self.are_same(first, stop, base):
            return
        torn = next(place for place in range(first, stop) if not self.are_same(place, place + 1, base))
        live.torn.append(int(numbers[torn - first]))
        raise TornSnapshotError(
            "a tensor was changed between its boundary and the next step, while it was being copied",
            where=live.where(live.torn[-1]),
            expected="that only a step of its optimizer changes it",
            found="other bytes than at the boundary",
            remedy="Nothing was published. Change the state before after_update(), or call wait() first; or make "
            "the manager with copy_behind=False.",
        )
