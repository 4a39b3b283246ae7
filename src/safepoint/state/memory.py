"""The memory of live tensors: where it lies, and a view of its bytes."""

from __future__ import annotations

import ctypes
import sys
from typing import Any

import torch

# Memory of no length in particular; a type for each length would take longer to make than a small tensor to copy.
_Memory = ctypes.c_char * sys.maxsize


def is_direct(live: torch.Tensor, dtype: torch.dtype) -> bool:
    """Return whether a tensor's own memory holds its values of a dtype in stored form."""
    return live.is_cpu and live.is_contiguous() and not live.is_conj() and not live.is_neg() and live.dtype == dtype


def as_bytes(dense: torch.Tensor) -> torch.Tensor:
    """Return the bytes of a contiguous tensor as a one-dimensional uint8 view."""
    return flat(dense).view(torch.uint8)


def as_memory(dense: torch.Tensor) -> memoryview:
    """Return the writable memory of a contiguous host tensor as bytes.

    Not by way of `Tensor.numpy`, which forbids for good that the storage is resized: a save must not change that.
    """
    memory: Any = _Memory.from_address(dense.data_ptr())
    # The view keeps what it shows, also where the tensor is given another storage meanwhile.
    memory.owner = dense.untyped_storage()
    return memoryview(memory).cast("B")[: dense.nbytes]


def byte_range(tensor: torch.Tensor) -> tuple[int, int]:
    """Return the half-open range of addresses of a strided tensor; that of a tensor of no bytes overlaps with none."""
    size_bytes = tensor.nbytes
    if size_bytes == 0:
        return (0, 0)
    if tensor.is_contiguous():
        start = tensor.data_ptr()
        return (start, start + size_bytes)
    reach = sum((length - 1) * stride for length, stride in zip(tensor.shape, tensor.stride(), strict=True))
    start = tensor.data_ptr()
    return (start, start + (reach + 1) * tensor.element_size())


def flat(dense: torch.Tensor) -> torch.Tensor:
    """Return a contiguous tensor with one axis; `reshape` keeps any stride of a single element."""
    return dense.as_strided((dense.numel(),), (1,))


def is_freed(tensor: torch.Tensor) -> bool:
    """Return whether a strided tensor reaches beyond its storage, which was resized."""
    start, end = byte_range(tensor)
    return tensor.untyped_storage().nbytes() < tensor.storage_offset() * tensor.element_size() + end - start
