"""Find: which stored boxes ranks need of indexes that others have read.

Spec: C11.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import msgspec
import numpy

from safepoint.format.chunks import frame_of
from safepoint.format.columns import Columns, ColumnsReader, HeldTensor, Table, columns_from, encode_columns
from safepoint.format.extent import element_count
from safepoint.format.manifest import Manifest
from safepoint.restoring.examine import Share, share_of
from safepoint.restoring.overlaps import find_overlaps
from safepoint.restoring.plan import target_boxes
from safepoint.restoring.validate import SavedState, owned_items
from safepoint.restoring.whole import Whole
from safepoint.state.item import TensorTarget

Targets = Mapping[str, Mapping[str, TensorTarget]]


class Wanted(msgspec.Struct, frozen=True, array_like=True):
    """Name boxes that a rank fills, in columns; equal ones have equal digests."""

    digest: str
    columns: bytes


class Task(msgspec.Struct, frozen=True, array_like=True):
    """Ask a rank for boxes of an index that it has read, by their numbers, for those that want what `name` names."""

    name: str
    rank: int
    numbers: tuple[int, ...]


def wanted_by(saved: SavedState, targets: Targets) -> Columns:
    """Return the boxes with elements that targets take, of items that are not each rank's own."""
    held, offsets, shapes = list[HeldTensor](), list[int](), list[int]()
    for item, by_name in targets.items():
        if saved.manifest.items[item].kind == "per_rank":
            continue
        for name, target in by_name.items():
            spec = saved.items[item].specs[name]
            tensor = HeldTensor(item, name, spec.dtype, spec.global_shape)
            for one in target_boxes(target, spec.global_shape, f"{item}/{name}"):
                if element_count(one.box.shape):
                    held.append(tensor)
                    offsets.extend(one.box.offset)
                    shapes.extend(one.box.shape)
    return columns_from(frame_of(tuple(held), {}), numpy.array([offsets, shapes], numpy.int64))


def lacking(wanted: Columns, share: Share, per_rank: frozenset[str]) -> list[Wanted]:
    """Return the boxes that the indexes which a rank has read do not hold wholly, as its message; empty for none.

    Args:
        wanted: What the rank's targets take.
        share: What it has read.
        per_rank: Items of which each rank has its own, and of which nothing is wanted.
    """
    tensors, ends = wanted.frame.tensors, wanted.frame.ends
    held = numpy.zeros(len(tensors), numpy.int64)
    boxes = [Columns(one.boxes.frame, one.boxes.table, f"index {one.rank}") for one in share.indexes]
    for found in find_overlaps(boxes, [wanted], per_rank):
        numpy.add.at(held, found.other_places, found.counts)
    begins = [end - len(tensor.global_shape) for tensor, end in zip(tensors, ends, strict=True)]
    lengths = wanted.table[1].tolist()
    counts = [element_count(lengths[begin:end]) for begin, end in zip(begins, ends, strict=True)]
    left = numpy.flatnonzero(held != numpy.array(counts, numpy.int64)).tolist()
    if not left:
        return []
    places = [place for number in left for place in range(begins[number], ends[number])]
    own = columns_from(frame_of(tuple(tensors[number] for number in left), {}), wanted.table[:, places])
    return [Wanted(own.digest, encode_columns(own))]


class Needed:
    """Find what is asked of whom; on the leader.

    `is_any` says whether any rank wants anything, and `names` are those of what is wanted, each once.
    """

    def __init__(self, manifest: Manifest, whole: Whole, parts: Sequence[Sequence[Wanted]]) -> None:
        self._saved = manifest.world_size
        self._tasks: dict[int, list[Task]] = {}
        wanted = {one.digest: one for part in parts for one in part}
        self.names = tuple(wanted)
        self.is_any = bool(wanted)
        if not wanted:
            return
        reader = ColumnsReader()
        others = [reader.decode(one.columns, digest=one.digest, where="what a rank wants") for one in wanted.values()]
        numbers: dict[tuple[int, int], list[Table]] = {}
        for found in find_overlaps(whole.boxes, others, owned_items(manifest)):
            order = numpy.lexsort((found.others, found.layouts))
            layouts, names = found.layouts[order], found.others[order]
            bounds = numpy.flatnonzero((numpy.diff(layouts) != 0) | (numpy.diff(names) != 0)) + 1
            for own in numpy.split(order, bounds):
                if len(own):
                    key = int(found.layouts[own[0]]), int(found.others[own[0]])
                    numbers.setdefault(key, []).append(found.places[own])
        for (rank, name), listed in numbers.items():
            places = tuple(numpy.unique(numpy.concatenate(listed)).tolist())
            self._tasks.setdefault(rank, []).append(Task(self.names[name], rank, places))

    def tasks_of(self, rank: int, world_size: int) -> list[Task]:
        """Return what a rank is asked for, of the indexes that it has read."""
        return [task for own in share_of(rank, world_size, self._saved) for task in self._tasks.get(own, ())]
