"""Bytes on their way into targets: from files by several threads, from any other storage in the caller's own."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy
import pytest

from safepoint.errors import CorruptionError
from safepoint.format.digest import digest_bytes
from safepoint.format.extent import Box
from safepoint.format.index import Chunk, Tensor
from safepoint.restoring import read as reading
from safepoint.restoring import runs
from safepoint.restoring.arrival import Arrival, BoxKey
from safepoint.restoring.boxes import StoredBox
from safepoint.restoring.plan import ChunkRead, TensorRead, plan_reads
from safepoint.restoring.read import read
from safepoint.restoring.runs import batches_of
from safepoint.state.item import Target
from safepoint.storage.base import Storage
from safepoint.storage.local import LocalStorage
from tests.restoring.tiles import Boxes, BoxMemory, CountingStorage

ROWS = 8


@dataclass
class Written:
    """Hold a file of tensors of uint8, [rows, columns], one behind the other, in chunks of `ROWS` rows."""

    stored: dict[tuple[str, str], tuple[StoredBox, ...]]
    content: bytearray

    def plan(self, target_of: Callable[[str, tuple[int, ...]], Target | Boxes]) -> tuple[TensorRead, ...]:
        targets = {name: target_of(name, parts[0].tensor.shape) for (_, name), parts in self.stored.items()}
        return plan_reads(self.stored, {"model": targets})


def written(shapes: Sequence[tuple[int, int]], chance: random.Random) -> Written:
    stored, content = {}, bytearray(b"h" * 100)
    for number, (rows, columns) in enumerate(shapes):
        chunks = []
        for start in range(0, rows, ROWS):
            stop = min(start + ROWS, rows)
            data = chance.randbytes((stop - start) * columns)
            chunks.append(Chunk((start, stop), 0, len(content), len(data), digest_bytes(data)))
            content += data
        name, shape = f"w{number:02}", (rows, columns)
        tensor = Tensor("model", name, "uint8", shape, (0, 0), shape, tuple(chunks))
        stored["model", name] = (StoredBox(tensor, ("f",)),)
    return Written(stored, content)


def put(storage: Storage, content: bytes) -> Storage:
    storage.make_root()
    storage.put("f", content)
    return storage


def whole(name: str, shape: tuple[int, ...]) -> Boxes:
    return Boxes([BoxMemory((0, 0), shape, 1)])


def halves(name: str, shape: tuple[int, ...]) -> Boxes:
    """Return boxes that take columns: no chunk lies in one run in any of them."""
    left = shape[1] // 2
    return Boxes([BoxMemory((0, 0), (shape[0], left), 1), BoxMemory((0, left), (shape[0], shape[1] - left), 1)])


def taken(reads: Sequence[TensorRead]) -> dict[BoxKey, bytes]:
    return {
        (read.item, read.name, one.box.offset, one.box.shape): bytes(one.target.memory())
        for read in reads
        for one in read.targets
    }


@pytest.mark.parametrize("target_of", [whole, halves])
def test_files_give_the_same_bytes_as_any_other_storage(
    target_of: Callable[[str, tuple[int, ...]], Boxes],
    tmp_path: Path,
    chance: random.Random,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A run of this size holds some of the tensors, and the largest ones are larger."""
    monkeypatch.setattr(runs, "RUN_BYTES", 5000)
    shapes = [(chance.randint(1, 40), chance.choice([1, 2, 7, 64, 700])) for _ in range(40)]
    file = written(shapes, chance)
    local = file.plan(target_of)
    size = read(put(LocalStorage(tmp_path), bytes(file.content)), local)
    assert size == sum(rows * columns for rows, columns in shapes)
    other = file.plan(target_of)
    assert read(put(CountingStorage(), bytes(file.content)), other) == size
    assert taken(local) == taken(other)
    begin = 100
    for number, (rows, columns) in enumerate(shapes):
        values = numpy.frombuffer(file.content, dtype="u1", count=rows * columns, offset=begin).reshape(rows, columns)
        begin += rows * columns
        for (_, name, offset, shape), data in taken(local).items():
            if name == f"w{number:02}":
                assert data == values[:, offset[1] : offset[1] + shape[1]].tobytes()
    for tensor in local:
        assert all(one.target.commits == 1 for one in tensor.targets)  # type: ignore[attr-defined]  # of BoxMemory


def test_what_arrived_is_told_by_digests_that_make_up_each_box(tmp_path: Path, chance: random.Random) -> None:
    file = written([(20, 30), (3, 5)], chance)
    for target_of in (whole, halves):
        reads = file.plan(target_of)
        arrivals: dict[BoxKey, Arrival] = {}
        read(put(LocalStorage(tmp_path), bytes(file.content)), reads, arrivals=arrivals)
        found = taken(reads)
        assert arrivals.keys() == found.keys()
        for key, data in found.items():
            assert arrivals[key].differing(memoryview(data)) is None
            for place in (0, len(data) // 2, len(data) - 1):
                other = bytearray(data)
                other[place] ^= 1
                assert arrivals[key].differing(memoryview(other)) is not None
            assert arrivals[key].differing(memoryview(data)[1:]) is not None


def test_the_largest_tensors_come_first_and_the_others_as_they_lie(
    chance: random.Random, monkeypatch: pytest.MonkeyPatch
) -> None:
    size = 5000
    monkeypatch.setattr(runs, "RUN_BYTES", size)
    file = written([(1, 100), (1, size), (1, 300), (1, 2 * size), (1, 200), (1, size - 1)], chance)
    batches = [[tensor.name for tensor in batch.tensors] for batch in batches_of(file.plan(whole))]
    assert batches == [["w03"], ["w01"], ["w00", "w02", "w04"], ["w05"]]


def test_small_tensors_that_follow_each_other_are_one_run(chance: random.Random) -> None:
    file = written([(1, 100)] * 50, chance)
    (batch,) = batches_of(file.plan(whole))
    (run,) = batch.runs()
    assert (run.offset_bytes, len(run.parts)) == (100, 50)


def expected_runs(parts: Sequence[tuple[int, ChunkRead]], most_bytes: int) -> list[list[tuple[int, ChunkRead]]]:
    """Return chunks by runs, each as long as it may be."""
    found: list[list[tuple[int, ChunkRead]]] = []
    for number, chunk in parts:
        last = found[-1][-1][1] if found else None
        end = last and (last.path, last.offset_bytes + last.size_bytes)
        is_in_place = last is not None and last.begin is not None and chunk.begin is not None
        is_next = end == (chunk.path, chunk.offset_bytes) and is_in_place
        if is_next and sum(one.size_bytes for _, one in [*found[-1], (0, chunk)]) <= most_bytes:
            found[-1].append((number, chunk))
        else:
            found.append([(number, chunk)])
    return found


def test_a_run_ends_at_a_hole_another_file_a_chunk_needed_in_part_and_its_greatest_length(
    chance: random.Random, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(runs, "RUN_BYTES", 90)
    counts = set()
    for number in range(400):
        odds = chance.choice((0.0, 0.0, 0.1)), chance.choice((0.0, 0.1)), chance.choice((0.0, 0.1))
        end, path, tensors = 40, "f", []
        for name in range(chance.randint(1, 9)):
            chunks = []
            for _ in range(1 if number % 3 else chance.randint(0, 2)):
                end += chance.random() < odds[0]
                path = "g" if chance.random() < odds[1] else path
                begin = None if chance.random() < odds[2] else 0
                size = chance.randint(1, 25)
                chunks.append(ChunkRead(path, end, size, (0, 1), "0" * 32, Box((0,), (1,)), (0,), begin))
                end += size
            tensors.append(TensorRead("model", f"w{name}", 1, (), tuple(chunks)))
        parts = [(number, chunk) for number, tensor in enumerate(tensors) for chunk in tensor.chunks]
        found = list(runs.Batch(tuple(tensors)).runs())
        assert [list(run.parts) for run in found] == expected_runs(parts, 90)
        assert all(
            (run.path, run.offset_bytes) == (run.parts[0][1].path, run.parts[0][1].offset_bytes) for run in found
        )
        counts.add(len(found))
    assert {1, 2, 3} < counts


@pytest.mark.parametrize("target_of", [whole, halves])
def test_a_damaged_chunk_is_named_and_its_batch_is_not_committed(
    target_of: Callable[[str, tuple[int, ...]], Boxes],
    tmp_path: Path,
    chance: random.Random,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Spec: C11.2"""
    monkeypatch.setattr(runs, "RUN_BYTES", 5000)
    file = written([(20, 30)] * 30, chance)
    victim = chance.randrange(30)
    file.content[100 + victim * 600 + 8 * 30 + chance.randrange(8 * 30)] ^= 1 << chance.randrange(8)
    reads = file.plan(target_of)
    with pytest.raises(CorruptionError, match=rf"f: model/w{victim:02}, rows 8 to 16\]; expected digest .*found"):
        read(put(LocalStorage(tmp_path), bytes(file.content)), reads)
    assert all(one.target.commits == 0 for one in reads[victim].targets)  # type: ignore[attr-defined]  # of BoxMemory


class Temporary(BoxMemory):
    """Take a box through temporary memory, as a tensor on a device does; `held` counts it over all targets."""

    held = 0
    most = 0
    lock = threading.Lock()

    def memory(self) -> memoryview:
        with self.lock:
            Temporary.held += self.nbytes
            Temporary.most = max(Temporary.most, Temporary.held)
        return super().memory()

    def commit(self) -> None:
        super().commit()
        with self.lock:
            Temporary.held -= self.nbytes


def test_temporary_memory_is_bounded_whatever_the_size_of_the_state(
    tmp_path: Path, chance: random.Random, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(runs, "RUN_BYTES", 5000)
    monkeypatch.setattr(reading, "_MOST_HELD_BYTES", 20_000)
    file = written([(10, 100)] * 200 + [(10, 1500)], chance)
    Temporary.held = Temporary.most = 0
    read(
        put(LocalStorage(tmp_path), bytes(file.content)),
        file.plan(lambda name, shape: Boxes([Temporary((0, 0), shape, 1)])),
    )
    assert Temporary.held == 0
    assert 15_000 <= Temporary.most <= 20_000
