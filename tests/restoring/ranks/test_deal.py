"""What a rank hears of a checkpoint: what it needs, however many ranks saved it, and read from storage once for all."""

from __future__ import annotations

import threading
from collections import Counter

import pytest

from safepoint.catalog import read_lineage
from safepoint.format.plain import encode_plain
from safepoint.storage.memory import MemoryStorage
from safepoint.testing.ranks import MemoryBoard
from tests.build import Values, begin, write_generation
from tests.restoring.ranks.jobs import Part, View, holds, part_of, run_of, start
from tests.restoring.tiles import BoxMemory

COUNTS = (2, 4, 16)
NAMES = [f"layers.{number:02d}.weight" for number in range(12)]


@pytest.fixture
def heard(monkeypatch: pytest.MonkeyPatch) -> Counter[int]:
    """Count the bytes that each rank but the leader takes from the board; the threads are named by their ranks."""
    counts: Counter[int] = Counter()
    look = MemoryBoard.look

    def counted(board: MemoryBoard, key: str, *, limit_s: float) -> bytes | None:
        found = look(board, key, limit_s=limit_s)
        counts[int(threading.current_thread().name.removeprefix("rank-"))] += len(found or b"")
        return found

    monkeypatch.setattr(MemoryBoard, "look", counted)
    return counts


def data(name: str, rank: int) -> bytes:
    return bytes(f"{name}{rank:04d}"[-16:], "ascii")


def saved_by(world_size: int) -> MemoryStorage:
    """Return a run of so many ranks, each of which stored four elements of each tensor and has a tree of its own."""
    storage = MemoryStorage()
    begin(storage)
    ranks = [
        {"model": {name: Values("float32", (4,), data(name, rank), (4 * world_size,), (4 * rank,)) for name in NAMES}}
        for rank in range(world_size)
    ]
    plain = {"model": encode_plain({"step": 1})}
    write_generation(
        storage, 1, chain=read_lineage(storage).chain, ranks=ranks, plain=plain, kinds={"model": "sharded"}
    )
    return storage


def holder(rank: int) -> Part:
    return Part("model", {name: [BoxMemory((4 * rank,), (4,), 4)] for name in NAMES})


def test_bytes_that_a_rank_hears_do_not_grow_with_the_number_of_ranks_that_saved(heard: Counter[int]) -> None:
    most = {}
    for world_size in COUNTS:
        heard.clear()
        view = View(saved_by(world_size))
        views = [view, *(View(view.storage) for _ in range(world_size - 1))]
        run = start(views, [{"model": holder(rank)} for rank in range(world_size)])
        run.reports()
        for rank, part in enumerate(run.parts):
            assert [part.reads(name) for name in NAMES] == [[data(name, rank)] for name in NAMES]
        most[world_size] = max(count for rank, count in heard.items() if rank)
    # Names of files, offsets and shapes have more digits where there are more ranks.
    assert max(most.values()) < 1.1 * min(most.values()), most


@pytest.mark.parametrize(("saved", "now"), [(4, 2), (3, 3), (2, 5), (1, 3)])
def test_each_index_is_read_from_storage_once_and_by_one_rank(saved: int, now: int) -> None:
    """Spec: C10.6"""
    storage = run_of(1, world_size=saved)
    views = [View(storage) for _ in range(now)]
    run = start(views, [{"model": part_of(rank, now)} for rank in range(now)])
    run.reports()
    assert all(holds(part, 1) for part in run.parts)
    indexes = [f"rank-{rank:05d}-of-{saved:05d}.json" for rank in range(saved)]
    reads = [[path.rpartition("/")[2] for verb, path in view.log if verb == "read"] for view in views]
    assert sorted(name for names in reads for name in names if name in indexes) == indexes
    if saved == now:
        assert [[name for name in names if name in indexes] for names in reads] == [[name] for name in indexes]


def test_a_rank_that_needs_one_of_many_boxes_hears_of_no_other(heard: Counter[int]) -> None:
    view = View(saved_by(32))
    whole = Part("model", {name: [BoxMemory((0,), (128,), 4)] for name in NAMES})
    little = Part("model", {NAMES[0]: [BoxMemory((8,), (2,), 4)]})
    start([view, View(view.storage), View(view.storage)], [{"model": one} for one in (whole, whole, little)])
    assert heard[2] < heard[1] / 3


def test_tensors_of_ranks_own_items_may_have_other_shapes_on_each_whoever_reads_them() -> None:
    """Spec: C11.6"""
    storage = MemoryStorage()
    begin(storage)
    ranks = [
        {
            "model": {"w": Values("float32", (2,), bytes(8 * [rank]), (8,), (2 * rank,))},
            "own": {"state": Values("float32", (rank + 1,), bytes(4 * (rank + 1)))},
        }
        for rank in range(4)
    ]
    trees = [{"own": encode_plain(rank), **({"model": encode_plain(1)} if rank == 0 else {})} for rank in range(4)]
    kinds = {"model": "sharded", "own": "per_rank"}
    chain = read_lineage(storage).chain
    write_generation(storage, 1, chain=chain, ranks=ranks, plain_of_ranks=trees, kinds=kinds)
    parts = [Part("model", {"w": [BoxMemory((4 * rank,), (4,), 4)]}) for rank in range(2)]
    start([storage] * 2, [{"model": one} for one in parts]).reports()
    expected = [[bytes(8 * [first] + 8 * [first + 1])] for first in (0, 2)]
    assert [one.reads("w") for one in parts] == expected
