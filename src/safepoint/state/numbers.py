"""Tensors without an axis, which are numbers of the plain tree: as bytes, and back."""

from __future__ import annotations

import torch

from safepoint.errors import RequestError
from safepoint.state.memory import as_memory, is_direct
from safepoint.state.tensors import dtype_of


def scalar_bytes(tensor: torch.Tensor) -> bytes:
    """Return the bytes of a tensor of one element."""
    if not is_direct(tensor, tensor.dtype):
        tensor = tensor.detach().resolve_conj().resolve_neg().reshape(1).cpu()
    return bytes(as_memory(tensor))


def scalar_tensor(dtype: str, data: bytes) -> torch.Tensor:
    """Return the 0-dim host tensor of these bytes.

    Raises:
        RequestError: The dtype is unknown here, or the number of bytes is not its size.
    """
    value = torch.empty(1, dtype=dtype_of(dtype))
    if len(data) != value.element_size():
        raise RequestError(
            "a stored scalar has the wrong size", where=dtype, expected=value.element_size(), found=len(data)
        )
    as_memory(value)[:] = data
    return value.reshape(())
