"""A small net whose layers can be declared, grouped and listed in another order, and updates that depend on it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn

from safepoint.state.item import Item
from safepoint.state.modules import ModuleItem
from safepoint.state.names import qualified_parameters
from safepoint.state.optimizers import OptimizerItem


class Net(nn.Module):
    """Two layers of equal shape, which only their names tell apart."""

    def __init__(self, *, flipped: bool = False, bias: bool = True) -> None:
        super().__init__()
        for name in ("second", "first") if flipped else ("first", "second"):
            setattr(self, name, nn.Linear(4, 4, bias=bias))

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        return self.second(torch.tanh(self.first(values)))  # type: ignore[no-any-return]


class Lookup(nn.Module):
    """Has sparse gradients."""

    def __init__(self, *, flipped: bool = False) -> None:
        super().__init__()
        for name in ("second", "first") if flipped else ("first", "second"):
            setattr(self, name, nn.Embedding(6, 4, sparse=True))

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        return self.first(values) * self.second(values)  # type: ignore[no-any-return]


def batch(index: int) -> torch.Tensor:
    """Return a fixed batch; draws nothing from the global stream."""
    return torch.randn(5, 4, generator=torch.Generator().manual_seed(1000 + index))


def update(model: nn.Module, optimizer: torch.optim.Optimizer, index: int) -> float:
    """Make one update and return its loss."""

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        values = batch(index)
        if isinstance(model, Lookup):
            loss = (model(values.abs().mul(10).long() % 6) - 1).square().mean()
        else:
            loss = (model(values) - values.flip(1)).square().mean()
        loss.backward()
        return loss

    if isinstance(optimizer, torch.optim.LBFGS):
        return float(optimizer.step(closure))  # type: ignore[arg-type, unused-ignore]
    loss = closure()
    optimizer.step()
    return loss.item()


def items(model: nn.Module, optimizer: torch.optim.Optimizer, **more: Item) -> dict[str, Item]:
    """Return items for a model and its optimizer, in the order in which they are restored."""
    return {
        "model": ModuleItem("model", model),
        "optimizer": OptimizerItem("optimizer", optimizer, lambda: qualified_parameters({"model": model})),
        **more,
    }


def by_name(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """Return parameters and optimizer state by name, the options of each parameter's group included."""
    options = {
        id(parameter): {key: value for key, value in group.items() if key not in ("params", "param_names")}
        for group in optimizer.param_groups
        for parameter in group["params"]
    }
    return {
        name: {
            "value": parameter.detach(),
            "state": optimizer.state.get(parameter),
            "options": options.get(id(parameter)),
        }
        for name, parameter in sorted(model.named_parameters())
    }


Build = Callable[..., torch.optim.Optimizer]


def two_groups(build: Build, model: Net, *, flipped: bool, options: Mapping[str, Any]) -> torch.optim.Optimizer:
    """Return an optimizer with one group for each layer, weights and biases listed in one order or the other."""
    groups = [{"params": list(layer.parameters())[:: -1 if flipped else 1]} for layer in (model.first, model.second)]
    return build(groups[:: -1 if flipped else 1], **options)
