"""Nested state through its stored form: types, bits, aliasing, refusals."""

from __future__ import annotations

import datetime
import enum
import math
import pathlib
import struct
from collections import Counter, OrderedDict, defaultdict, namedtuple
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from safepoint.errors import CorruptionError, RequestError
from safepoint.format.plain import Same, ScalarLeaf, Shared, TensorLeaf, ViewLeaf
from safepoint.state.modules import ModuleItem
from safepoint.state.places import segment
from safepoint.state.tree import flatten, unflatten
from tests.state.roundtrip import returned, stored


class Colour(enum.IntEnum):
    RED = 1


class Word(str):
    pass


Pair = namedtuple("Pair", "left right")

PLAIN = {
    "none": None,
    "flag": True,
    "count": -(2**80),
    "text": "a\udc80é",
    "raw": b"\x00\xff",
    "pair": (1, [2.5, -0.0]),
    "complex": complex(-0.0, math.inf),
    1: "an integer key",
    (1, "x"): {"nested": {1, 2}},
    "frozen": frozenset({("a", 1)}),
    "ordered": OrderedDict(z=1, a=2),
    "when": datetime.datetime(2024, 2, 29, 12, 0, 1, 5, tzinfo=datetime.timezone.utc),
    "where": pathlib.PurePosixPath("a/b"),
    "size": torch.Size([2, 3]),
    "dtype": torch.bfloat16,
    "numpy": np.float32(0.1),
    "truth": np.bool_(True),
    "moment": np.datetime64("2024-02-29T12:00", "s"),
}


def test_plain_values_come_back_with_types_and_order() -> None:
    back = returned(PLAIN)
    assert back == PLAIN
    assert list(back) == list(PLAIN)
    assert [type(value) for value in back.values()] == [type(value) for value in PLAIN.values()]


def test_nan_payload_and_negative_zero_keep_their_bits() -> None:
    tensor = torch.tensor([0x7FC00123, -(2**31)], dtype=torch.int32).view(torch.float32)
    back = returned({"t": tensor, "s": tensor[0].clone(), "n": np.float64(-0.0)})
    assert struct.unpack("<2I", back["t"].numpy().tobytes()) == (0x7FC00123, 0x80000000)
    assert struct.unpack("<I", back["s"].numpy().tobytes()) == (0x7FC00123,)
    assert math.copysign(1, back["n"]) == -1.0


@pytest.mark.parametrize(
    "value",
    [
        Colour.RED,
        Word("x"),
        Pair(1, 2),
        defaultdict(int),
        Counter("aab"),
        bytearray(b"x"),
        object(),
        print,
        TensorLeaf("x"),
        np.str_("x"),
        np.array([None]),
        np.array(["x"]),
        np.zeros(2, dtype=[("a", "f4")]),
        np.zeros(2, dtype=">f4"),
        np.longdouble(1.0),
        np.ma.masked_array([1], [True]),
        torch.device("cpu"),
        torch.quint8,
    ],
    ids=lambda value: type(value).__name__,
)
def test_a_value_outside_the_closed_set_is_refused_by_its_path(value: object) -> None:
    with pytest.raises(RequestError) as caught:
        flatten({"outer": [1, value]}, path="item")
    assert caught.value.where == "item.outer[1]"


def test_a_subclass_as_a_key_is_refused() -> None:
    with pytest.raises(RequestError):
        flatten({Colour.RED: 1})
    with pytest.raises(RequestError):
        flatten({"s": {Word("x")}})


def test_a_container_that_contains_itself_is_refused_by_its_path() -> None:
    loop: list[Any] = [1]
    loop.append({"again": loop})
    with pytest.raises(RequestError, match="contains itself") as caught:
        flatten({"a": loop})
    assert caught.value.where == "a[1].again"


def test_deep_nesting_is_refused_and_not_a_recursion_error() -> None:
    deep: list[Any] = []
    for _ in range(5000):
        deep = [deep]
    with pytest.raises(RequestError, match="deeply"):
        flatten(deep)


def test_one_object_reached_twice_is_one_object_again() -> None:
    shared = [1]
    tensor = torch.arange(3)
    group = {"k": shared}
    back = returned({"a": shared, "b": group, "c": group, "t": tensor, "u": (tensor, {"v": tensor})})
    back["a"].append(2)
    assert back["b"] is back["c"]
    assert back["b"]["k"] == [1, 2]
    assert back["t"] is back["u"][0] is back["u"][1]["v"]


def test_equal_but_separate_objects_stay_separate() -> None:
    back = returned({"a": [1], "b": [1], "t": torch.zeros(2), "u": torch.zeros(2)})
    assert back["a"] is not back["b"]
    back["t"].fill_(1)
    assert back["u"].tolist() == [0, 0]


def test_overlapping_views_share_memory_again() -> None:
    base = torch.arange(10.0)
    back = returned({"low": base[:6], "high": base[4:], "one": base[5], "apart": torch.ones(2)})
    back["low"][5] = 100.0
    assert back["high"].tolist() == [4, 100, 6, 7, 8, 9]
    assert back["one"].item() == 100.0
    assert back["apart"].tolist() == [1, 1]


def test_a_view_of_a_huge_storage_stores_only_what_it_covers() -> None:
    """Field report B109."""
    huge = torch.zeros(2_500_000)
    _, data = stored({"alone": huge[5:15], "far": huge[2_000_000:2_000_003]})
    assert sorted(len(raw) for raw in data.values()) == [12, 40]
    _, data = stored({"left": huge[100:110], "right": huge[105:120]})
    assert [len(raw) for raw in data.values()] == [20 * 4]


def test_empty_tensors_alias_nothing() -> None:
    back = returned({"a": torch.empty(0), "b": torch.empty(0, 3, dtype=torch.int64), "c": torch.empty(2, 0)})
    assert [tuple(value.shape) for value in back.values()] == [(0,), (0, 3), (2, 0)]
    assert back["b"].dtype == torch.int64


def test_memory_order_of_a_dense_tensor_is_kept() -> None:
    image = torch.arange(2 * 3 * 4 * 5.0).reshape(2, 3, 4, 5).contiguous(memory_format=torch.channels_last)
    fortran = np.asfortranarray(np.arange(6.0).reshape(2, 3))
    back = returned({"image": image, "fortran": fortran, "row": torch.ones(1).expand(1000)})
    assert back["image"].stride() == image.stride()
    assert torch.equal(back["image"], image)
    assert back["fortran"].flags.f_contiguous
    assert back["fortran"].tolist() == fortran.tolist()
    assert back["row"].stride() == (0,)


def test_values_of_strided_and_conjugate_views_are_resolved() -> None:
    z = torch.tensor([1 + 2j, 3 - 1j])
    back = returned({"column": torch.arange(12.0).reshape(3, 4)[:, 1], "conj": z.conj(), "neg": z.clone().conj().imag})
    assert back["column"].tolist() == [1, 5, 9]
    assert back["conj"].tolist() == [1 - 2j, 3 + 1j]
    assert back["neg"].tolist() == [-2, 1]
    assert not back["conj"].is_conj()


@pytest.mark.parametrize(
    "build",
    [
        lambda: (lambda t: {"a": t, "b": t.view(torch.int32)})(torch.zeros(4)),
        lambda: (lambda z: {"a": z, "b": z.conj()})(torch.zeros(2, dtype=torch.complex64)),
        lambda: (lambda n: {"a": n, "b": n[1:]})(np.zeros(4)),
        lambda: (lambda n: {"a": n, "b": torch.from_numpy(n)})(np.zeros(4)),
    ],
)
def test_aliasing_that_cannot_be_kept_is_refused_with_both_paths(build: Any) -> None:
    with pytest.raises(RequestError, match="share") as caught:
        flatten(build())
    assert set(caught.value.where.split(" and ")) == {"a", "b"}


def test_arrays_come_back_as_writable_arrays_of_the_same_dtype() -> None:
    values = {
        dtype: np.arange(6).reshape(2, 3).astype(dtype)
        for dtype in ["?", "u1", "i1", "u2", "i2", "u4", "i4", "u8", "i8", "f2", "f4", "f8", "c8", "c16"]
    }
    values["zero_dim"] = np.array(7, dtype="i2")
    values["reversed"] = np.arange(4)[::-1]
    values["empty"] = np.zeros((0, 2), dtype="f4")
    back = returned(values)
    for key, value in values.items():
        assert type(back[key]) is np.ndarray
        assert back[key].dtype == value.dtype
        assert back[key].shape == value.shape
        assert np.array_equal(back[key], value)
        assert back[key].flags.writeable


def test_parameters_and_buffers_come_back_as_such() -> None:
    parameter = torch.nn.Parameter(torch.ones(2))
    frozen = torch.nn.Parameter(torch.ones(()), requires_grad=False)
    buffer: Any = torch.nn.Buffer(torch.ones(2), persistent=False)
    grown = (parameter * 2).sum()
    back = returned({"p": parameter, "f": frozen, "b": buffer, "g": grown, "leaf": torch.ones(2, requires_grad=True)})
    assert type(back["p"]) is torch.nn.Parameter and back["p"].requires_grad
    assert type(back["f"]) is torch.nn.Parameter and not back["f"].requires_grad
    assert isinstance(back["b"], torch.nn.Buffer) and back["b"].persistent is False
    assert back["g"].item() == 4.0 and back["g"].is_leaf and back["g"].requires_grad
    assert back["leaf"].requires_grad


@pytest.mark.parametrize("layout", ["coo", "repeated", "csr", "csc", "bsr", "bsc", "hybrid"])
def test_sparse_tensors_come_back_with_exactly_their_parts(layout: str) -> None:
    dense = torch.tensor([[0.0, 1, 0, 0], [2, 0, 0, 0], [0, 0, 0, 3], [0, 0, 0, 0]])
    tensor = {
        "coo": lambda: dense.to_sparse(),
        "repeated": lambda: torch.sparse_coo_tensor([[2, 0, 2]], [1.0, 2.0, 3.0], (4,), check_invariants=True),
        "hybrid": lambda: dense.to_sparse(1),
        "csr": lambda: dense.to_sparse_csr(),
        "csc": lambda: dense.to_sparse_csc(),
        "bsr": lambda: dense.to_sparse_bsr((2, 2)),
        "bsc": lambda: dense.to_sparse_bsc((2, 2)),
    }[layout]()
    back = returned({"s": tensor})["s"]
    assert back.layout == tensor.layout
    assert back.shape == tensor.shape
    assert torch.equal(back.to_dense(), tensor.to_dense())
    if tensor.layout == torch.sparse_coo:
        assert back.is_coalesced() == tensor.is_coalesced()
        assert torch.equal(back._indices(), tensor._indices())


def test_sparse_parts_that_reach_outside_are_damage_not_a_crash() -> None:
    plain, tensors = flatten(torch.eye(3).to_sparse_csr())
    broken = {
        name: torch.full_like(tensor, 10**6) if tensor.dtype == torch.int64 else tensor for name, tensor in tensors
    }
    with pytest.raises(CorruptionError):
        unflatten(plain, broken)


def unchecked_sparse() -> dict[str, torch.Tensor]:
    pointers, two = torch.tensor([0, 2, 2]), torch.ones(2)
    return {
        "outside": torch.sparse_coo_tensor(torch.tensor([[0, 9]]), two, (3,), check_invariants=False),
        "negative": torch.sparse_coo_tensor(torch.tensor([[0, -1]]), two, (3,), check_invariants=False),
        "said to be coalesced": torch.sparse_coo_tensor(
            torch.tensor([[2, 0]]), two, (3,), is_coalesced=True, check_invariants=False
        ),
        "unsorted": torch.sparse_csr_tensor(pointers, torch.tensor([2, 0]), two, (2, 3), check_invariants=False),
        "pointers": torch.sparse_csc_tensor(
            torch.tensor([0, 2, 1]), torch.tensor([0, 1]), two, (3, 2), check_invariants=False
        ),
    }


@pytest.mark.parametrize("how", unchecked_sparse())
def test_a_sparse_tensor_that_could_not_be_restored_is_refused_at_the_save(how: str) -> None:
    """torch does not look at indices when it makes a tensor, unless it is asked to."""
    with pytest.raises(RequestError, match=r"could not be restored \[items\.a"):
        flatten({"a": unchecked_sparse()[how]}, path="items")
    model = torch.nn.Module()
    model.register_buffer("a", unchecked_sparse()[how])
    with pytest.raises(RequestError, match=r"could not be restored \[model\.a"):
        ModuleItem("model", model).capture()


def test_a_user_dict_cannot_pose_as_a_sparse_tensor() -> None:
    with pytest.raises(RequestError, match="reserved"):
        flatten({"x": {"safepoint.sparse": "sparse_coo"}})


@given(
    st.dictionaries(
        st.one_of(st.text(), st.integers(), st.booleans(), st.none(), st.binary(), st.tuples(st.integers())), st.none()
    )
)
def test_no_two_keys_of_a_dict_share_a_segment(keys: dict[Any, None]) -> None:
    segments = [segment(key, position) for position, key in enumerate(keys)]
    assert len(set(segments)) == len(segments)
    assert all(text.isascii() and text.isprintable() and "/" not in text and text for text in segments)


def test_names_of_tensors_never_collide() -> None:
    one = torch.ones(1)
    value = {"a/b": one.clone(), "a": {"b": one.clone()}, "0": one.clone(), 0: one.clone(), "[0]": one.clone()}
    value["long"] = {"x" * 500: one.clone(), "x" * 501: one.clone()}
    _, tensors = flatten(value)
    assert len({name for name, _ in tensors}) == len(tensors) == 7
    assert max(len(name) for name, _ in tensors) < 420


def test_leaves_name_what_they_stand_for() -> None:
    base = torch.arange(4.0)
    plain, tensors = flatten({"s": torch.tensor(2), "v": base[1:], "w": base[1:]}, prefix="x")
    assert plain == {
        "s": ScalarLeaf("int64", (2).to_bytes(8, "little")),
        "v": ViewLeaf("x/v", 0, (3,), (1,)),
        "w": ViewLeaf("x/v", 0, (3,), (1,)),
    }
    assert [(name, tensor.tolist()) for name, tensor in tensors] == [("x/v", [1, 2, 3])]


@pytest.mark.parametrize(
    "plain",
    [
        TensorLeaf("absent"),
        ViewLeaf("flat", 2, (3,), (1,)),
        ViewLeaf("flat", 0, (2, 2), (1,)),
        TensorLeaf("flat", container="module"),
        ScalarLeaf("float32", b"\x00"),
        ScalarLeaf("no_such", b"\x00"),
        [Same(0)],
        Shared(0, [Same(0)]),
    ],
)
def test_a_tree_that_contradicts_itself_is_damage(plain: object) -> None:
    with pytest.raises(CorruptionError):
        unflatten(plain, {"flat": torch.zeros(4)})


def test_a_device_that_is_absent_falls_back_to_the_cpu() -> None:
    """Field report B103."""
    kind = "xpu" if not torch.xpu.is_available() else "mps"
    back = unflatten(TensorLeaf("t", device=kind), {"t": torch.ones(2)})
    assert back.device.type == "cpu"
