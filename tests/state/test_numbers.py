"""Tensors of one value are read together to the byte as one at a time."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from safepoint.format.dtypes import DTYPES
from safepoint.state.numbers import bytes_of_scalars, highest, scalar_bytes


def _of_bytes(name: str, fill: int) -> torch.Tensor:
    dtype = getattr(torch, name)
    data = torch.full((torch.empty(0, dtype=dtype).itemsize,), fill % 2 if name == "bool" else fill, dtype=torch.uint8)
    return data.view(dtype).reshape(())


NAMES = [name for name in DTYPES if isinstance(getattr(torch, name, None), torch.dtype)]
VIEWS: dict[str, Callable[[], torch.Tensor]] = {
    "conjugate": lambda: torch.tensor(1 + 2j).conj(),
    "negative": lambda: torch.tensor(1 + 2j).conj().imag,
    "of a vector": lambda: torch.arange(5.0)[3],
    "with a gradient": lambda: torch.tensor(3.0, requires_grad=True),
}


@pytest.mark.parametrize("name", NAMES)
def test_numbers_of_one_dtype_are_read_as_they_lie_in_memory(name: str) -> None:
    tensors = [_of_bytes(name, fill) for fill in (1, 2, 3)]

    found = bytes_of_scalars(tensors)

    assert found == [bytes([fill % 2 if name == "bool" else fill]) * tensors[0].itemsize for fill in (1, 2, 3)]


@pytest.mark.parametrize("view", list(VIEWS))
def test_numbers_of_many_kinds_are_read_together_as_one_at_a_time(view: str) -> None:
    tensors = [_of_bytes(name, 7) for name in NAMES]
    tensors.insert(3, VIEWS[view]())

    assert bytes_of_scalars(tensors) == [scalar_bytes(one) for one in tensors]


def test_no_numbers_are_no_bytes() -> None:
    assert bytes_of_scalars([]) == []


def test_the_highest_of_counts_is_told_apart_by_dtype_too() -> None:
    # The first two have the same bytes.
    counts = [torch.tensor(1, dtype=torch.int32), torch.tensor(2**-149, dtype=torch.float32), torch.tensor(3.0)]

    assert highest(counts) == 3
    assert highest([counts[1], counts[0]]) == highest([counts[0], counts[1]]) == 1
    assert highest([torch.tensor([7.0]), 9, torch.tensor(8)]) == highest([9, torch.tensor(8)]) == 9
    assert highest([]) is None
