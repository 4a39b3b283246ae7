"""Pieces: where what a rank writes comes from, and the sums by which replicas are compared."""

from __future__ import annotations

import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from operator import attrgetter

import msgspec

from safepoint.errors import InternalError
from safepoint.format.digest import digest_bytes
from safepoint.format.dtypes import DTYPES
from safepoint.saving.layout import Layout
from safepoint.saving.parts import RankPart
from safepoint.state.item import CapturedTensor, Divisible, Source, Summable

_WORD_BYTES = 8
_SOURCE: Callable[[CapturedTensor], Source] = attrgetter("source")
_CODES = {1: "b", 2: "h", 4: "i", 8: "q"}


@dataclass(frozen=True, slots=True)
class ReplicaSums:
    """Hold the checksums of the boxes of one replica set, by ``<item>/<name>`` and offset."""

    number: int
    is_leaders: bool
    sums: dict[str, int]

    @property
    def digest(self) -> str:
        """Return the digest of all sums."""
        return digest_bytes(msgspec.json.encode(list(self.sums.items())))


def sources_of(layout: Layout, tensors: Sequence[CapturedTensor], part: RankPart) -> list[Source]:
    """Return the live memory of the boxes that a rank writes, in the order of its part."""
    sources = list(map(_SOURCE, map(tensors.__getitem__, part.boxes)))
    for place, cut in part.cuts.items():
        source, row_bytes = sources[place], layout.boxes[cut.box].row_bytes
        sources[place] = (
            source.rows(cut.start, cut.stop)
            if isinstance(source, Divisible)
            else _Part(source, cut.start * row_bytes, cut.stop * row_bytes)
        )
    return sources


def sum_replicas(layout: Layout, tensors: Sequence[CapturedTensor], part: RankPart) -> tuple[ReplicaSums, ...]:
    """Return the checksums of the boxes that other ranks hold as well, read from live memory."""
    found = []
    for replicas in part.replicas:
        sums = {}
        for number in replicas.boxes:
            box = layout.boxes[number]
            sums[f"{box.item}/{box.name} at {list(box.offset)}"] = checksum(tensors[number])
        found.append(ReplicaSums(replicas.number, replicas.is_leaders, sums))
    return tuple(found)


def checksum(tensor: CapturedTensor) -> int:
    """Return the sum of a box's elements as `Summable` defines it."""
    source = tensor.source
    if isinstance(source, Summable):
        return source.checksum()
    data = bytearray(source.nbytes)
    source.copy_into(memoryview(data))
    words = array.array(_CODES[min(DTYPES[tensor.spec.dtype].size_bytes, _WORD_BYTES)])
    words.frombytes(data)
    return sum(words) % (1 << (8 * _WORD_BYTES))


@dataclass(frozen=True, slots=True)
class _Part:
    """Give a range of the bytes of a source that can only be read whole."""

    source: Source
    begin: int
    end: int

    @property
    def nbytes(self) -> int:
        return self.end - self.begin

    def copy_into(self, buffer: memoryview) -> None:
        if len(buffer) != self.nbytes:
            raise InternalError("a buffer does not fit a part's bytes", expected=self.nbytes, found=len(buffer))
        whole = memoryview(bytearray(self.source.nbytes))
        self.source.copy_into(whole)
        buffer[:] = whole[self.begin : self.end]

    def in_place(self) -> memoryview | None:
        memory = self.source.in_place()
        return None if memory is None else memory[self.begin : self.end]

    def check(self) -> None:
        self.source.check()
