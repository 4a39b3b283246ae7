"""Ties: which slots of a module hold one tensor, live and as they were stored.

Tensors are tied if they are the same object or the same view of the same memory, never if they have no bytes.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from operator import attrgetter

import torch

from safepoint.state.aliases import are_apart
from safepoint.state.names import Slot
from safepoint.state.tensors import PLAIN_TYPES, are_plainly_storable, is_distributed, is_transformed


def tied(slots: Iterable[Slot]) -> list[list[Slot]]:
    """Return the slots that hold a tensor, those of one tensor together, sorted by name within and among groups.

    Sorted, so that what is stored does not depend on the order in which layers are declared.
    """
    ordered = [slot for slot in sorted(slots, key=attrgetter("name")) if slot.tensor is not None]
    tensors = [slot.tensor for slot in ordered if slot.tensor is not None]
    if len(set(map(id, tensors))) == len(tensors) and are_plainly_storable(tensors) and are_apart(tensors):
        return [[slot] for slot in ordered]
    groups: dict[object, list[Slot]] = {}
    keys: dict[int, object] = {}
    for slot, tensor in zip(ordered, tensors, strict=True):
        key = keys.setdefault(id(tensor), _place(tensor))
        groups.setdefault(key, []).append(slot)
    return list(groups.values())


def retied(
    before: Sequence[Sequence[str]], now: Sequence[Sequence[str]], common: set[str]
) -> Iterator[tuple[str, str, str]]:
    """Yield (name, what it was, what it is), in words, for each name whose first name among the common ones differs.

    Args:
        before: The names of each stored tensor.
        now: The names of each live tensor.
        common: Names that both sides have.
    """
    if all(len(names) == 1 for names in (*before, *now)):
        return
    there, here = _leaders(before, common), _leaders(now, common)
    for name, leader in there.items():
        if leader != here[name]:
            yield name, _tie_text(name, leader), _tie_text(name, here[name])


def _leaders(groups: Iterable[Sequence[str]], common: set[str]) -> dict[str, str]:
    """Return for each common name the first common name of its group."""
    leaders: dict[str, str] = {}
    for group in groups:
        names = sorted(name for name in group if name in common)
        leaders.update((name, names[0]) for name in names)
    return leaders


def _tie_text(name: str, leader: str) -> str:
    return "a tensor of its own" if name == leader else f"one tensor with {leader}"


def _place(tensor: torch.Tensor) -> object:
    if type(tensor) not in PLAIN_TYPES and (
        torch.nn.parameter.is_lazy(tensor) or is_distributed(tensor) or type(tensor.detach()) is not torch.Tensor
    ):
        return id(tensor)
    if tensor.layout != torch.strided or tensor.is_nested or tensor._is_zerotensor() or is_transformed(tensor):
        return id(tensor)
    if tensor.numel() == 0:
        return id(tensor)
    storage = tensor.untyped_storage().data_ptr()
    view = (tensor.storage_offset(), tuple(tensor.shape), tuple(tensor.stride()), tensor.dtype)
    return (str(tensor.device), storage, *view) if storage else id(tensor)
