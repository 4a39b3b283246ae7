"""Which tensors of one state share memory, and the stretch of memory that each such family covers.

Tensors whose byte ranges overlap, directly or through a third one, make one family. A family is stored as one flat
stretch, from its lowest to its highest byte, and each member as a view of it: never the whole storage behind it.
Tensors of no bytes alias nothing, whatever address they report.

Ranges decide, not elements: two columns of one matrix are a family although they have no element in common, so that
they share memory again after a restore.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from operator import add, attrgetter, itemgetter, le

import msgspec
import torch

from safepoint.errors import RequestError
from safepoint.state.memory import byte_range
from safepoint.state.portions import facts_of

_SIZE = attrgetter("nbytes")
_BEGIN, _END = itemgetter(0), itemgetter(1)


class Occupant(msgspec.Struct, frozen=True):
    """Say what a value of the state occupies: `key` identifies it, `path` is for messages.

    `is_array` marks a numpy array, seen here through a tensor that shares its memory, and `is_shard` a distributed
    tensor, seen through its local memory.
    """

    key: int
    tensor: torch.Tensor
    path: str
    is_array: bool = False
    is_shard: bool = False


@dataclass(frozen=True, slots=True)
class Span:
    """Hold a family's flat stretch as a one-dimensional tensor; `start` is its address in bytes.

    It is a view of `origin`, a member.
    """

    flat: torch.Tensor
    start: int
    origin: torch.Tensor

    def offset_of(self, member: torch.Tensor) -> int:
        """Return where a member begins in the stretch, counted in elements."""
        return (member.data_ptr() - self.start) // member.element_size()


def find_spans(occupants: Sequence[Occupant]) -> dict[int, Span]:
    """Return the span of each occupant that must be stored as a view, by key.

    Those are the members of a family of two or more, and a single tensor whose strides say more than its values: dense
    memory in another order than C (a transpose, channels last), or elements repeated by a stride of 0.

    Raises:
        RequestError: Members of a family differ in dtype or are conjugate views, or one of them is a numpy array or a
            distributed tensor.
    """
    spans: dict[int, Span] = {}
    for family in _families(occupants):
        if len(family) > 1:
            span = _span_of_many(family)
        elif not family[0].is_shard and _is_reordered(family[0].tensor):
            span = _flat([family[0].tensor])
        else:
            continue
        spans.update((member.key, span) for member in family)
    return spans


def are_apart(tensors: Sequence[torch.Tensor]) -> bool:
    """Return whether no two tensors overlap, so that none has a span, of tensors that are `are_plainly_storable`."""
    return are_disjoint(*facts_of(tensors, (partial(map, torch.Tensor.data_ptr), partial(map, _SIZE))))


def are_disjoint(begins: Sequence[int], sizes: Sequence[int]) -> bool:
    """Return whether no two ranges of memory overlap."""
    ranges = sorted(zip(begins, map(add, begins, sizes), strict=True))
    return all(map(le, map(_END, ranges), map(_BEGIN, ranges[1:])))


def _families(occupants: Sequence[Occupant]) -> list[list[Occupant]]:
    placed = sorted((_device_name(one.tensor.device), *byte_range(one.tensor), n) for n, one in enumerate(occupants))
    families: list[list[Occupant]] = []
    device, reached = "", 0
    for where, start, end, number in placed:
        if where == device and start < reached:
            families[-1].append(occupants[number])
            reached = max(reached, end)
        else:
            families.append([occupants[number]])
            device, reached = where, end
    return families


@functools.cache
def _device_name(device: torch.device) -> str:
    return str(device)


def _is_reordered(tensor: torch.Tensor) -> bool:
    if tensor.is_contiguous() or tensor.is_conj() or tensor.is_neg():
        return False
    start, end = byte_range(tensor)
    return end - start <= tensor.numel() * tensor.element_size()


def _span_of_many(family: list[Occupant]) -> Span:
    first = family[0]
    for other in family:
        if other.is_array or first.is_array:
            array, peer = (other, first) if other.is_array else (first, other)
            peer = family[1] if peer is array else peer
            raise _refused(array, peer, "a numpy array shares memory with another value of the state")
        if other.is_shard or first.is_shard:
            peer = family[1] if other is first else first
            raise _refused(other, peer, "a tensor distributed over ranks shares memory with another value of the state")
        if other.tensor.dtype != first.tensor.dtype:
            raise _refused(first, other, "tensors of two dtypes share memory")
        if other.tensor.is_conj() or other.tensor.is_neg():
            raise _refused(other, family[1] if other is first else first, "a conjugate view shares memory")
        if other.tensor.untyped_storage().data_ptr() != first.tensor.untyped_storage().data_ptr():
            raise _refused(first, other, "two storages lie on the same memory")
        if (other.tensor.data_ptr() - first.tensor.data_ptr()) % first.tensor.element_size():
            raise _refused(first, other, "tensors share memory at a fraction of an element")
    return _flat([member.tensor for member in family])


def _flat(members: list[torch.Tensor]) -> Span:
    lowest = min(members, key=lambda member: byte_range(member)[0])
    start = byte_range(lowest)[0]
    length = (max(byte_range(member)[1] for member in members) - start) // lowest.element_size()
    return Span(lowest.detach().as_strided((length,), (1,), lowest.storage_offset()), start, lowest)


def _refused(one: Occupant, other: Occupant, why: str) -> RequestError:
    return RequestError(
        f"values that share memory cannot be stored exactly: {why}",
        where=f"{one.path} and {other.path}",
        remedy="Store a copy of one of them.",
    )
