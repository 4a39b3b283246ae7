"""What an item's own code changes in others while a restore is under way, and what a refused one lets go of."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import safepoint as sp


class Unfreezing(torch.optim.lr_scheduler.LRScheduler):
    """Adds the first layers to the optimizer when it is told to, and when it is given a state in which it had."""

    def __init__(self, optimizer: torch.optim.Optimizer, layers: list[nn.Parameter]) -> None:
        self.layers = layers
        self.has_unfrozen = False
        super().__init__(optimizer)

    def get_lr(self) -> list[Any]:
        return [group["lr"] for group in self.optimizer.param_groups]

    def unfreeze(self) -> None:
        self.has_unfrozen = True
        self.optimizer.add_param_group({"params": self.layers, "lr": 0.01, "initial_lr": 0.01})

    def state_dict(self) -> dict[str, Any]:
        return {"has_unfrozen": self.has_unfrozen, "last_epoch": self.last_epoch}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        if state_dict["has_unfrozen"] and not self.has_unfrozen:
            self.unfreeze()
        self.last_epoch = state_dict["last_epoch"]


class Renewing(nn.Module):
    """Makes tensors of another module anew when it is given its extra state."""

    def __init__(self, renew: Callable[[], None]) -> None:
        super().__init__()
        self._renew = renew

    def get_extra_state(self) -> dict[str, int]:
        return {"version": 1}

    def set_extra_state(self, state: object) -> None:
        self._renew()


def buffers() -> nn.Module:
    module = nn.Module()
    module.register_buffer("count", torch.zeros(()))
    module.register_buffer("mean", torch.zeros(3))
    return module


def saved(url: Path, entries: Mapping[str, Any], change: Callable[[], object]) -> None:
    """Save a run's state after one change."""
    with sp.CheckpointManager(url, entries) as manager:
        manager.restore()
        change()
        manager.after_update()
        manager.save()


def restored(url: Path, entries: Mapping[str, Any], **options: Any) -> None:
    with sp.CheckpointManager(url, entries, **options) as manager:
        assert manager.restore().step == 1


def test_a_group_that_a_scheduler_adds_as_it_is_restored_is_not_created_again(tmp_path: Path) -> None:
    def made(seed: int) -> tuple[nn.Sequential, torch.optim.Optimizer, Unfreezing]:
        torch.manual_seed(seed)
        model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
        optimizer = torch.optim.AdamW(model[1].parameters(), lr=0.1)
        return model, optimizer, Unfreezing(optimizer, list(model[0].parameters()))

    def update(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
        model(torch.ones(2, 4)).square().mean().backward()
        optimizer.step()
        return [parameter.detach().clone() for parameter in model.parameters()]

    model, optimizer, scheduler = made(1)
    entries = {"model": model, "optimizer": optimizer, "scheduler": scheduler}
    saved(tmp_path, entries, lambda: (scheduler.unfreeze(), update(model, optimizer)))
    optimizer.zero_grad()
    other, resumed, unfrozen = made(2)
    restored(tmp_path, {"model": other, "optimizer": resumed, "scheduler": unfrozen})
    assert [len(group["params"]) for group in resumed.param_groups] == [2, 2]
    straight = update(model, optimizer)
    assert all(map(torch.equal, update(other, resumed), straight))


@pytest.mark.parametrize("name", ["count", "mean"])
def test_a_buffer_that_another_item_makes_anew_gets_its_value(tmp_path: Path, name: str) -> None:
    def made() -> dict[str, nn.Module]:
        later = buffers()
        return {"a": Renewing(lambda: setattr(later, name, torch.zeros_like(getattr(later, name)))), "b": later}

    first, second = made(), made()
    saved(tmp_path, first, lambda: getattr(first["b"], name).add_(3))
    restored(tmp_path, second)
    assert torch.equal(getattr(second["b"], name), torch.full_like(getattr(first["b"], name), 3.0))


def test_a_buffer_that_another_item_makes_where_none_was_gets_its_value(tmp_path: Path) -> None:
    first, later = buffers(), buffers()
    later.mean = None
    saved(tmp_path, {"a": Renewing(lambda: None), "b": first}, lambda: first.mean.add_(3))
    entries = {"a": Renewing(lambda: setattr(later, "mean", torch.zeros(3))), "b": later}
    restored(tmp_path, entries, contract=sp.Contract("same_data"))
    assert torch.equal(later.mean, torch.full((3,), 3.0))


def test_state_goes_to_the_parameter_that_its_module_made_anew(tmp_path: Path) -> None:
    def made() -> tuple[nn.Module, torch.optim.Optimizer]:
        model = Renewing(lambda: renew())
        model.weight = nn.Parameter(torch.ones(3))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)

        def renew() -> None:
            model.weight = nn.Parameter(model.weight.detach().clone())
            optimizer.param_groups[0]["params"] = [model.weight]

        return model, optimizer

    def update(model: Any, optimizer: torch.optim.Optimizer) -> None:
        model.weight.grad = torch.full((3,), 2.0)
        optimizer.step()

    model, optimizer = made()
    saved(tmp_path, {"model": model, "optimizer": optimizer}, lambda: update(model, optimizer))
    other, resumed = made()
    restored(tmp_path, {"model": other, "optimizer": resumed})
    assert list(resumed.state) == list(other.parameters())
    assert torch.equal(resumed.state[other.weight]["momentum_buffer"], torch.full((3,), 2.0))


@pytest.mark.parametrize("has_optimizer", [False, True])
def test_a_refused_restore_lets_go_of_the_live_tensors(tmp_path: Path, has_optimizer: bool) -> None:
    def entries(model: nn.Module) -> dict[str, Any]:
        # The optimizer is of other parameters; it looks at the names of all.
        other = nn.Linear(2, 2)
        optimizer = {"other": other, "optimizer": torch.optim.SGD(other.parameters(), lr=0.1)}
        return {"model": model, **(optimizer if has_optimizer else {})}

    saved(tmp_path, entries(nn.Sequential(nn.Linear(4, 4))), lambda: None)
    model = nn.Sequential(nn.Linear(4, 5))
    manager = sp.CheckpointManager(tmp_path, entries(model))
    with pytest.raises(sp.MismatchError) as caught:
        manager.restore()
    del caught
    weight = weakref.ref(model[0].weight)
    model[0] = nn.Linear(4, 4)
    gc.collect()
    assert weight() is None
    manager.close()
