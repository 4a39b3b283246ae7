"""Restores by ranks as threads, of checkpoints by hand: what each rank holds, and what it sees of the storage."""

from __future__ import annotations

import fnmatch
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy

from safepoint.catalog import read_lineage
from safepoint.contract import Contract
from safepoint.errors import CorruptionError, Difference, ObjectMissingError
from safepoint.faults.group import MessageScript
from safepoint.format.extent import Box
from safepoint.format.manifest import Conditions, Manifest
from safepoint.format.plain import encode_plain
from safepoint.format.stencil import encode_text
from safepoint.restoring.deal import deal_state, told_manifest
from safepoint.restoring.match import Choice
from safepoint.restoring.restore import RestoreContext, Restored, restore
from safepoint.restoring.select import Wish
from safepoint.restoring.together import Ranks
from safepoint.restoring.validate import SavedState
from safepoint.state.item import CapturedItem, CapturedTensor, Item, Permits, SavedItem, TensorSpec, TensorTarget
from safepoint.storage.memory import MemoryStorage
from safepoint.testing.ranks import RankOutcome, RankThread, RankThreads
from tests.build import Values, begin, write_generation
from tests.crash.job import BytesSource
from tests.restoring.tiles import Boxes, BoxMemory, part

Cut = Callable[[tuple[int, ...], int, int], list[Box]]
Weights = Mapping[str, Any]

WHOLE = Contract("exact", {"world_size"})


def conditions(world_size: int) -> Conditions:
    """Return the conditions that the checkpoints by hand were saved under, on so many ranks."""
    config = {"lr": {"$float": (0.125).hex()}}
    return Conditions(world_size, 32, 1, {"torch": "2.13.0"}, {}, {}, {}, config, {})


def weights_at(step: int) -> dict[str, Any]:
    """Return the whole tensors of a step."""
    rows = numpy.arange(11 * 6, dtype="<f4").reshape(11, 6) + 1000 * step
    return {"w": rows, "b": numpy.arange(7, dtype="<f4") - step, "none": numpy.zeros((0, 3), "<f4")}


def by_rows(shape: tuple[int, ...], rank: int, world_size: int) -> list[Box]:
    """Cut as FSDP does: the first axis in equal parts, the last ranks having less or nothing."""
    size = -(-shape[0] // world_size)
    start = min(rank * size, shape[0])
    return [Box((start,) + (0,) * (len(shape) - 1), (min(size, shape[0] - start), *shape[1:]))]


def by_columns(shape: tuple[int, ...], rank: int, world_size: int) -> list[Box]:
    """Cut the last axis, and leave one axis alone whole: two boxes of it where there is more than one element."""
    size = -(-shape[-1] // world_size)
    start = min(rank * size, shape[-1])
    whole = Box((0,) * (len(shape) - 1) + (start,), (*shape[:-1], min(size, shape[-1] - start)))
    half = whole.shape[0] // 2
    first = Box(whole.offset, (half, *whole.shape[1:]))
    return [first, Box((whole.offset[0] + half, *whole.offset[1:]), (whole.shape[0] - half, *whole.shape[1:]))]


def replicated(shape: tuple[int, ...], rank: int, world_size: int) -> list[Box]:
    """Hold everything everywhere."""
    return [Box((0,) * len(shape), shape)]


@dataclass(slots=True)
class Part:
    """An item of which a rank holds boxes, with a plain value."""

    name: str
    held: dict[str, list[BoxMemory]]
    plain: object = None
    type: str = "module"
    differences: tuple[Difference, ...] = ()
    fails_to_apply: bool = False
    is_deaf: bool = False
    is_touched: bool = False
    division: str = ""

    def capture(self) -> CapturedItem:
        tensors = [
            CapturedTensor(
                TensorSpec(name, "float32", box.shape, self._whole[name], box.offset), BytesSource(bytes(box.data))
            )
            for name, boxes in self.held.items()
            for box in boxes
        ]
        return CapturedItem(self.type, encode_text(self.plain), tuple(tensors), self.division)

    _whole: dict[str, tuple[int, ...]] = field(default_factory=dict)

    def check(self, saved: SavedItem) -> Sequence[Difference]:
        return self.differences

    def targets(self, saved: SavedItem, permits: Permits) -> Mapping[str, TensorTarget]:
        self._whole = {name: spec.global_shape for name, spec in saved.specs.items()}
        return {name: Boxes(self.held[name]) for name in saved.specs if name in self.held}

    def apply(self, saved: SavedItem, permits: Permits) -> Sequence[str]:
        self.is_touched = True
        if self.fails_to_apply:
            raise CorruptionError("cannot be applied", where=self.name)
        if not self.is_deaf:
            self.plain = saved.plain
        return []

    def reads(self, name: str) -> list[bytes]:
        return [bytes(box.data) for box in self.held[name]]


def part_of(rank: int, world_size: int, cut: Cut = by_rows, *, name: str = "model", **options: Any) -> Part:
    """Return a rank's part of the weights, filled with noise."""
    held = {
        tensor: [BoxMemory(box.offset, box.shape, 4) for box in cut(values.shape, rank, world_size)]
        for tensor, values in weights_at(0).items()
    }
    return Part(name, held, **options)


def holds(item: Part, step: int) -> bool:
    """Return whether a part holds the weights of a step, and its plain value says so."""
    expected = {
        name: [part(weights_at(step)[name], Box(box.offset, box.shape)).tobytes() for box in boxes]
        for name, boxes in item.held.items()
    }
    return {name: item.reads(name) for name in item.held} == expected and item.plain == {"step": step}


def write(storage: MemoryStorage, step: int, world_size: int, cut: Cut = by_rows, **options: Any) -> str:
    """Write a checkpoint of the weights of a step, saved by so many ranks; a replicated tensor is stored by one."""
    ranks = []
    for rank in range(world_size):
        named = {}
        for number, (name, values) in enumerate(weights_at(step).items()):
            if cut is replicated and rank != number % world_size:
                continue
            (box,) = cut(values.shape, rank, world_size)
            data = part(values, box).tobytes()
            named[name] = Values("float32", box.shape, data, values.shape, box.offset, rows=2)
        ranks.append({"model": named})
    plain = {"model": encode_plain({"step": step})}
    chain = read_lineage(storage).chain
    return write_generation(storage, step, chain=chain, ranks=ranks, plain=plain, kinds={"model": "sharded"}, **options)


def run_of(*steps: int, world_size: int, cut: Cut = by_rows) -> MemoryStorage:
    """Return a run with checkpoints of these steps."""
    storage = MemoryStorage()
    begin(storage)
    for step in steps:
        write(storage, step, world_size, cut)
    return storage


@dataclass(slots=True)
class View:
    """What one rank sees of a storage: objects that are not there, or with another byte. Logs what is read."""

    storage: MemoryStorage
    hidden: str = ""
    damaged: str = ""
    damaged_header: str = ""
    log: list[tuple[str, str]] = field(default_factory=list)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.storage, name)

    def list(self, path: str) -> Any:
        self.log.append(("list", path))
        return self.storage.list(path)

    def read(self, path: str, *, limit_bytes: int) -> bytes:
        self.log.append(("read", path))
        self._see(path)
        return self.storage.read(path, limit_bytes=limit_bytes)

    def size(self, path: str) -> int:
        self._see(path)
        return self.storage.size(path)

    def read_into(self, path: str, offset_bytes: int, buffer: memoryview) -> None:
        self.log.append(("read_into", path))
        self._see(path)
        self.storage.read_into(path, offset_bytes, buffer)
        if fnmatch.fnmatchcase(path, self.damaged if offset_bytes else self.damaged_header):
            buffer[0] ^= 1

    def _see(self, path: str) -> None:
        if self.hidden and fnmatch.fnmatchcase(path, self.hidden):
            raise ObjectMissingError("no such object", where=path)


def dealt(storage: Any, manifest: Manifest, world_size: int) -> list[SavedState]:
    """Return what each rank of a job is given of a checkpoint, or raise the error that all of them raise."""

    def act(rank: RankThread) -> SavedState:
        ranks = Ranks(rank.group, deadline_s=60.0)
        told = ranks.led(lambda: told_manifest(ranks, manifest), Manifest)
        assert told is not None
        return deal_state(ranks, storage, told, full=[manifest])

    return [outcome.returned() for outcome in RankThreads(world_size).run(act)]


@dataclass(slots=True)
class Start:
    """Hold what each rank had, how each ended, and what is left of their messages."""

    items: list[dict[str, Item]]
    outcomes: tuple[RankOutcome[Restored], ...]
    board: Mapping[str, bytes]

    @property
    def parts(self) -> list[Part]:
        return [item for items in self.items for item in items.values() if isinstance(item, Part)]

    def reports(self) -> list[Restored]:
        return [outcome.returned() for outcome in self.outcomes]

    def errors(self) -> list[str]:
        """Return class and text of each rank's error."""
        return [f"{type(outcome.error).__name__}: {outcome.error}" for outcome in self.outcomes]


def start(
    storages: Sequence[Any],
    items: Sequence[Mapping[str, Item]],
    *,
    contract: Contract = WHOLE,
    wish: Wish | None = None,
    choice: Choice | None = None,
    scripts: Mapping[int, MessageScript] | None = None,
) -> Start:
    """Restore on as many ranks as there are storages."""
    world_size = len(storages)
    threads = RankThreads(world_size, scripts=scripts)

    def act(rank: RankThread) -> Restored:
        storage = storages[rank.rank]
        context = RestoreContext(
            storage=storage,
            ambient=rank.ambient,
            items=items[rank.rank],
            contract=contract,
            conditions=conditions(world_size),
            ranks=Ranks(rank.group, topic="restore/1", deadline_s=60.0),
        )
        # Only the leader looks at the lineage; the others are given one that would lead nowhere.
        lineage = read_lineage(storages[0])
        return restore(context, lineage, wish or Wish(), choice or Choice())

    return Start([dict(one) for one in items], threads.run(act), threads.messages.held)


def same(values: Sequence[Any]) -> bool:
    """Return whether all are equal."""
    return all(value == values[0] for value in values)
