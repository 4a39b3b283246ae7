"""The memory of live tensors: where it lies, a view of its bytes, and how often it was written to."""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Callable, Sequence
from operator import add, attrgetter
from typing import Any

import torch

from safepoint.state.item import Held, Place

_LAYOUT, _SIZE_BYTES = attrgetter("layout"), attrgetter("nbytes")
_STRIDED = frozenset({torch.strided})

# Memory of no length in particular; a type for each length would take longer to make than a small tensor to copy.
_Memory = ctypes.c_char * sys.maxsize

_IS_CPU = attrgetter("is_cpu")
_LOCATE: Callable[[torch.UntypedStorage], Callable[[], int]] = attrgetter("data_ptr")
_VERSION = attrgetter("_version")


def is_direct(live: torch.Tensor, dtype: torch.dtype) -> bool:
    """Return whether a tensor's own memory holds its values of a dtype in stored form."""
    return live.is_cpu and live.dtype == dtype and is_dense(live)


def is_dense(live: torch.Tensor) -> bool:
    """Return whether the memory of a tensor, on whatever device, holds its values in stored form."""
    return live.is_contiguous() and not live.is_conj() and not live.is_neg()


def are_direct(tensors: Sequence[torch.Tensor]) -> bool:
    """Return whether the memory of each tensor is host memory, and holds its values in stored form."""
    kind = torch.Tensor
    return (
        all(map(_IS_CPU, tensors))
        and all(map(kind.is_contiguous, tensors))
        and not any(map(kind.is_conj, tensors))
        and not any(map(kind.is_neg, tensors))
    )


def direct_addresses(tensors: Sequence[torch.Tensor], *, before: Sequence[int | None] = ()) -> list[int]:
    """Return where the memory of each tensor begins; 0 for one that does not hold its values in stored form.

    Args:
        tensors: The tensors.
        before: Where each was seen to begin when it held them so: if all still begin there, no more is asked.
    """
    begins = list(map(torch.Tensor.data_ptr, tensors))
    if begins == before or are_direct(tensors):
        return begins
    return [begin if is_direct(one, one.dtype) else 0 for one, begin in zip(tensors, begins, strict=True)]


def hold_memory(tensors: Sequence[torch.Tensor], *, before: Sequence[int | None] = ()) -> list[Held | None]:
    """Return where the memory of each tensor begins, and keep it there; None where `direct_addresses` returns 0."""
    addresses = direct_addresses(tensors, before=before)
    # Not the tensors, because a parameter may be given other memory, by `data =`.
    storages = list(map(torch.Tensor.untyped_storage, tensors))
    begins = map(torch.UntypedStorage.data_ptr, storages)
    held = map(Held, addresses, begins, map(_LOCATE, storages))
    return [one if one.address else None for one in held]


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


def as_memories(tensors: Sequence[torch.Tensor]) -> list[memoryview]:
    """Return `as_memory` of each tensor; each view keeps the memory of all of them."""
    memory: Any = _Memory.from_address(0)
    memory.owner = list(map(torch.Tensor.untyped_storage, tensors))
    begins = list(map(torch.Tensor.data_ptr, tensors))
    ranges = map(slice, begins, map(add, begins, map(_SIZE_BYTES, tensors)))
    return list(map(memoryview(memory).cast("B").__getitem__, ranges))


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


def ranges_of(tensors: Sequence[torch.Tensor]) -> list[tuple[int, int]]:
    """Return the ranges of those that are strided; see `byte_range`."""
    if not _STRIDED.issuperset(map(_LAYOUT, tensors)) or not all(map(torch.Tensor.is_contiguous, tensors)):
        return [byte_range(one) for one in tensors if one.layout is torch.strided]
    begins = list(map(torch.Tensor.data_ptr, tensors))
    ends = map(add, begins, map(_SIZE_BYTES, tensors))
    return [(begin, end) if end > begin else (0, 0) for begin, end in zip(begins, ends, strict=True)]


def flat(dense: torch.Tensor) -> torch.Tensor:
    """Return a contiguous tensor with one axis; `reshape` keeps any stride of a single element."""
    return dense.as_strided((dense.numel(),), (1,))


def is_freed(tensor: torch.Tensor) -> bool:
    """Return whether a strided tensor reaches beyond its storage, which was resized."""
    start, end = byte_range(tensor)
    return tensor.untyped_storage().nbytes() < tensor.storage_offset() * tensor.element_size() + end - start


def place_at(address: int, tensor: torch.Tensor) -> Place | None:
    """Return a place in memory as a tensor is now; None for a tensor that does not count its writes."""
    writes = version_of(tensor)
    return None if writes is None else Place(address, writes)


def places_at(addresses: Sequence[int], tensors: Sequence[torch.Tensor]) -> list[Place | None]:
    """Return `place_at` each address; None where it is 0, which is that of no memory."""
    versions = versions_of(tensors)
    if None not in versions and all(addresses):
        return list(map(Place, addresses, versions))  # type: ignore[arg-type]  # the line above says that none is None
    return [
        None if version is None or not address else Place(address, version)
        for address, version in zip(addresses, versions, strict=True)
    ]


def version_of(tensor: torch.Tensor) -> int | None:
    """Return how often a tensor was written to in place; None for one that does not count."""
    try:
        return tensor._version
    except RuntimeError:
        # An inference tensor. Asking of each whether it is one takes longer than asking for its version.
        return None


def versions_of(tensors: Sequence[torch.Tensor]) -> list[int | None]:
    """Return `version_of` each tensor."""
    try:
        return list(map(_VERSION, tensors))
    except RuntimeError:
        return list(map(version_of, tensors))


def all_writes_of(tensors: Sequence[torch.Tensor], counters: Sequence[torch.Tensor | None]) -> list[int | None]:
    """Return `writes_of` each tensor and its counter."""
    found, counting = versions_of(tensors), [one for one in counters if one is not None]
    if not counting:
        return found
    others = iter(versions_of(counting))
    counts = [0 if counter is None else next(others) or 0 for counter in counters]
    return [None if own is None else own + count for own, count in zip(found, counts, strict=True)]


def writes_of(tensor: torch.Tensor, counter: torch.Tensor | None) -> int | None:
    """Return how often a tensor was written to, by itself and by way of another one that counts as well."""
    own = version_of(tensor)
    return own if own is None or counter is None else own + (version_of(counter) or 0)
