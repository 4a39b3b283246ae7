"""Spans: where the boxes of a data file lie in it, in columns."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy
import numpy.typing

Integers = numpy.typing.NDArray[numpy.int64]


class EntryLike(Protocol):
    """Be a box in a file."""

    @property
    def number(self) -> int: ...
    @property
    def offset_bytes(self) -> int: ...
    @property
    def size_bytes(self) -> int: ...


@dataclass(frozen=True, slots=True)
class Spans:
    """Hold of each box of a file, in its order, its place among those that the form was made of, begin and size."""

    numbers: list[int]
    begins: Integers
    sizes: Integers

    @classmethod
    def of(cls, entries: Sequence[EntryLike]) -> Spans:
        """Return the spans of the entries of a file."""
        begins = numpy.array([entry.offset_bytes for entry in entries], numpy.int64)
        sizes = numpy.array([entry.size_bytes for entry in entries], numpy.int64)
        return cls([entry.number for entry in entries], begins, sizes)

    def places_of(self, numbers: Sequence[int]) -> Integers:
        """Return the places in the file, in rising order, of boxes by their numbers in what the form was made of."""
        places: Integers = numpy.empty(len(self.numbers), numpy.int64)
        places[self.numbers] = numpy.arange(len(self.numbers))
        return numpy.sort(places[list(numbers)])

    def batches(self, chosen: Integers, size_bytes: int) -> Iterator[Integers]:
        """Yield some boxes in groups of less than twice a size; a box that has it is alone."""
        if not len(chosen):
            return
        sizes = self.sizes[chosen]
        labels = (numpy.cumsum(sizes) - 1) // size_bytes
        is_large = sizes >= size_bytes
        breaks = numpy.flatnonzero((numpy.diff(labels) != 0) | is_large[:-1] | is_large[1:]) + 1
        yield from numpy.split(chosen, breaks)
