"""What two checkpoints have in common: bits, values, plain values."""

from __future__ import annotations

import math
import random
import struct

import pytest
import torch

from safepoint.catalog import Generation, examine_all, read_lineage
from safepoint.errors import CorruptionError
from safepoint.format.names import generation_path
from safepoint.format.plain import ScalarLeaf, TensorLeaf, encode_plain
from safepoint.format.records import LineageLink
from safepoint.restoring.compare import Comparison, TensorComparison, compare_checkpoints
from safepoint.restoring.trees import LeafDifference, differing_values
from safepoint.restoring.values import Distance, measure, scalar_text
from safepoint.storage.memory import MemoryStorage
from tests.build import Values, begin, flip, floats, integers, write_generation

CHAIN = (LineageLink(1, None, 0),)
DATA = "rank-00000-of-00001.safetensors"


@pytest.fixture
def storage() -> MemoryStorage:
    storage = MemoryStorage()
    begin(storage)
    return storage


def found(storage: MemoryStorage, step: int) -> Generation:
    (entry,) = [entry for entry in examine_all(storage, read_lineage(storage)) if entry.name.step == step]
    return entry


def compare(storage: MemoryStorage, one: int = 1, other: int = 2) -> Comparison:
    return compare_checkpoints(storage, found(storage, one), storage, found(storage, other))


def by_name(comparison: Comparison) -> dict[str, TensorComparison]:
    return {tensor.name: tensor for tensor in comparison.tensors}


def test_equal_checkpoints_are_equal_and_no_tensor_is_read(storage: MemoryStorage) -> None:
    for step in (1, 2):
        name = write_generation(storage, step, chain=CHAIN)
        flip(storage, generation_path(name, DATA))
    assert compare(storage).is_equal


def test_tensors_are_told_apart_by_name_with_the_greatest_difference(storage: MemoryStorage) -> None:
    write_generation(storage, 1, chain=CHAIN, items={"model": {"w": floats(1.0, 2.0, 3.0), "still": floats(5.0)}})
    write_generation(storage, 2, chain=CHAIN, items={"model": {"w": floats(1.0, 2.5, 2.75), "still": floats(5.0)}})
    comparison = compare(storage)
    tensors = by_name(comparison)
    assert not comparison.is_equal
    assert (tensors["w"].verdict, tensors["w"].distance) == ("values", Distance(2, 0.5, 0))
    assert tensors["still"].verdict == "equal"


def test_what_only_one_side_has_is_named(storage: MemoryStorage) -> None:
    write_generation(storage, 1, chain=CHAIN, items={"model": {"a": floats(1.0)}, "ema": {"a": floats(1.0)}})
    write_generation(storage, 2, chain=CHAIN, items={"model": {"b": floats(1.0)}, "data": {}})
    comparison = compare(storage)
    assert {name: tensor.verdict for name, tensor in by_name(comparison).items()} == {
        "a": "only_first",
        "b": "only_second",
    }
    assert (comparison.only_first, comparison.only_second) == (("ema",), ("data",))


def test_another_type_or_shape_is_no_difference_of_values(storage: MemoryStorage) -> None:
    one = {"t": floats(1.0), "s": floats(1.0, 2.0)}
    other = {"t": Values("bfloat16", (1,), b"\x80\x3f"), "s": Values("float32", (2, 1), floats(1.0, 2.0).data)}
    write_generation(storage, 1, chain=CHAIN, items={"model": one})
    write_generation(storage, 2, chain=CHAIN, items={"model": other})
    tensors = by_name(compare(storage))
    assert (tensors["t"].verdict, tensors["t"].first, tensors["t"].second) == ("type", "float32 [1]", "bfloat16 [1]")
    assert (tensors["s"].verdict, tensors["s"].first, tensors["s"].second) == ("shape", "float32 [2]", "float32 [2, 1]")


@pytest.mark.parametrize("rows", [(3, 3), (3, 4), (1, 12), (5, 2)])
def test_the_result_does_not_depend_on_how_rows_are_cut(storage: MemoryStorage, rows: tuple[int, int]) -> None:
    values = [float(n) for n in range(12)]
    moved = [*values[:7], 7.25, *values[8:11], 13.0]
    write_generation(storage, 1, chain=CHAIN, items={"model": {"w": floats(*values, rows=rows[0])}})
    write_generation(storage, 2, chain=CHAIN, items={"model": {"w": floats(*moved, rows=rows[1])}})
    (tensor,) = compare(storage).tensors
    assert tensor.distance == Distance(2, 2.0, 0)
    assert tensor.elements == 12


def test_boxes_of_another_number_of_ranks_are_put_together(storage: MemoryStorage) -> None:
    def box(values: list[float], shape: tuple[int, int], offset: tuple[int, int]) -> dict[str, dict[str, Values]]:
        data = struct.pack(f"<{len(values)}f", *values)
        return {"model": {"w": Values("float32", shape, data, global_shape=(4, 2), offset=offset)}}

    rows = [box([0, 1, 2, 3], (2, 2), (0, 0)), box([4, 5, 6, 7], (2, 2), (2, 0))]
    columns = [box([0, 2, 4, 6], (4, 1), (0, 0)), box([1, 3, 5, 7.5], (4, 1), (0, 1))]
    write_generation(storage, 1, chain=CHAIN, ranks=rows, kinds={"model": "sharded"})
    write_generation(storage, 2, chain=CHAIN, ranks=columns, kinds={"model": "sharded"})
    (tensor,) = compare(storage).tensors
    assert tensor.distance == Distance(1, 0.5, 0)


def test_items_per_rank_are_compared_rank_by_rank(storage: MemoryStorage) -> None:
    for step, last in ((1, 5), (2, 6)):
        ranks = [{"rng": {"state": integers(4)}}, {"rng": {"state": integers(last)}}]
        write_generation(storage, step, chain=CHAIN, ranks=ranks, kinds={"rng": "per_rank"})
    tensors = by_name(compare(storage))
    assert tensors["state of rank 0"].verdict == "equal"
    assert tensors["state of rank 1"].distance == Distance(1, 1, 0)


def test_damage_is_not_taken_for_a_difference(storage: MemoryStorage) -> None:
    write_generation(storage, 1, chain=CHAIN, items={"model": {"w": floats(1.0)}})
    name = write_generation(storage, 2, chain=CHAIN, items={"model": {"w": floats(2.0)}})
    flip(storage, generation_path(name, DATA))
    with pytest.raises(CorruptionError, match="model/w"):
        compare(storage)


def test_plain_values_are_named_by_path_with_both_sides(storage: MemoryStorage) -> None:
    def tree(count: int, step: float) -> object:
        return encode_plain(
            {
                "lr": 0.1 * count,
                "betas": (0.9, 0.999),
                "state": {0: {"step": ScalarLeaf("float32", struct.pack("<f", step))}},
                "nan": math.nan,
            }
        )

    write_generation(storage, 1, chain=CHAIN, items={"optimizer": {}}, plain={"optimizer": tree(1, 10.0)})
    write_generation(storage, 2, chain=CHAIN, items={"optimizer": {}}, plain={"optimizer": tree(2, 20.0)})
    assert [(entry.item, entry.difference) for entry in compare(storage).plain] == [
        ("optimizer", LeafDifference("lr", "0.1", "0.2")),
        ("optimizer", LeafDifference("state[0].step", "10.0 (float32)", "20.0 (float32)")),
    ]


@pytest.mark.parametrize(
    ("first", "second", "expected"),
    [
        (1, 1.0, [LeafDifference("", "1", "1.0")]),
        (True, 1, [LeafDifference("", "True", "1")]),
        (0.0, -0.0, [LeafDifference("", "0.0", "-0.0")]),
        ({"a": 1}, {"b": 1}, [LeafDifference("a", "1", "absent"), LeafDifference("b", "absent", "1")]),
        ([1, 2, 3], [1, 5], [LeafDifference("[1]", "2", "5"), LeafDifference("", "3 elements", "2 elements")]),
        ({1, 2}, {2, 1}, []),
        (b"abc", b"abd", [LeafDifference("", "3 bytes, from byte 2 63", "3 bytes, from byte 2 64")]),
        (b"ab", b"abd", [LeafDifference("", "2 bytes, from byte 2 none", "3 bytes, from byte 2 64")]),
        ((1,), [1], [LeafDifference("", "(1,)", "[1]")]),
        (TensorLeaf("w", device="cuda"), TensorLeaf("w", device="cpu"), []),
        (TensorLeaf("w"), TensorLeaf("v"), [LeafDifference("", "the tensor 'w'", "the tensor 'v'")]),
    ],
)
def test_plain_values_differ_by_type_and_by_value(
    first: object, second: object, expected: list[LeafDifference]
) -> None:
    assert list(differing_values(first, second)) == expected


def test_the_order_of_keys_is_part_of_a_mapping() -> None:
    (difference,) = differing_values({"a": 1, "b": 2}, {"b": 2, "a": 1})
    assert "order" in difference.first


FLOAT_TYPES = [
    torch.float16,
    torch.bfloat16,
    torch.float32,
    torch.float64,
    torch.float8_e4m3fn,
    torch.float8_e5m2,
    torch.float8_e4m3fnuz,
    torch.float8_e5m2fnuz,
    torch.float8_e8m0fnu,
]


@pytest.mark.parametrize("dtype", FLOAT_TYPES, ids=str)
def test_differences_of_floats_are_those_of_torch_in_double(dtype: torch.dtype, chance: random.Random) -> None:
    size = torch.empty(0, dtype=dtype).element_size()
    raw = [bytes(chance.randrange(256) for _ in range(256 * size)) for _ in range(2)]
    if size == 1:
        raw[0] = bytes(range(256))
    one, other = (torch.frombuffer(bytearray(data), dtype=torch.uint8).view(dtype) for data in raw)
    differs = (one.view(torch.uint8).reshape(-1, size) != other.view(torch.uint8).reshape(-1, size)).any(dim=1)
    wide, counterpart = one.double()[differs], other.double()[differs]
    finite = wide.isfinite() & counterpart.isfinite()
    assert measure(str(dtype)[6:], size, memoryview(raw[0]), memoryview(raw[1])) == Distance(
        int(differs.sum()),
        float((wide[finite] - counterpart[finite]).abs().max()),
        int((~finite).sum()),
    )


@pytest.mark.parametrize(
    ("dtype", "code", "values"),
    [
        ("int64", "q", ((-(1 << 63), 5), ((1 << 63) - 1, 5))),
        ("uint64", "Q", ((0, 5), ((1 << 64) - 1, 5))),
        ("int8", "b", ((-128, 5), (127, 5))),
        ("bool", "?", ((False, True), (True, True))),
        ("int64", "q", (((1 << 62) + 1, 5), (1 << 62, 5))),
    ],
)
def test_differences_of_integers_are_exact(dtype: str, code: str, values: tuple[tuple[int, ...], ...]) -> None:
    one, other = (memoryview(struct.pack(f"<2{code}", *side)) for side in values)
    expected = abs(int(values[0][0]) - int(values[1][0]))
    assert measure(dtype, struct.calcsize(code), one, other) == Distance(1, expected, 0)


def test_complex_values_and_pairs_of_four_bits_are_measured() -> None:
    one, other = (memoryview(struct.pack("<2d", *pair)) for pair in ((1.0, 2.0), (4.0, 6.0)))
    assert measure("complex128", 16, one, other) == Distance(1, 5.0, 0)
    assert measure("float4_e2m1fn_x2", 1, memoryview(b"\x70"), memoryview(b"\xf2")) == Distance(1, 12.0, 0)


def test_zeros_of_two_signs_differ_in_bits_by_nothing_in_value() -> None:
    one, other = (memoryview(struct.pack("<f", value)) for value in (0.0, -0.0))
    assert measure("float32", 4, one, other) == Distance(1, 0.0, 0)


def test_values_that_are_not_finite_are_counted_apart() -> None:
    one = memoryview(struct.pack("<3f", math.nan, 1.0, math.inf))
    other = memoryview(struct.pack("<3f", math.nan, math.nan, 1.0))
    assert measure("float32", 4, one, other) == Distance(2, None, 2)


@pytest.mark.parametrize(
    ("dtype", "data", "text"),
    [("float32", struct.pack("<f", 1.5), "1.5"), ("bfloat16", b"\xc0\x3f", "1.5"), ("int64", b"\x07" + bytes(7), "7")],
)
def test_a_scalar_is_shown_as_a_number(dtype: str, data: bytes, text: str) -> None:
    assert scalar_text(dtype, data) == text


def test_boxes_of_a_tensor_that_contradict_each_other_are_damage(storage: MemoryStorage) -> None:
    def part(offset: int, dtype: str, data: bytes) -> dict[str, dict[str, Values]]:
        return {"model": {"w": Values(dtype, (2,), data, global_shape=(4,), offset=(offset,))}}

    whole = [part(0, "float32", bytes(8)), part(2, "float32", bytes(8))]
    other = [part(0, "float32", bytes(8)), part(2, "float64", bytes(16))]
    write_generation(storage, 1, chain=CHAIN, ranks=whole, kinds={"model": "sharded"})
    write_generation(storage, 2, chain=CHAIN, ranks=other, kinds={"model": "sharded"})
    assert compare(storage, 1, 1).is_equal
    with pytest.raises(CorruptionError, match="contradict"):
        compare(storage)


def test_trees_that_differ_by_rank_are_compared_as_the_whole_that_they_make(storage: MemoryStorage) -> None:
    for step, value in ((1, 5), (2, 6)):
        entries: list[dict[str, int]] = [{"a": 1}, {"b": value}]
        trees = [{"model": encode_plain({"entries": one, "extra": {}, "training": []})} for one in entries]
        write_generation(storage, step, chain=CHAIN, ranks=[{"model": {}}, {}], plain_of_ranks=trees)
    assert [one.difference for one in compare(storage).plain] == [LeafDifference("entries.b", "5", "6")]


def test_what_one_process_and_what_several_ranks_saved_is_equal_where_the_values_are(storage: MemoryStorage) -> None:
    boxes = [Values("float32", (1,), struct.pack("<f", n), global_shape=(2,), offset=(n,)) for n in range(2)]
    write_generation(storage, 1, chain=CHAIN, items={"model": {"w": floats(0.0, 1.0)}})
    ranks = [{"model": {"w": box}} for box in boxes]
    write_generation(storage, 2, chain=CHAIN, ranks=ranks, kinds={"model": "sharded"})
    assert compare(storage).is_equal
