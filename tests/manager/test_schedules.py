"""Schedules go on as they were, whatever the order in which a start builds, registers and restores."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import lr_scheduler

import safepoint as sp
from tests.manager.jobs import bits

CUT, END = 7, 14

SCHEDULES: dict[str, Callable[[torch.optim.Optimizer], Any]] = {
    "step": lambda one: lr_scheduler.StepLR(one, 3, gamma=0.5),
    "multi-step": lambda one: lr_scheduler.MultiStepLR(one, [5, 9], gamma=0.5),
    "exponential": lambda one: lr_scheduler.ExponentialLR(one, 0.9),
    "linear": lambda one: lr_scheduler.LinearLR(one, 0.1, total_iters=10),
    "polynomial": lambda one: lr_scheduler.PolynomialLR(one, 12, power=2.0),
    "cosine": lambda one: lr_scheduler.CosineAnnealingLR(one, 20),
    "warm restarts": lambda one: lr_scheduler.CosineAnnealingWarmRestarts(one, 4, 2),
    "one-cycle": lambda one: lr_scheduler.OneCycleLR(one, 0.3, total_steps=20),
    "cyclic": lambda one: lr_scheduler.CyclicLR(one, 0.01, 0.2, step_size_up=4),
    "lambda": lambda one: lr_scheduler.LambdaLR(one, lambda step: 1.0 / (1 + step)),
    "warm-up then cosine": lambda one: lr_scheduler.SequentialLR(
        one, [lr_scheduler.LinearLR(one, 0.1, total_iters=4), lr_scheduler.CosineAnnealingLR(one, 12)], [4]
    ),
    "chained": lambda one: lr_scheduler.ChainedScheduler(
        [lr_scheduler.LinearLR(one, 0.2, total_iters=6), lr_scheduler.ExponentialLR(one, 0.95)], optimizer=one
    ),
    "plateau": lambda one: lr_scheduler.ReduceLROnPlateau(one, patience=1, factor=0.5),
}


class Start:
    """One start; `order` says when the schedule is built and registered."""

    def __init__(self, url: Path, schedule: str, order: str, *, seed: int, **options: Any) -> None:
        torch.manual_seed(seed)
        self.model = nn.Linear(4, 1)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1, momentum=0.9)
        self.rates: list[tuple[Any, ...]] = []
        make = SCHEDULES[schedule]
        items: dict[str, object] = {"model": self.model, "optimizer": self.optimizer}
        if order == "built first":
            self.schedule = make(self.optimizer)
            items = {"schedule": self.schedule, **items}
        self.manager = sp.CheckpointManager(url, items, **options)
        if order == "built and registered before the restore":
            self.schedule = make(self.optimizer)
            self.manager.register("schedule", self.schedule)
        late = {"schedule"} if order == "late" else ()
        self.report = self.manager.restore(late=late) if not (late and not _is_there(url)) else None
        if order == "restored twice":
            self.manager.restore()
        if order == "late":
            self.schedule = make(self.optimizer)
            self.manager.register("schedule", self.schedule)

    def train(self, until: int) -> list[tuple[Any, ...]]:
        while self.manager.progress.step < until:
            step = self.manager.progress.step
            values = torch.randn(8, 4, generator=torch.Generator().manual_seed(step))
            loss = (self.model(values) - values.sum(1, keepdim=True)).square().mean()
            self.optimizer.zero_grad()
            loss.backward()
            group = self.optimizer.param_groups[0]
            self.rates.append((step, group["lr"], group["momentum"], bits(self.model.weight)))
            self.optimizer.step()
            is_plateau = isinstance(self.schedule, lr_scheduler.ReduceLROnPlateau)
            self.schedule.step(*([1.0] if is_plateau else []))
            self.manager.after_update()
        return self.rates


def _is_there(url: Path) -> bool:
    return (url / "run.json").exists()


ORDERS = ["built first", "built and registered before the restore", "late"]


@pytest.mark.parametrize("schedule", list(SCHEDULES))
def test_a_schedule_goes_on_for_each_order_of_building_and_restoring(tmp_path: Path, schedule: str) -> None:
    """Field reports B69, B70, B71, B73, B74, B75, B77, B78, B79, B83."""
    whole = Start(tmp_path / "whole", schedule, "built first", seed=0)
    expected = whole.train(END)
    for number, order in enumerate(ORDERS):
        url = tmp_path / str(number)
        job = Start(url, schedule, order, seed=0, save=sp.every(updates=CUT))
        job.train(CUT + 1)
        job.manager.close()
        for again in ORDERS:
            job = Start(url, schedule, again, seed=5)

            assert job.report is not None and job.report.step == CUT, (order, again)
            assert job.train(END) == expected[CUT:], (order, again)
            assert job.schedule.optimizer is job.optimizer if hasattr(job.schedule, "optimizer") else True
            job.manager.close()


def test_restoring_twice_is_restoring_once(tmp_path: Path) -> None:
    """Field report B77."""
    whole = Start(tmp_path / "whole", "one-cycle", "built first", seed=0)
    expected = whole.train(END)
    job = Start(tmp_path / "run", "one-cycle", "built first", seed=0, save=sp.every(updates=CUT))
    job.train(CUT)
    job.manager.close()

    job = Start(tmp_path / "run", "one-cycle", "built first", seed=5)
    job.manager.restore()
    assert job.train(END) == expected[CUT:]
    job.manager.close()


def test_a_late_item_that_never_comes_stops_the_first_step_before_it_changes_anything(tmp_path: Path) -> None:
    """Field reports B31, B149."""
    job = Start(tmp_path, "cosine", "built first", seed=0, save=sp.every(updates=CUT))
    job.train(CUT)
    job.manager.close()
    torch.manual_seed(1)
    model = nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    manager = sp.CheckpointManager(tmp_path, {"model": model, "optimizer": optimizer})
    manager.restore(late={"schedule"})
    before = bits(dict(model.state_dict())), bits(optimizer.state_dict())
    model(torch.ones(1, 4)).sum().backward()

    with pytest.raises(sp.RequestError, match=r"register\(\) of schedule"):
        optimizer.step()
    with pytest.raises(sp.RequestError, match="late"):
        manager.save()

    assert (bits(dict(model.state_dict())), bits(optimizer.state_dict())) == before
    manager.register("schedule", SCHEDULES["cosine"](optimizer))
    optimizer.step()
    manager.after_update()
    manager.close()


def test_a_late_schedule_with_another_horizon_is_refused_like_one_that_is_not_late(tmp_path: Path) -> None:
    job = Start(tmp_path, "cosine", "built first", seed=0, save=sp.every(updates=CUT))
    job.train(CUT)
    job.manager.close()
    model = nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    manager = sp.CheckpointManager(tmp_path, {"model": model, "optimizer": optimizer})
    manager.restore(late={"schedule"})

    with pytest.raises(sp.ContractError, match="T_max") as caught:
        manager.register("schedule", lr_scheduler.CosineAnnealingLR(optimizer, 99))

    assert [one.word for one in caught.value.differences] == ["scheduler"]
    manager.register("schedule", SCHEDULES["cosine"](optimizer))
    manager.close()


def test_a_schedule_of_another_type_is_refused_by_name(tmp_path: Path) -> None:
    """Field report B30."""
    job = Start(tmp_path, "cosine", "built first", seed=0, save=sp.every(updates=CUT))
    job.train(CUT)
    job.manager.close()
    with pytest.raises(sp.MismatchError, match=r"CosineAnnealingLR.*StepLR"):
        Start(tmp_path, "step", "built first", seed=0)


def test_making_a_late_object_moves_no_stream_of_the_training(tmp_path: Path) -> None:
    def start(seed: int) -> tuple[nn.Module, sp.CheckpointManager]:
        torch.manual_seed(seed)
        model = nn.Linear(4, 1)
        return model, sp.CheckpointManager(tmp_path, {"model": model})

    _, manager = start(0)
    extra = nn.Linear(9, 9)
    manager.register("extra", extra)
    manager.after_update()
    manager.save()
    expected = torch.rand(3)
    manager.close()

    _, manager = start(1)
    manager.restore(late={"extra"})
    again = nn.Linear(9, 9)
    manager.register("extra", again)

    assert torch.equal(torch.rand(3), expected)
    assert torch.equal(again.weight, extra.weight)
    manager.close()
