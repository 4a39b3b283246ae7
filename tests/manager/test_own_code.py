"""Code of a live object that runs where it tells its state may give a module another tensor: that one is stored."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

import safepoint as sp

Give = Callable[[], object]


class Telling:
    def __init__(self, give: Give) -> None:
        self._give = give

    def state_dict(self) -> dict[str, object]:
        self._give()
        return {}

    def load_state_dict(self, state: object) -> None:
        pass


class WithExtraState(nn.Module):
    def __init__(self, give: Give) -> None:
        super().__init__()
        self._give = give

    def get_extra_state(self) -> dict[str, object]:
        self._give()
        return {}

    def set_extra_state(self, state: object) -> None:
        pass


def hooked(give: Give) -> nn.Module:
    module = nn.Linear(1, 1)
    module._register_state_dict_hook(lambda *_: give())
    return module


def optimizer(give: Give, net: nn.Module) -> torch.optim.Optimizer:
    class Own(torch.optim.SGD):
        def state_dict(self) -> dict[str, Any]:
            give()
            return super().state_dict()

    return Own([net[0].weight], lr=0.1)  # type: ignore[index]


def scheduler(give: Give, driven: torch.optim.Optimizer) -> torch.optim.lr_scheduler.LRScheduler:
    class Own(torch.optim.lr_scheduler.StepLR):
        def state_dict(self) -> dict[str, Any]:
            give()
            return super().state_dict()

    return Own(driven, 1)


def told_by(name: str, give: Give, net: nn.Module, driven: torch.optim.Optimizer) -> dict[str, object]:
    """Return what is registered before the network: something that calls `give` where it tells its state."""
    match name:
        case "stateful":
            return {"teller": Telling(give)}
        case "extra state":
            return {"teller": WithExtraState(give)}
        case "hook":
            return {"teller": hooked(give)}
        case "optimizer":
            return {"teller": optimizer(give, net)}
        case "scheduler":
            return {"teller": scheduler(give, driven)}
        case _:
            inner = [torch.optim.lr_scheduler.ConstantLR(driven), scheduler(give, driven)]
            return {"teller": torch.optim.lr_scheduler.SequentialLR(driven, inner, [2])}


@pytest.mark.parametrize("name", ["stateful", "extra state", "hook", "optimizer", "scheduler", "sequence"])
@pytest.mark.parametrize("is_parameter", [False, True])
@pytest.mark.filterwarnings("ignore:Detected call of .lr_scheduler:UserWarning")
def test_a_tensor_that_is_given_while_an_object_tells_its_state_is_stored(
    name: str, is_parameter: bool, tmp_path: Path
) -> None:
    net = nn.Sequential(nn.Linear(2, 2, bias=False))
    net.register_buffer("mean", torch.zeros(3))
    net.register_parameter("scale", nn.Parameter(torch.zeros(3)))
    driven = torch.optim.SGD([net[0].weight], lr=0.1)
    count = 0

    def give() -> None:
        nonlocal count
        count += 1
        # The same facts but another tensor: by what it looks like nobody would know.
        if is_parameter:
            net.scale = nn.Parameter(torch.full((3,), float(count)))
        else:
            net.mean = torch.full((3,), float(count))

    state = {**told_by(name, give, net, driven), "driven": driven, "net": net}
    with sp.CheckpointManager(tmp_path, state, save=sp.every(updates=1)) as manager:
        manager.restore()
        for step in (1, 2, 3):
            for one in (driven, state["teller"]):
                if isinstance(one, torch.optim.Optimizer):
                    one.step()
            manager.after_update()
            (folder,) = (tmp_path / "generations").glob(f"step-{step:012d}-*")
            stored = load_file(next(folder.glob("*.safetensors")))
            expected = net.scale if is_parameter else net.mean
            assert count > 0
            assert torch.equal(stored["net/scale" if is_parameter else "net/mean"], expected.detach()), step
