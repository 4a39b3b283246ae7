"""Schedulers as items: the same rates for every order of construction and restore, once or twice."""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch.optim import lr_scheduler as lrs
from torch.optim.swa_utils import SWALR

from safepoint.errors import RequestError
from safepoint.state.item import Permits
from safepoint.state.modules import ModuleItem
from safepoint.state.names import qualified_parameters
from safepoint.state.optimizers import OptimizerItem
from safepoint.state.schedulers import SchedulerItem
from tests.state.roundtrip import Stored, same_bits
from tests.state.training import Net, by_name, two_groups, update


class Decay:
    """A rate function with state of its own."""

    def __init__(self) -> None:
        self.factor = 1.0

    def __call__(self, step: int) -> float:
        return self.factor * 0.9**step


def sequence(optimizer: Any) -> lrs.SequentialLR:
    parts = [lrs.LinearLR(optimizer, total_iters=3), lrs.CosineAnnealingLR(optimizer, T_max=9)]
    return lrs.SequentialLR(optimizer, parts, milestones=[4])


SCHEDULERS: dict[str, Callable[[Any], Any]] = {
    "Lambda": lambda o: lrs.LambdaLR(o, [lambda step: 0.9**step, lambda step: 1 / (1 + step)]),
    "Lambda object": lambda o: lrs.LambdaLR(o, [Decay(), Decay()]),
    "Multiplicative": lambda o: lrs.MultiplicativeLR(o, lambda step: 0.95),
    "Step": lambda o: lrs.StepLR(o, 2, gamma=0.5),
    "MultiStep": lambda o: lrs.MultiStepLR(o, [2, 5, 5], gamma=0.5),
    "Constant": lambda o: lrs.ConstantLR(o, factor=0.5, total_iters=5),
    "Linear": lambda o: lrs.LinearLR(o, start_factor=0.1, total_iters=8),
    "Exponential": lambda o: lrs.ExponentialLR(o, 0.9),
    "Cosine": lambda o: lrs.CosineAnnealingLR(o, T_max=7),
    "WarmRestarts": lambda o: lrs.CosineAnnealingWarmRestarts(o, T_0=3, T_mult=2),
    "Polynomial": lambda o: lrs.PolynomialLR(o, total_iters=12, power=2.0),
    "Cyclic": lambda o: lrs.CyclicLR(o, [0.001, 0.002], [0.01, 0.02], step_size_up=3, mode="triangular2"),
    "OneCycle": lambda o: lrs.OneCycleLR(o, [0.1, 0.2], total_steps=14),
    "Plateau": lambda o: lrs.ReduceLROnPlateau(o, patience=1, factor=0.5, min_lr=[0.001, 0.002]),
    "Sequential": sequence,
    "Chained": lambda o: lrs.ChainedScheduler([lrs.ExponentialLR(o, 0.9), lrs.ConstantLR(o, 0.5, total_iters=4)]),
    "SWA": lambda o: SWALR(o, swa_lr=0.01, anneal_epochs=6),
}


@pytest.fixture(autouse=True)
def quiet() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


class Run:
    """A net, an optimizer of two groups with rates of their own, and a scheduler."""

    def __init__(self, build: Callable[[Any], Any] | None, seed: int, *, flipped: bool = False, lr: Any = 0.05) -> None:
        torch.manual_seed(seed)
        self.model = Net(flipped=flipped)
        self.optimizer = two_groups(torch.optim.SGD, self.model, flipped=flipped, options={"lr": lr, "momentum": 0.9})
        self.optimizer.param_groups[flipped]["lr"] = self.optimizer.param_groups[flipped]["lr"] * 2
        self.optimizer_item = OptimizerItem(
            "optimizer", self.optimizer, lambda: qualified_parameters({"model": self.model})
        )
        self.scheduler: Any = build(self.optimizer) if build else None

    def items(self, order: str = "mos") -> dict[str, Any]:
        made = {
            "m": ("model", lambda: ModuleItem("model", self.model)),
            "o": ("optimizer", lambda: self.optimizer_item),
            "s": (
                "scheduler",
                lambda: SchedulerItem("scheduler", self.scheduler, lambda: {"optimizer": self.optimizer_item}),
            ),
        }
        return {made[key][0]: made[key][1]() for key in order}

    def go(self, first: int, last: int) -> list[list[Any]]:
        """Make updates with scheduler steps and return the loss and rates of each."""
        seen = []
        for index in range(first, last):
            loss = update(self.model, self.optimizer, index)
            metrics = (1.0 + index % 3,) if isinstance(self.scheduler, lrs.ReduceLROnPlateau) else ()
            self.scheduler.step(*metrics)
            seen.append([loss, *self.rates()])
        return seen

    def rates(self) -> list[Any]:
        names = {id(one): name for name, one in self.model.named_parameters()}
        groups = sorted(self.optimizer.param_groups, key=lambda group: min(names[id(one)] for one in group["params"]))
        return [float(group["lr"]) for group in groups] + [group["momentum"] for group in groups]


@pytest.mark.parametrize("order", ["mos", "mso"])
@pytest.mark.parametrize("kind", SCHEDULERS)
def test_rates_after_a_restore_are_those_of_the_uninterrupted_run(kind: str, order: str) -> None:
    """Field reports B69, B70, B71, B73, B74, B75, B83."""
    straight = Run(SCHEDULERS[kind], 1)
    straight.go(0, 6)
    stored = Stored(straight.items())
    resumed = Run(SCHEDULERS[kind], 2)
    stored.restore(resumed.items(order))
    assert resumed.rates() == straight.rates()
    assert resumed.scheduler.optimizer is resumed.optimizer
    assert resumed.go(6, 12) == straight.go(6, 12)
    assert same_bits(by_name(resumed.model, resumed.optimizer), by_name(straight.model, straight.optimizer))


@pytest.mark.parametrize("kind", SCHEDULERS)
def test_a_scheduler_built_after_the_optimizer_was_restored(kind: str) -> None:
    """Field reports B69, B70: and no update happens with a value that the constructor left."""
    straight = Run(SCHEDULERS[kind], 1)
    straight.go(0, 6)
    stored = Stored(straight.items())
    resumed = Run(None, 2)
    stored.restore(resumed.items("mo"))
    resumed.scheduler = SCHEDULERS[kind](resumed.optimizer)
    stored.restore(resumed.items("s"))
    assert resumed.rates() == straight.rates()
    assert resumed.go(6, 12) == straight.go(6, 12)


@pytest.mark.parametrize("kind", SCHEDULERS)
def test_restoring_twice_is_restoring_once(kind: str) -> None:
    """Field report B77."""
    straight = Run(SCHEDULERS[kind], 1)
    straight.go(0, 6)
    stored = Stored(straight.items())
    resumed = Run(SCHEDULERS[kind], 2)
    items = resumed.items()
    stored.restore(items)
    resumed.go(6, 9)
    stored.restore(items)
    stored.restore(items)
    assert resumed.go(6, 12) == straight.go(6, 12)


@pytest.mark.parametrize("kind", SCHEDULERS)
def test_groups_in_another_order_keep_their_own_rates(kind: str) -> None:
    straight = Run(SCHEDULERS[kind], 1)
    straight.go(0, 5)
    stored = Stored(straight.items())
    resumed = Run(SCHEDULERS[kind], 2, flipped=True)
    if kind == "Lambda":
        resumed.scheduler.lr_lambdas.reverse()
    items = resumed.items()
    stored.restore(items)
    again = Stored(items)
    assert again.text == stored.text
    assert again.data == stored.data
    assert resumed.go(5, 10) == straight.go(5, 10)


def test_a_rate_held_in_a_tensor_is_restored_in_place() -> None:
    straight = Run(SCHEDULERS["Cosine"], 1, lr=torch.tensor(0.05))
    straight.go(0, 4)
    resumed = Run(SCHEDULERS["Cosine"], 2, lr=torch.tensor(0.05))
    kept = [group["lr"] for group in resumed.optimizer.param_groups]
    Stored(straight.items()).restore(resumed.items())
    assert [id(group["lr"]) for group in resumed.optimizer.param_groups] == [id(rate) for rate in kept]
    assert resumed.go(4, 8) == straight.go(4, 8)


def test_a_scheduler_of_another_class_is_a_difference() -> None:
    """Field report B30."""
    stored = Stored(Run(SCHEDULERS["Cosine"], 1).items())
    assert stored.words(Run(SCHEDULERS["SWA"], 1).items()) == ["scheduler.type"]
    stored = Stored(Run(SCHEDULERS["Sequential"], 1).items())
    other = Run(lambda o: lrs.SequentialLR(o, [lrs.LinearLR(o), lrs.ExponentialLR(o, 0.9)], milestones=[4]), 1)
    assert stored.words(other.items()) == ["scheduler.type"]


def test_a_scheduler_of_an_unregistered_optimizer_is_refused() -> None:
    run = Run(SCHEDULERS["Step"], 1)
    lonely = SchedulerItem("scheduler", run.scheduler, lambda: {})
    with pytest.raises(RequestError, match="not registered"):
        lonely.capture()


def test_an_attribute_that_is_not_plain_is_refused_by_its_path() -> None:
    run = Run(SCHEDULERS["Step"], 1)
    run.scheduler.after = object()
    with pytest.raises(RequestError) as caught:
        run.items()["scheduler"].capture()
    assert caught.value.where == "scheduler.state.after"


def test_a_callable_rate_keeps_its_attributes() -> None:
    straight = Run(SCHEDULERS["Lambda object"], 1)
    straight.scheduler.lr_lambdas[1].factor = 0.25
    resumed = Run(SCHEDULERS["Lambda object"], 2)
    Stored(straight.items()).restore(resumed.items())
    assert [decay.factor for decay in resumed.scheduler.lr_lambdas] == [1.0, 0.25]


def test_milestones_are_of_their_own_type_again() -> None:
    straight, resumed = Run(SCHEDULERS["MultiStep"], 1), Run(lambda o: lrs.MultiStepLR(o, [9]), 2)
    Stored(straight.items()).restore(resumed.items())
    assert type(resumed.scheduler.milestones) is Counter
    assert resumed.scheduler.milestones == Counter([2, 5, 5])


CURRENT = Permits(frozenset({"scheduler"}), frozenset({"scheduler"}))


@pytest.mark.parametrize("order", ["mos", "mso"])
def test_a_longer_horizon_takes_effect_at_once_when_asked_for(order: str) -> None:
    """Field report B82."""
    straight = Run(lambda o: lrs.CosineAnnealingLR(o, T_max=6), 1)
    straight.go(0, 6)
    stored = Stored(straight.items())
    longer = Run(lambda o: lrs.CosineAnnealingLR(o, T_max=12), 2)
    left = stored.restore(longer.items(order), CURRENT)
    assert longer.rates()[:2] == pytest.approx([0.05, 0.025])
    assert longer.scheduler.last_epoch == 6
    assert left["scheduler"] == [
        "scheduler: T_max as configured now, not as saved; the rate is computed from the count of steps"
    ]
    kept = Run(lambda o: lrs.CosineAnnealingLR(o, T_max=12), 2)
    assert stored.restore(kept.items(order))["scheduler"] == []
    assert kept.rates()[:2] == pytest.approx([0, 0])
    assert kept.scheduler.T_max == 6


def test_a_longer_one_cycle_takes_its_own_bounds() -> None:
    straight = Run(lambda o: lrs.OneCycleLR(o, 0.1, total_steps=10), 1)
    straight.go(0, 8)
    longer = Run(lambda o: lrs.OneCycleLR(o, 0.2, total_steps=40), 2)
    expected = Run(lambda o: lrs.OneCycleLR(o, 0.2, total_steps=40), 3)
    expected.go(0, 8)
    Stored(straight.items()).restore(longer.items(), CURRENT)
    assert longer.rates() == expected.rates()


def test_a_rate_without_closed_form_is_scaled() -> None:
    build = SCHEDULERS["Multiplicative"]
    straight = Run(build, 1)
    straight.go(0, 3)
    higher = Run(build, 2, lr=0.1)
    left = Stored(straight.items()).restore(higher.items(), CURRENT)
    assert higher.rates()[:2] == pytest.approx([rate * 2 for rate in straight.rates()[:2]])
    assert "scaled by the ratio" in left["scheduler"][0]


def test_configuration_is_that_of_registration_without_counters() -> None:
    run = Run(SCHEDULERS["Step"], 1)
    item = run.items()["scheduler"]
    run.go(0, 3)
    assert item.configuration() == {
        "class": "StepLR",
        "state": {"base_lrs": [0.1, 0.05], "gamma": 0.5, "step_size": 2},
    }
    assert item.count() == 3
    assert run.optimizer_item.count() is None


def test_rates_follow_groups_that_are_created_again() -> None:
    straight = Run(None, 1)
    straight.scheduler = lrs.ExponentialLR(straight.optimizer, 0.5)
    straight.go(0, 2)
    stored = Stored(straight.items())
    resumed = Run(None, 2)
    del resumed.optimizer.param_groups[0]
    resumed.scheduler = lrs.ExponentialLR(resumed.optimizer, 0.5)
    stored.restore(resumed.items())
    assert resumed.go(2, 5) == straight.go(2, 5)


@pytest.mark.parametrize("has_stepped", [True, False])
def test_torch_warns_of_a_schedule_ahead_of_its_optimizer_only_if_the_saved_one_had_not_stepped(
    has_stepped: bool,
) -> None:
    """A run that goes on from the end of its first epoch steps the schedule first."""
    made: list[tuple[Any, Any, Any]] = []
    for _ in range(2):
        model = Net()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        schedule = lrs.StepLR(optimizer, 2)
        known = qualified_parameters({"model": model})
        item = OptimizerItem("optimizer", optimizer, lambda known=known: known)  # type: ignore[misc]
        items = {"schedule": SchedulerItem("schedule", schedule, lambda item=item: {"optimizer": item})}  # type: ignore[misc]
        made.append((model, schedule, {**items, "optimizer": item}))
    (model, schedule, items), (_, resumed, others) = made
    if has_stepped:
        update(model, schedule.optimizer, 0)
    Stored(items).restore(others)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        resumed.step()
    assert bool(caught) is not has_stepped
