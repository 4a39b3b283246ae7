"""Fitting: whether a slot of a live module can take what is stored under its name."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from safepoint.format.plain import ScalarLeaf, TensorLeaf
from safepoint.state.draft import container_of
from safepoint.state.item import TensorSpec
from safepoint.state.module_tree import SavedEntry
from safepoint.state.names import Slot
from safepoint.state.places import segment
from safepoint.state.tensors import PLAIN_TYPES, dtype_name


def is_differentiable(tensor: torch.Tensor) -> bool:
    """Return whether a tensor can require grad."""
    return tensor.is_floating_point() or tensor.is_complex()


def can_create(slot: Slot, entry: SavedEntry) -> bool:
    """Return whether an empty slot can be given what is stored: both are buffers, and it is a plain tensor."""
    return slot.kind == entry.kind == "buffer" and isinstance(entry.value, TensorLeaf | ScalarLeaf)


def is_alike(entry: SavedEntry, slot: Slot, specs: Mapping[str, TensorSpec]) -> bool:
    """Return whether a slot holds just such a tensor as is stored under its name, which must be its first one.

    Of tensors that are more than plain ones this is not known here.
    """
    tensor, value = slot.tensor, entry.value
    if tensor is None or type(tensor) not in PLAIN_TYPES or type(value) is not TensorLeaf:
        return False
    if tensor.is_nested or tensor.layout is not torch.strided:
        return False
    spec = specs.get(value.name)
    return (
        spec is not None
        and slot.name == entry.names[0]
        and (entry.kind, entry.is_persistent) == (slot.kind, slot.is_persistent)
        and spec.global_shape == tensor.shape
        and spec.dtype == dtype_name(tensor.dtype)
        and value.name == segment(slot.name)
        and value.container == container_of(tensor)
        and value.requires_grad == entry.requires_grad
        and (tensor.requires_grad == entry.requires_grad or (entry.kind == "parameter" and is_differentiable(tensor)))
        and tensor.dim() > 0
    )
