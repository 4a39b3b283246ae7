"""Many targets, and many sources, asked at once: they tell and do what each of them does by itself."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch

from safepoint.restoring.live import commit, memories_of, places_of
from safepoint.state.item import Place, TensorSpec
from safepoint.state.targets import InPlaceTarget, NewTensorTarget
from safepoint.state.tensors import TensorSource

HOST = torch.device("cpu")


def plain() -> torch.Tensor:
    return torch.zeros(3, 5)


def parameter() -> torch.Tensor:
    return torch.nn.Parameter(torch.zeros(7))


def transposed() -> torch.Tensor:
    return torch.zeros(4, 6).t()


def empty() -> torch.Tensor:
    return torch.zeros(0, 4)


def of_inference() -> torch.Tensor:
    with torch.inference_mode():
        return torch.zeros(6)


def spec(*shape: int) -> TensorSpec:
    return TensorSpec("t", "float32", shape, shape, (0,) * len(shape))


def in_place(make: Callable[[], torch.Tensor]) -> Any:
    return InPlaceTarget(make())


KINDS: list[Callable[[], Any]] = [
    lambda: in_place(plain),
    lambda: in_place(parameter),
    lambda: InPlaceTarget(plain(), dtype=torch.float64),
    lambda: in_place(transposed),
    lambda: in_place(empty),
    lambda: in_place(of_inference),
    lambda: NewTensorTarget(spec(2, 3), HOST),
    lambda: NewTensorTarget(spec(0), HOST),
    lambda: NewTensorTarget(spec(4), torch.device("meta")),
]


def made(numbers: Sequence[int]) -> list[Any]:
    return [KINDS[number]() for number in numbers]


def bytes_for(target: Any, number: int) -> bytes:
    return bytes((number + place) % 251 for place in range(target.nbytes))


ORDERS = [[0, 1, 0], [6, 7, 6], [1, 5, 0], [4, 0, 1], [2, 0], [3, 0], list(range(8)), [8, 6]]


@pytest.mark.parametrize("numbers", ORDERS)
def test_targets_asked_at_once_take_the_bytes_that_each_takes_by_itself(numbers: list[int]) -> None:
    alone, together = made(numbers), made(numbers)
    for number, target in enumerate(alone):
        target.memory()[:] = bytes_for(target, number)
    for number, (target, memory) in enumerate(zip(together, memories_of(together), strict=True)):
        memory[:] = bytes_for(target, number)
    before = [None if one.tensor is None or one.tensor.is_inference() else one.tensor._version for one in together]
    places_alone, places = [one.commit() for one in alone], commit(together)
    for number, (one, other) in enumerate(zip(alone, together, strict=True)):
        assert other.tensor.dtype == one.tensor.dtype
        assert other.tensor.is_meta or torch.equal(one.tensor, other.tensor), number
        if before[number] is not None:
            # An empty tensor has nothing that could have been written.
            assert (other.tensor._version > before[number]) == (other.tensor.numel() > 0)
        place, place_alone = places[number], places_alone[number]
        if other.tensor.numel():
            assert (place is None) == (place_alone is None)
        if place is not None:
            assert place == Place(other.tensor.data_ptr(), other.tensor._version)


def test_a_tensor_given_other_memory_before_it_is_committed_has_not_the_place_it_was_read_into() -> None:
    target = in_place(plain)
    other = in_place(plain)
    memories_of([target, other])
    before, target.tensor.data = target.tensor.data, torch.ones(3, 5)
    (place, _) = commit([target, other])
    assert place is not None
    assert place.address == before.data_ptr() != target.tensor.data_ptr()


def test_the_memory_of_many_lives_as_long_as_one_view_of_it() -> None:
    tensors = [torch.full((64,), float(number)) for number in range(3)]
    memories = memories_of([InPlaceTarget(one) for one in tensors])
    expected = [bytes(one.numpy().tobytes()) for one in tensors]
    storages = [weakref.ref(one.untyped_storage()) for one in tensors]
    kept = memories[1]
    del tensors, memories
    gc.collect()
    assert all(one() is not None for one in storages)
    assert bytes(kept) == expected[1]
    del kept
    gc.collect()
    assert [one() for one in storages] == [None] * 3


@pytest.mark.parametrize("kinds", [[plain, parameter], [plain, of_inference], [transposed, plain], [empty, plain]])
def test_places_of_many_sources_are_those_of_each(kinds: list[Callable[[], torch.Tensor]]) -> None:
    sources = [TensorSource.of(kind(), "t") for kind in kinds]
    for found, source in zip(places_of(sources), sources, strict=True):
        assert found == source.place() or (found is None and source.nbytes == 0)
