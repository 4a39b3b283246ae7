"""Owners: which parameter a stored tensor of an optimizer belongs to, and which device it shall be on for that."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec
import torch

from safepoint.format.plain import TensorLeaf
from safepoint.state.merging import is_shared, leaves_of
from safepoint.state.optimizer_tree import SavedOptimizer
from safepoint.state.rebuild import to_kind
from safepoint.state.shards import scatter
from safepoint.state.tensors import is_distributed


class Owner(msgspec.Struct, frozen=True):
    """Say of a stored tensor which kind of device it was on, its parameter if it has one, and that one's kind then.

    `is_dense` says that it is no view of a stretch of memory.
    """

    kind: str = "cpu"
    parameter: torch.Tensor | None = None
    saved_kind: str = ""
    is_dense: bool = False

    @property
    def device(self) -> torch.device:
        """Return where the tensor shall live: with its parameter, if it did at the save."""
        if self.parameter is not None and self.kind == self.saved_kind:
            return self.parameter.device
        return to_kind(torch.empty(0), self.kind).device

    def follow(self, tensor: torch.Tensor, kind: str) -> torch.Tensor:
        """Return a tensor of the owner's state where it shall live, which was on this kind of device."""
        # A named tensor is on its device already; a 0-dim one comes from the tree and starts on the CPU.
        if tensor.dim():
            return tensor
        if self.parameter is None or kind != self.saved_kind:
            return to_kind(tensor, kind)
        return tensor.to(self.parameter.device)


def kinds_of(stored: SavedOptimizer) -> dict[str, str]:
    """Return the kind of device that each parameter was on."""
    return {name: kind for group in stored.groups for name, kind in zip(group.parameters, group.devices, strict=True)}


def absent_of(stored: SavedOptimizer, named: Mapping[str, torch.Tensor]) -> set[str]:
    """Return the parameters whose state is not read, because they are on other ranks, or nowhere any more."""
    return {name for name, value in stored.states.items() if name not in named and not is_shared(value)}


def owners_of(stored: SavedOptimizer, named: Mapping[str, torch.Tensor]) -> dict[str, Owner]:
    """Return the owner of each stored tensor."""
    kinds = kinds_of(stored)
    others = [[group.options for group in stored.groups], stored.other, stored.extra]
    owners = {leaf.name: Owner(leaf.device, is_dense=type(leaf) is TensorLeaf) for leaf in leaves_of(others)}
    for name, value in stored.states.items():
        parameter, saved_kind = named.get(name), kinds.get(name, "")
        for leaf in leaves_of(value):
            owners[leaf.name] = Owner(leaf.device, parameter, saved_kind, type(leaf) is TensorLeaf)
    return owners


def divided(value: Any, parameter: torch.Tensor | None, path: str) -> Any:
    """Divide state that was stored as views of one stretch of memory, thus restored whole, like its parameter."""
    if parameter is None or not is_distributed(parameter) or type(value) is not dict:
        return value
    return {
        key: scatter(part, parameter, path) if key != "step" and _is_whole(part, parameter) else part
        for key, part in value.items()
    }


def _is_whole(part: Any, parameter: torch.Tensor) -> bool:
    return (
        type(part) is torch.Tensor and part.layout == torch.strided and part.dim() > 0 and part.shape == parameter.shape
    )
