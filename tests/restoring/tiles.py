"""Tensors cut into boxes and chunks, written as data files, and targets that take boxes of them."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy

from safepoint.format.digest import digest_bytes
from safepoint.format.extent import Box
from safepoint.format.index import Chunk, Tensor
from safepoint.restoring.boxes import StoredBox
from safepoint.storage.memory import MemoryStorage

Array = numpy.ndarray  # type: ignore[type-arg]  # of any type


@dataclass
class BoxMemory:
    """Take one box; counts how often it was committed."""

    offset: tuple[int, ...]
    shape: tuple[int, ...]
    element_bytes: int
    data: bytearray = field(default_factory=bytearray)
    commits: int = 0

    def __post_init__(self) -> None:
        self.data = bytearray(b"\xee" * self.nbytes)

    @property
    def nbytes(self) -> int:
        return int(numpy.prod(self.shape, dtype=int)) * self.element_bytes

    def memory(self) -> memoryview:
        return memoryview(self.data)

    def commit(self) -> None:
        self.commits += 1


@dataclass
class Boxes:
    """Take a tensor as several boxes."""

    held: Sequence[BoxMemory]

    def boxes(self) -> Sequence[BoxMemory]:
        return self.held


class CountingStorage(MemoryStorage):
    """Count the bytes that are read, and keep the order of reads."""

    def __init__(self) -> None:
        super().__init__()
        self.reads: list[tuple[str, int, int]] = []

    def read_into(self, path: str, offset_bytes: int, buffer: memoryview) -> None:
        self.reads.append((path, offset_bytes, len(buffer)))
        super().read_into(path, offset_bytes, buffer)

    @property
    def bytes_read(self) -> int:
        return sum(size for _, _, size in self.reads)


def cut(shape: tuple[int, ...], pieces: int, chance: random.Random) -> list[Box]:
    """Return an exact tiling of a shape: boxes are cut in two, at random, until there are enough or all are small."""
    boxes = [Box((0,) * len(shape), shape)]
    for _ in range(pieces - 1):
        box = boxes.pop(chance.randrange(len(boxes)))
        axis = chance.randrange(len(shape))
        at = chance.randint(0, box.shape[axis])
        for start, length in ((0, at), (at, box.shape[axis] - at)):
            offset = (*box.offset[:axis], box.offset[axis] + start, *box.offset[axis + 1 :])
            boxes.append(Box(offset, (*box.shape[:axis], length, *box.shape[axis + 1 :])))
    chance.shuffle(boxes)
    return boxes


def store(
    storage: MemoryStorage,
    name: str,
    values: Array,
    boxes: Sequence[Box],
    *,
    dtype: str,
    rows: int,
    files: Sequence[str],
) -> tuple[StoredBox, ...]:
    """Write a tensor's boxes, one after another into new files in turn, cut into chunks of so many rows."""
    contents = {path: bytearray() for path in files}
    stored = []
    for number, box in enumerate(boxes):
        path = files[number % len(files)]
        data = part(values, box).tobytes()
        count = box.shape[0] if data else 0
        chunks = []
        for start in range(0, count, rows):
            stop = min(start + rows, count)
            row_bytes = len(data) // count
            piece = data[start * row_bytes : stop * row_bytes]
            chunks.append(Chunk((start, stop), 0, len(contents[path]), len(piece), digest_bytes(piece)))
            contents[path] += piece
        tensor = Tensor("model", name, dtype, values.shape, box.offset, box.shape, tuple(chunks))
        stored.append(StoredBox(tensor, (path,)))
    for path, content in contents.items():
        storage.put(path, bytes(content))
    return tuple(stored)


def part(values: Array, box: Box) -> Array:
    """Return a box of an array."""
    return numpy.ascontiguousarray(
        values[tuple(slice(start, start + length) for start, length in zip(box.offset, box.shape, strict=True))]
    )
