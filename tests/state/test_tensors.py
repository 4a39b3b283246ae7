"""Bytes of single tensors: read from live memory, written into live memory, refused when they are no exact picture."""

from __future__ import annotations

import struct
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from safepoint.errors import InternalError, RequestError, TornSnapshotError
from safepoint.format.dtypes import DTYPES
from safepoint.state.item import TensorSpec
from safepoint.state.memory import direct_addresses, hold_memory
from safepoint.state.targets import InPlaceTarget, NewTensorTarget
from safepoint.state.tensors import (
    TensorSource,
    are_plainly_storable,
    check_storable,
    dtype_of,
)
from tests.state.roundtrip import read


def fill(target: Any, data: bytes) -> None:
    target.memory()[:] = data
    target.commit()


def test_bytes_are_little_endian_and_in_c_order() -> None:
    tensor = torch.tensor([[1.0, 2.0], [3.0, 4.0]])
    assert read(TensorSource(tensor)) == struct.pack("<4f", 1, 2, 3, 4)
    assert read(TensorSource(tensor.t())) == struct.pack("<4f", 1, 3, 2, 4)
    assert read(TensorSource(tensor[:, 1])) == struct.pack("<2f", 2, 4)


def test_a_source_reads_when_asked_and_not_before() -> None:
    tensor = torch.zeros(2)
    source = TensorSource(tensor)
    tensor.fill_(5)
    assert read(source) == struct.pack("<2f", 5, 5)


def test_a_buffer_of_the_wrong_size_is_refused() -> None:
    with pytest.raises(InternalError):
        TensorSource(torch.zeros(2)).copy_into(memoryview(bytearray(7)))


@pytest.mark.parametrize("name", [name for name in DTYPES if hasattr(torch, name)])
def test_every_dtype_of_the_table_goes_through_bytes(name: str) -> None:
    size = DTYPES[name].size_bytes
    raw = bytes(number % 2 for number in range(3 * size))
    target = NewTensorTarget(TensorSpec("t", name, (3,), (3,), (0,)), torch.device("cpu"))
    fill(target, raw)
    assert target.tensor is not None
    assert target.tensor.dtype == dtype_of(name)
    assert target.tensor.element_size() == size
    assert read(TensorSource(target.tensor)) == raw
    live = torch.zeros(3 * size, dtype=torch.uint8).view(dtype_of(name))
    fill(InPlaceTarget(live), raw)
    assert bytes(live.view(torch.uint8).tolist()) == raw


def test_in_place_restore_keeps_identity_memory_and_grad_flags() -> None:
    parameter = torch.nn.Parameter(torch.zeros(3))
    address = parameter.data_ptr()
    fill(InPlaceTarget(parameter), struct.pack("<3f", 1, 2, 3))
    assert parameter.tolist() == [1, 2, 3]
    assert parameter.data_ptr() == address
    assert parameter.requires_grad and parameter.is_leaf and parameter.grad_fn is None


@pytest.mark.parametrize("grad_enabled", [True, False])
def test_in_place_restore_is_seen_by_autograd_as_a_change(grad_enabled: bool) -> None:
    weight = torch.ones(3, requires_grad=True)
    loss = (weight * weight).sum()
    with torch.set_grad_enabled(grad_enabled):
        fill(InPlaceTarget(weight), struct.pack("<3f", 1, 2, 3))
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_a_strided_live_tensor_takes_the_bytes_in_its_own_layout() -> None:
    base = torch.zeros(3, 4)
    fill(InPlaceTarget(base[:, 1]), struct.pack("<3f", 1, 2, 3))
    assert base.sum().item() == 6 and base[2, 1].item() == 3


def test_an_expanded_tensor_takes_each_of_its_elements_once() -> None:
    base = torch.zeros(2, 1)
    fill(InPlaceTarget(base.expand(2, 3)), struct.pack("<6f", 1, 1, 1, 2, 2, 2))
    assert base.tolist() == [[1], [2]]


def test_an_inference_tensor_can_be_filled() -> None:
    with torch.inference_mode():
        direct, strided = torch.zeros(2), torch.zeros(2, 2)[:, 0]
    fill(InPlaceTarget(direct), struct.pack("<2f", 1, 2))
    fill(InPlaceTarget(strided), struct.pack("<2f", 3, 4))
    assert direct.tolist() == [1, 2] and strided.tolist() == [3, 4]


def test_a_target_of_another_dtype_converts() -> None:
    live = torch.zeros(2, dtype=torch.float64)
    target = InPlaceTarget(live, dtype=torch.float32)
    assert target.nbytes == 8
    fill(target, struct.pack("<2f", 0.5, 2))
    assert live.tolist() == [0.5, 2]


class Plain(torch.Tensor):
    pass


def _fake() -> torch.Tensor:
    with FakeTensorMode():
        return torch.empty(2)


def _batched() -> torch.Tensor:
    found: list[torch.Tensor] = []
    torch.vmap(lambda row: found.append(row) or row)(torch.zeros(2, 3))
    return found[0]


def _freed() -> torch.Tensor:
    tensor = torch.ones(4)
    tensor.untyped_storage().resize_(0)
    return tensor


@pytest.mark.parametrize(
    "build",
    [
        lambda: torch.empty(2, device="meta"),
        lambda: torch._efficientzerotensor((2,)),
        _fake,
        _freed,
        lambda: torch._to_functional_tensor(torch.zeros(2)),
        _batched,
        lambda: torch.quantize_per_tensor(torch.ones(2), 0.1, 0, torch.qint8),
        lambda: torch.nested.nested_tensor([torch.ones(1), torch.ones(2)], layout=torch.strided),
        lambda: torch.nested.nested_tensor([torch.ones(1), torch.ones(2)], layout=torch.jagged),
        lambda: torch.ones(2).as_subclass(Plain),
        lambda: torch.nn.UninitializedParameter(),
        lambda: torch.zeros(2, dtype=torch.complex32),
        lambda: torch.ones(2, 2).to_mkldnn(),
    ],
    ids=[
        *("meta", "zero", "fake", "freed", "functional", "batched", "quantised", "nested", "jagged", "subclass"),
        *("lazy", "complex32", "mkldnn"),
    ],
)
def test_a_tensor_without_an_exact_picture_is_refused_by_its_path(build: Any) -> None:
    with pytest.raises(RequestError) as caught:
        check_storable(build(), "model.odd")
    assert caught.value.where == "model.odd"
    assert caught.value.remedy
    assert not are_plainly_storable([torch.ones(2), build(), torch.ones(2)])


@pytest.mark.parametrize(
    "other",
    [
        torch.ones(2, 3).t(),
        torch.ones(1).expand(3),
        torch.eye(2).to_sparse(),
        torch.eye(2).to_sparse_csr(),
    ],
    ids=["transposed", "expanded", "sparse", "csr"],
)
def test_what_is_storable_in_another_way_is_not_plainly_so(other: torch.Tensor) -> None:
    plain = [torch.ones(2), torch.empty(0, 3), torch.tensor(1), torch.nn.Parameter(torch.ones(2)), torch.ones(9)[3:5]]
    assert are_plainly_storable(plain)
    check_storable(other, "model.other")
    assert not are_plainly_storable([*plain, other])


def test_a_distributed_tensor_is_refused_with_a_remedy() -> None:
    fake = type("DTensor", (torch.Tensor,), {"__module__": "torch.distributed.tensor"})
    with pytest.raises(RequestError, match="distributed over ranks"):
        check_storable(torch.ones(2).as_subclass(fake), "model.w")


def test_a_tensor_that_is_written_to_before_it_is_read_is_torn() -> None:
    live = torch.zeros(3)
    source = TensorSource.of(live, "model: weight")
    source.copy_into(memoryview(bytearray(12)))
    live.add_(1)
    with pytest.raises(TornSnapshotError, match="model: weight"):
        source.copy_into(memoryview(bytearray(12)))


@pytest.mark.parametrize("read", [lambda one: one.copy_into(memoryview(bytearray(16))), lambda one: one.in_place()])
def test_a_tensor_that_loses_its_memory_before_it_is_read_is_named(read: Callable[[TensorSource], object]) -> None:
    tensor = torch.ones(4)
    source = TensorSource.of(tensor, "model: weight")
    tensor.untyped_storage().resize_(0)
    with pytest.raises(TornSnapshotError, match=r"resized.*model: weight"):
        read(source)


@pytest.mark.parametrize(
    "live",
    [torch.tensor([1 + 2j]).conj().imag, torch.arange(6.0).reshape(2, 3)[1:, 1:2].as_strided((1, 1), (3, 2))],
    ids=["imaginary part", "an odd stride"],
)
def test_one_element_of_any_stride_is_stored_and_added_up(live: torch.Tensor) -> None:
    source, buffer = TensorSource(live), bytearray(4)
    source.copy_into(memoryview(buffer))
    assert struct.unpack("<f", buffer) == (live.item(),)
    assert source.checksum() == struct.unpack("<i", buffer)[0] % 2**64


@pytest.mark.parametrize(
    "other",
    [
        torch.rand(3, 2).t(),
        torch.rand(3, dtype=torch.complex64).conj(),
        torch.rand(3, dtype=torch.complex64).conj().imag.view(1, 3)[:, :1].view(1),
        torch.rand(3, device="meta"),
    ],
    ids=["transposed", "conjugate", "negative", "elsewhere"],
)
def test_of_many_only_those_have_an_address_whose_bytes_lie_as_they_are_stored(other: torch.Tensor) -> None:
    plain = torch.rand(4)[2:]
    sources = [TensorSource(plain), TensorSource(other), TensorSource(plain)]
    assert TensorSource.addresses(sources) == [plain.data_ptr(), 0, plain.data_ptr()]
    assert [held and held.address for held in TensorSource.hold(sources)] == [plain.data_ptr(), None, plain.data_ptr()]


def test_memory_is_asked_for_anew_where_a_tensor_has_moved_since_it_was_seen() -> None:
    still, moved, turned = torch.ones(2, 3), torch.ones(2, 3), torch.ones(2, 3)
    tensors = [still, moved, turned]
    before = direct_addresses(tensors)

    assert direct_addresses(tensors, before=before) == before
    moved.data = torch.zeros(2, 3)
    turned.data = torch.zeros(3, 2).t()

    found = direct_addresses(tensors, before=before)
    assert found == [still.data_ptr(), moved.data_ptr(), 0] != before
    assert [held and held.address for held in hold_memory(tensors, before=before)] == [*found[:2], None]
