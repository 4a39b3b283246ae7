"""Which item stands for which object; counting steps; describing the environment."""

from __future__ import annotations

import random
from collections import defaultdict
from typing import Any

import numpy as np
import pytest
import torch
from torch.optim.swa_utils import AveragedModel

from safepoint.errors import RequestError
from safepoint.state.adapt import Surroundings, make_item
from safepoint.state.environment import describe
from safepoint.state.names import qualified_parameters
from safepoint.state.optimizers import OptimizerItem
from safepoint.state.steps import StepMonitor
from tests.state.roundtrip import Stored
from tests.state.training import Net, update

NONE = Surroundings(dict, dict)


class Holder:
    def state_dict(self) -> dict[str, int]:
        return {"k": 1}

    def load_state_dict(self, state: dict[str, int]) -> None:
        pass


def optimizer(model: torch.nn.Module | None = None) -> torch.optim.Optimizer:
    return torch.optim.SGD((model or Net()).parameters(), lr=0.1)


@pytest.mark.parametrize(
    ("entry", "expected"),
    [
        (Net(), "module"),
        (AveragedModel(Net()), "module"),
        (optimizer(), "optimizer"),
        (torch.optim.lr_scheduler.StepLR(optimizer(), 1), "scheduler"),
        (torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer()), "scheduler"),
        (torch.amp.GradScaler("cpu"), "scaler"),
        (torch.Generator(), "torch_generator"),
        (np.random.default_rng(0), "numpy_generator"),
        (np.random.RandomState(0), "numpy_generator"),
        (random.Random(0), "python_random"),
        ({}, "plain"),
        ([], "plain"),
        (Holder(), "stateful"),
    ],
)
def test_an_object_gets_the_item_of_its_kind(entry: object, expected: str) -> None:
    item = make_item("x", entry, surroundings=NONE)
    assert (item.name, item.type) == ("x", expected)


@pytest.mark.parametrize(
    "entry", [3, "text", (1, 2), defaultdict(int), Holder, object(), torch.ones(1), random.SystemRandom()]
)
def test_an_object_without_state_is_refused_with_what_is_accepted(entry: object) -> None:
    with pytest.raises(RequestError, match=r"state_dict\(\) and load_state_dict\(\)") as caught:
        make_item("x", entry, surroundings=NONE)
    assert caught.value.where == "x"
    assert str(caught.value.found).endswith(type(entry).__qualname__)


def test_a_scheduler_may_be_registered_before_its_optimizer() -> None:
    model = Net()
    live = optimizer(model)
    optimizers: dict[str, OptimizerItem] = {}
    surroundings = Surroundings(lambda: qualified_parameters({"model": model}), lambda: optimizers)
    item = make_item("s", torch.optim.lr_scheduler.StepLR(live, 1), surroundings=surroundings)
    made: Any = make_item("o", live, surroundings=surroundings)
    optimizers["o"] = made
    assert Stored({"s": item}).words({"s": item}) == []


def test_steps_of_registered_optimizers_are_counted_fused_ones_too() -> None:
    model, other = Net(), Net()
    fused = torch.optim.AdamW(model.parameters(), fused=True)
    registered = {"a": fused}
    monitor = StepMonitor(registered)
    try:
        update(model, fused, 0)
        update(other, optimizer(other), 0)
        late = optimizer(model)
        registered["b"] = late  # type: ignore[assignment]
        update(model, late, 1)
        update(model, late, 2)
        assert monitor.counts() == {"a": 1, "b": 2}
        monitor.reset()
        assert monitor.counts() == {"a": 0, "b": 0}
    finally:
        monitor.close()
    update(model, fused, 3)
    assert monitor.counts() == {"a": 0, "b": 0}


def test_a_guard_prevents_the_step_of_a_registered_optimizer() -> None:
    model = Net()
    live, free = optimizer(model), optimizer(model)
    monitor = StepMonitor({"a": live})
    before = model.first.weight.detach().clone()

    def refuse() -> None:
        raise RequestError("an item is missing")

    try:
        monitor.guard(refuse)
        with pytest.raises(RequestError, match="missing"):
            update(model, live, 0)
        assert torch.equal(model.first.weight, before)
        assert monitor.counts() == {"a": 0}
        update(model, free, 0)
    finally:
        monitor.close()
        monitor.close()
    update(model, live, 1)


def test_the_device_is_where_the_tensors_lie_not_what_the_machine_has(monkeypatch: pytest.MonkeyPatch) -> None:
    here, away = torch.nn.Linear(1, 1), torch.nn.Linear(1, 1, device="meta")
    expected = {"none": ([], "cpu"), "model": ([here, random.Random(0)], "cpu")}
    expected["nested"] = ([here, {"a": [away.weight]}], "cpu+meta")
    for objects, device in expected.values():
        assert describe(objects)["device"] == device
    monkeypatch.setattr(torch.backends.mkldnn, "enabled", False)
    assert describe([here])["mkldnn"] == "False"


def test_the_environment_names_versions_and_switches_as_text() -> None:
    described = describe()
    assert described["torch"] == torch.__version__
    assert described["numpy"] == np.__version__
    assert {"device", "cpu_capability", "threads", "deterministic_algorithms", "mkldnn"} <= set(described)
    assert all(type(value) is str for value in described.values())
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        assert describe()["deterministic_algorithms"] == "warn"
    finally:
        torch.use_deterministic_algorithms(False)
    assert describe() == described
