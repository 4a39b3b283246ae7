"""Tensors without an axis, which are numbers of the plain tree: as bytes, and back."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from operator import attrgetter
from typing import Any

import torch

from safepoint.errors import RequestError
from safepoint.state.memory import as_memory, is_direct
from safepoint.state.tensors import PLAIN_TYPES, dtype_of

_DTYPE, _IS_COMPLEX = attrgetter("dtype"), attrgetter("is_complex")
_IS_CPU, _LAYOUT, _REQUIRES_GRAD = attrgetter("is_cpu"), attrgetter("layout"), attrgetter("requires_grad")
_STRIDED = frozenset({torch.strided})
_RAW: Callable[[object], bytes] = attrgetter("raw")


def scalar_bytes(tensor: torch.Tensor) -> bytes:
    """Return the bytes of a tensor of one element."""
    if not is_direct(tensor, tensor.dtype):
        tensor = tensor.detach().resolve_conj().resolve_neg().reshape(1).cpu()
    return bytes(as_memory(tensor))


def bytes_of_scalars(tensors: Sequence[torch.Tensor]) -> list[bytes]:
    """Return the bytes of plain tensors of one element each; those of one accelerator are fetched together."""
    dtypes = set(map(_DTYPE, tensors))
    is_simple = len(dtypes) == 1 and not any(map(_IS_COMPLEX, dtypes))
    if is_simple and all(map(_IS_CPU, tensors)) and not any(map(torch.Tensor.is_neg, tensors)):
        # A view of each one's memory would take longer to make than all else that is done with it.
        held = ctypes.c_char * tensors[0].itemsize
        return list(map(_RAW, map(held.from_address, map(torch.Tensor.data_ptr, tensors))))
    found = [b""] * len(tensors)
    for device in {one.device for one in tensors}:
        numbers = [number for number, one in enumerate(tensors) if one.device == device]
        fetched = bytes(as_memory(torch.cat([_bytes_of(tensors[number]) for number in numbers]).cpu()))
        begin = 0
        for number in numbers:
            end = begin + tensors[number].itemsize
            found[number], begin = fetched[begin:end], end
    return found


def are_plain_numbers(tensors: Sequence[Any]) -> bool:
    """Return whether all are nothing but tensors without an axis in host memory, and can be written to here and now."""
    if not {torch.Tensor}.issuperset(map(type, tensors)) or not _STRIDED.issuperset(map(_LAYOUT, tensors)):
        return False
    if any(map(torch.Tensor.dim, tensors)) or not all(map(_IS_CPU, tensors)) or any(map(_REQUIRES_GRAD, tensors)):
        return False
    return not any(map(torch.Tensor.is_inference, tensors)) and not torch.is_inference_mode_enabled()


def highest(counts: Sequence[Any]) -> int | None:
    """Return the highest of numbers and tensors of one element; None of none."""
    if PLAIN_TYPES.issuperset(map(type, counts)) and not any(map(torch.Tensor.dim, counts)):
        # Nearly all are equal, and each one of an accelerator would be waited for.
        read = zip(bytes_of_scalars(counts), map(_DTYPE, counts), strict=True)
        counts = list(dict(zip(read, counts, strict=True)).values())
    return max(map(int, counts), default=None)


def scalar_tensor(dtype: str, data: bytes) -> torch.Tensor:
    """Return the 0-dim host tensor of these bytes.

    Raises:
        RequestError: The dtype is unknown here, or the number of bytes is not its size.
    """
    value = torch.empty(1, dtype=dtype_of(dtype), device="cpu")
    if len(data) != value.element_size():
        raise RequestError(
            "a stored scalar has the wrong size", where=dtype, expected=value.element_size(), found=len(data)
        )
    as_memory(value)[:] = data
    return value.reshape(())


def _bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().resolve_conj().resolve_neg().reshape(1).view(torch.uint8)
