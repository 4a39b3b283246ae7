"""Saved boxes of any cut into targets of any cut: the bytes are those that the whole tensor has there."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import numpy
import pytest
from hypothesis import given
from hypothesis import strategies as st

from safepoint.errors import CorruptionError, InternalError
from safepoint.format.extent import Box
from safepoint.format.manifest import decode_manifest
from safepoint.restoring import arrival, plan
from safepoint.restoring.arrival import Arrival, BoxKey
from safepoint.restoring.boxes import StoredBox, copy_overlap
from safepoint.restoring.deal import deal_state
from safepoint.restoring.plan import TensorRead, paths_of, plan_reads
from safepoint.restoring.read import read
from safepoint.restoring.together import Ranks
from safepoint.restoring.validate import SavedState
from safepoint.storage.memory import MemoryStorage
from tests.build import Values, begin, floats, integers, write_generation
from tests.restoring.tiles import Array, Boxes, BoxMemory, CountingStorage, cut, part, store

TYPES = {"uint8": "u1", "bfloat16": "<u2", "float32": "<f4", "float64": "<f8", "complex128": "<c16"}


def numbered(shape: tuple[int, ...], dtype: str) -> Array:
    """Return an array whose elements all differ, as far as their type allows."""
    return numpy.arange(int(numpy.prod(shape, dtype=int))).astype(TYPES[dtype]).reshape(shape)


def folder() -> CountingStorage:
    storage = CountingStorage()
    storage.make_root()
    storage.make_folder("f")
    return storage


def fill(storage: CountingStorage, stored: Sequence[StoredBox], boxes: Sequence[Box], element_bytes: int) -> Boxes:
    target = Boxes([BoxMemory(box.offset, box.shape, element_bytes) for box in boxes])
    read(storage, plan_reads({("model", "w"): stored}, {"model": {"w": target}}))
    return target


@given(
    shape=st.lists(st.integers(0, 7), min_size=1, max_size=4).map(tuple),
    dtype=st.sampled_from(sorted(TYPES)),
    saved=st.integers(1, 9),
    wanted=st.integers(1, 9),
    rows=st.integers(1, 4),
    seed=st.integers(0, 1 << 30),
)
def test_any_boxes_are_filled_from_any_other_boxes_as_numpy_slices_them(
    shape: tuple[int, ...], dtype: str, saved: int, wanted: int, rows: int, seed: int
) -> None:
    chance = random.Random(seed)
    storage, values = folder(), numbered(shape, dtype)
    files = [f"f/{number}" for number in range(chance.randint(1, 3))]
    stored = store(storage, "w", values, cut(shape, saved, chance), dtype=dtype, rows=rows, files=files)
    boxes = cut(shape, wanted, chance)
    boxes = boxes[: chance.randint(1, len(boxes))]
    target = fill(storage, stored, boxes, values.itemsize)
    for box, taken in zip(boxes, target.held, strict=True):
        assert bytes(taken.data) == part(values, box).tobytes()
        assert taken.commits == 1
    assert len(set(storage.reads)) == len(storage.reads), "a chunk was read twice"
    assert storage.reads == sorted(storage.reads)


def test_what_is_planned_of_very_many_chunks_is_made_anew_and_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    chance = random.Random(3)
    storage, values = folder(), numbered((13, 5), "float32")
    stored = store(storage, "w", values, cut((13, 5), 9, chance), dtype="float32", rows=2, files=["f/0", "f/1"])
    monkeypatch.setattr(arrival, "MOST_RANGES", 2)
    kept: list[TensorRead] = []
    anew: list[TensorRead] = []
    for many, plans in ((1 << 20, kept), (2, anew)):
        monkeypatch.setattr(plan, "_MANY", many)
        target = Boxes([BoxMemory(box.offset, box.shape, 4) for box in cut((13, 5), 3, random.Random(4))])
        plans.extend(plan_reads({("model", "w"): stored}, {"model": {"w": target}}))
        arrivals: dict[BoxKey, Arrival] = {}
        read(storage, plans, arrivals=arrivals)
        for one, (key, arrived) in zip(target.held, arrivals.items(), strict=True):
            assert key[2:] == (one.offset, one.shape) and len(arrived.ranges) <= 2
            assert arrived.differing(memoryview(one.data)) is None
            assert not one.data or arrived.differing(memoryview(bytes([one.data[0] ^ 1, *one.data[1:]]))) is not None
        assert all(bytes(one.data) == part(values, Box(one.offset, one.shape)).tobytes() for one in target.held)
    assert isinstance(kept[0].chunks, tuple) and not isinstance(anew[0].chunks, tuple)
    assert tuple(anew[0].chunks) == kept[0].chunks and len(anew[0].chunks) == len(kept[0].chunks)
    assert [anew[0].chunks[0], *anew[0].chunks[1:]] == list(kept[0].chunks)
    assert paths_of(anew) == paths_of(kept)


def of_one_process() -> SavedState:
    """Return a saved state with tensors that one chunk holds and others, as one process that restores it sees it."""
    storage = MemoryStorage()
    model = {
        "w": Values("float32", (2, 3), bytes(24)),
        "rows": floats(1.0, 2.0, 3.0, rows=1),
        "none": floats(),
        "b": floats(4.0),
        "number": Values("float64", (), bytes(8)),
    }
    items = {"model": model, "other": {"b": integers(7, 8)}}
    generation = write_generation(storage, 1, chain=begin(storage), items=items)
    path = f"generations/{generation}/manifest.json"
    manifest = decode_manifest(storage.read(path, limit_bytes=1 << 20), where=path, generation=generation)
    return deal_state(Ranks(), storage, manifest, full=[manifest])


@pytest.fixture
def planned_alone(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, str]]:
    """Return the tensors of which a plan is made one by one from now on."""
    names: list[tuple[str, str]] = []
    one_by_one = plan._plan_tensor

    def noting(key: plan.Key, *others: Any) -> TensorRead:
        names.append(key)
        return one_by_one(key, *others)

    monkeypatch.setattr(plan, "_plan_tensor", noting)
    return names


def test_tensors_of_one_chunk_are_planned_in_columns_as_one_by_one(planned_alone: list[tuple[str, str]]) -> None:
    saved = of_one_process()
    sizes = {("model", "w"): 24, ("model", "rows"): 12, ("model", "none"): 0, ("model", "b"): 4, ("model", "number"): 8}
    targets: dict[str, dict[str, Any]] = {"other": {"b": BoxMemory((0,), (2,), 8)}, "model": {}}
    for (_, name), size_bytes in sizes.items():
        targets["model"][name] = BoxMemory((0,), (size_bytes,), 1)
    targets["model"]["b"] = Boxes([BoxMemory((0,), (1,), 4)])
    found = plan_reads(saved.tensors, targets)
    assert planned_alone == [("model", name) for name in ("rows", "none", "b")]
    assert found == plan_reads(dict(saved.tensors), targets)
    assert len(planned_alone) == 3 + 6


def test_a_target_of_another_size_is_named_among_others(planned_alone: list[tuple[str, str]]) -> None:
    targets = {"model": {"w": BoxMemory((0,), (24,), 1), "b": BoxMemory((0,), (5,), 1)}}
    with pytest.raises(InternalError, match=r"another size.*model/b.*expected 4.*found 5"):
        plan_reads(of_one_process().tensors, targets)
    assert planned_alone == [("model", "w"), ("model", "b")]


def test_a_target_of_a_tensor_that_is_not_stored_is_named_among_others() -> None:
    targets = {"model": {"w": BoxMemory((0,), (24,), 1), "gone": BoxMemory((0,), (5,), 1)}}
    with pytest.raises(InternalError, match=r"not stored.*model/gone"):
        plan_reads(of_one_process().tensors, targets)


def test_a_rank_that_holds_nothing_reads_nothing() -> None:
    storage, values = folder(), numbered((4, 3), "float32")
    stored = store(storage, "w", values, [Box((0, 0), (4, 3))], dtype="float32", rows=4, files=["f/0"])
    empty = fill(storage, stored, [Box((4, 0), (0, 3))], 4)
    fill(storage, stored, [], 4)
    assert storage.reads == []
    assert empty.held[0].commits == 1


def test_a_chunk_that_lies_in_one_run_is_read_in_place_and_any_other_one_through_the_buffer() -> None:
    storage, values = folder(), numbered((8, 4), "float32")
    stored = store(storage, "w", values, [Box((0, 0), (8, 4))], dtype="float32", rows=2, files=["f/0"])

    def plan(*boxes: Box) -> int:
        target = Boxes([BoxMemory(box.offset, box.shape, 4) for box in boxes])
        (planned,) = plan_reads({("model", "w"): stored}, {"model": {"w": target}})
        return max((chunk.size_bytes for chunk in planned.chunks if chunk.begin is None), default=0)

    assert plan(Box((0, 0), (8, 4))) == 0
    assert plan(Box((2, 0), (4, 4)), Box((0, 0), (2, 4))) == 0
    # A boundary within a chunk, and columns: the whole chunk, and no more than one.
    assert plan(Box((0, 0), (3, 4))) == 2 * 4 * 4
    assert plan(Box((0, 1), (8, 2))) == 2 * 4 * 4


def test_what_a_rank_reads_does_not_grow_with_the_number_of_ranks_that_saved() -> None:
    values = numbered((256, 16), "float32")
    read_by_rank = {}
    for ranks in (1, 2, 4, 8, 16, 64):
        storage = folder()
        size = 256 // ranks
        boxes = [Box((size * rank, 0), (size, 16)) for rank in range(ranks)]
        files = [f"f/{rank}" for rank in range(ranks)]
        stored = store(storage, "w", values, boxes, dtype="float32", rows=4, files=files)
        # Of three ranks the second: its edges lie within chunks.
        fill(storage, stored, [Box((86, 0), (85, 16))], 4)
        read_by_rank[ranks] = storage.bytes_read
    # Its own 85 rows, and what the chunks at both edges hold besides.
    assert set(read_by_rank.values()) == {88 * 16 * 4}


def test_only_the_files_that_hold_something_of_a_target_are_read() -> None:
    storage, values = folder(), numbered((8, 2), "uint8")
    boxes = [Box((2 * rank, 0), (2, 2)) for rank in range(4)]
    stored = store(storage, "w", values, boxes, dtype="uint8", rows=2, files=[f"f/{rank}" for rank in range(4)])
    target = Boxes([BoxMemory((3, 0), (2, 2), 1)])
    assert paths_of(plan_reads({("model", "w"): stored}, {"model": {"w": target}})) == {"f/1", "f/2"}


def test_a_target_that_no_stored_box_covers_is_damage_that_names_it() -> None:
    storage, values = folder(), numbered((4, 3), "float32")
    boxes = [Box((0, 0), (2, 3)), Box((3, 0), (1, 3))]
    stored = store(storage, "w", values, boxes, dtype="float32", rows=4, files=["f/0"])
    with pytest.raises(CorruptionError, match=r"model/w.*box at \[1, 0\] of shape \[3, 3\].*found 6"):
        fill(storage, stored, [Box((1, 0), (3, 3))], 4)


def test_a_target_outside_its_tensor_is_our_own_fault() -> None:
    storage, values = folder(), numbered((4, 3), "float32")
    stored = store(storage, "w", values, [Box((0, 0), (4, 3))], dtype="float32", rows=4, files=["f/0"])
    for box in (Box((2, 0), (3, 3)), Box((0,), (4,))):
        with pytest.raises(InternalError, match="outside"):
            fill(storage, stored, [box], 4)


def test_a_damaged_chunk_is_found_though_only_a_part_of_it_is_needed() -> None:
    """Spec: C11.2"""
    storage, values = folder(), numbered((4, 4), "uint8")
    stored = store(storage, "w", values, [Box((0, 0), (4, 4))], dtype="uint8", rows=2, files=["f/0"])
    data = bytearray(storage.read("f/0", limit_bytes=100))
    data[7] ^= 1
    storage.put("f/0", bytes(data))
    target = Boxes([BoxMemory((0, 0), (4, 1), 1)])
    with pytest.raises(CorruptionError, match="model/w, rows 0 to 2"):
        read(storage, plan_reads({("model", "w"): stored}, {"model": {"w": target}}))
    assert target.held[0].commits == 0


def test_a_tensor_of_many_axes_is_cut_like_any_other() -> None:
    shape = (2,) * 12 + (1,) * 28 + (3,)
    flat = numpy.arange(3 << 12, dtype="u1")
    inner = Box((0,) * 11 + (1,) + (0,) * 29, (2,) * 11 + (1,) * 29 + (2,))
    whole = Box((0,) * 41, shape)
    taken = bytearray(2 << 11)
    copy_overlap(memoryview(flat.tobytes()), whole, memoryview(taken), inner, 1)
    expected = flat.reshape((2,) * 12 + (3,))[..., 1, 0:2]
    assert bytes(taken) == expected.tobytes()
