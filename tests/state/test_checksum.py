"""A tensor's checksum: a sum of whole numbers where it lies, equal for equal bytes whatever the memory behind them."""

from __future__ import annotations

import struct

import pytest
import torch

from safepoint.state.tensors import TensorSource

CODES = {1: "b", 2: "h", 4: "i", 8: "q"}


@pytest.mark.parametrize(
    "dtype",
    [torch.uint8, torch.bool, torch.bfloat16, torch.int16, torch.float32, torch.float64, torch.complex64]
    + [torch.complex128, torch.float8_e4m3fn],
    ids=str,
)
def test_it_is_the_sum_of_the_words(dtype: torch.dtype) -> None:
    tensor = (torch.arange(60).reshape(5, 12) - 30).to(torch.float32).to(dtype)
    source = TensorSource(tensor)
    data = bytearray(source.nbytes)
    source.copy_into(memoryview(data))
    size = min(tensor.element_size(), 8)
    words = struct.unpack(f"<{len(data) // size}{CODES[size]}", data)
    assert source.checksum() == sum(words) % 2**64


def test_it_tells_one_bit_and_not_the_memory_behind() -> None:
    tensor = torch.linspace(-1, 1, 77, dtype=torch.float32)
    other = torch.stack([tensor, tensor], dim=1)[:, 1]
    assert TensorSource(other).checksum() == TensorSource(tensor).checksum()
    flipped = tensor.clone()
    flipped.view(torch.int32)[50] ^= 1
    assert TensorSource(flipped).checksum() != TensorSource(tensor).checksum()


def test_it_is_linear_in_the_rows() -> None:
    tensor = torch.linspace(-1, 1, 84).reshape(7, 12)
    parts = [TensorSource(tensor).rows(start, start + 1).checksum() for start in range(7)]
    assert sum(parts) % 2**64 == TensorSource(tensor).checksum()


def test_rows_are_read_alone() -> None:
    source = TensorSource(torch.arange(12).reshape(4, 3)).rows(1, 3)
    data = bytearray(source.nbytes)
    source.copy_into(memoryview(data))
    assert struct.unpack("<6q", data) == (3, 4, 5, 6, 7, 8)
