"""Everything that steers a run comes back: buffers, ties, averages, scalers, generators, the user's own counters."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import safepoint as sp
from tests.manager.jobs import bits

CUT, END = 5, 9


class Odd(nn.Module):
    """Ties two layers, counts in a buffer that is not persistent, and keeps a text as extra state."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Linear(4, 4, bias=False)
        self.decoder = nn.Linear(4, 4, bias=False)
        self.decoder.weight = self.encoder.weight
        self.unused = nn.Parameter(torch.randn(2))
        self.register_buffer("scale", torch.tensor(1.0), persistent=False)
        self.register_buffer("seen", torch.tensor(0))
        self.note = ""

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        self.scale.mul_(1.01)
        self.seen.add_(1)
        self.note = f"after {int(self.seen)}"
        return self.decoder(torch.tanh(self.encoder(values))) * self.scale

    def get_extra_state(self) -> str:
        return self.note

    def set_extra_state(self, state: str) -> None:
        self.note = state


class Average:
    """The user's own moving average, whose decay warms up with its count."""

    def __init__(self, model: nn.Module) -> None:
        self.shadow = [one.detach().clone() for one in model.parameters()]
        self.updates = 0

    @property
    def decay(self) -> float:
        return min(0.99, (1 + self.updates) / (10 + self.updates))

    def update(self, model: nn.Module) -> None:
        self.updates += 1
        for mean, one in zip(self.shadow, model.parameters(), strict=True):
            mean.lerp_(one.detach(), 1 - self.decay)

    def state_dict(self) -> dict[str, Any]:
        return {"shadow": self.shadow, "updates": self.updates}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.shadow, self.updates = state["shadow"], state["updates"]


class Everything:
    """A start with one object of each kind, all of which go into each update."""

    def __init__(self, url: Path, *, seed: int, **options: Any) -> None:
        torch.manual_seed(seed)
        self.model = Odd()
        self.optimizer = torch.optim.Adam(self.model.parameters(), lr=0.05)
        self.average = AveragedModel(self.model, multi_avg_fn=get_ema_multi_avg_fn(0.9), use_buffers=True)
        self.own = Average(self.model)
        self.scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=3)
        self.streams = {
            "torch": torch.Generator().manual_seed(seed),
            "numpy": np.random.default_rng(seed),
            "python": random.Random(seed),
        }
        self.stopping: dict[str, Any] = {"best": float("inf"), "bad": 0, "history": []}
        named = {f"{name}_stream": stream for name, stream in self.streams.items()}
        items = {"model": self.model, "optimizer": self.optimizer, "average": self.average, "own": self.own}
        items |= {"scaler": self.scaler, "stopping": self.stopping, **named}
        self.manager = sp.CheckpointManager(url, items, **options)

    def train(self, until: int) -> list[object]:
        trace = []
        while self.manager.progress.step < until:
            values = torch.randn(3, 4, generator=self.streams["torch"])
            values = values * float(self.streams["numpy"].random()) + self.streams["python"].random()
            loss = (self.model(values) - values.flip(1)).square().mean()
            self.optimizer.zero_grad()
            self.scaler.scale(loss).backward()
            # The third update meets an overflow, which the scaler answers by leaving the step out.
            if self.manager.progress.step == 2:
                self.model.encoder.weight.grad[0, 0] = float("inf")
            self.scaler.step(self.optimizer)
            self.scaler.update()
            self.average.update_parameters(self.model)
            self.own.update(self.model)
            self._note(loss.item())
            self.manager.after_update()
            trace.append((loss.item().hex(), self.scaler.get_scale(), self.own.decay, dict(self.stopping)))
        return trace

    def _note(self, loss: float) -> None:
        is_better = loss < self.stopping["best"]
        self.stopping["bad"] = 0 if is_better else self.stopping["bad"] + 1
        self.stopping["best"] = min(loss, self.stopping["best"])
        self.stopping["history"] = [*self.stopping["history"], loss]

    def picture(self) -> dict[str, Any]:
        model = self.model
        return {
            "model": bits(dict(model.state_dict())),
            "buffers": bits(dict(model.named_buffers())),
            "average": bits(dict(self.average.state_dict())),
            "optimizer": bits(self.optimizer.state_dict()),
            "own": bits(self.own.state_dict()),
            "scaler": bits(self.scaler.state_dict()),
            "stopping": bits(self.stopping),
            "torch": bits(self.streams["torch"].get_state()),
            "numpy": bits(self.streams["numpy"].bit_generator.state),
            "python": self.streams["python"].getstate(),
            "progress": self.manager.progress,
        }


def test_one_object_of_each_kind_goes_on_bit_for_bit(tmp_path: Path) -> None:
    """Field reports B27, B29, B33, B34, B35, B37, B38, B39, B97, B115, B145, B185."""
    whole = Everything(tmp_path / "whole", seed=0)
    expected = whole.train(END)
    after = whole.picture()
    for cut in (1, 3, CUT):
        url = tmp_path / str(cut)
        job = Everything(url, seed=0, save=sp.every(updates=cut))
        job.train(cut)
        at_cut = job.picture()
        job.manager.close()

        job = Everything(url, seed=8)
        report = job.manager.restore()

        assert report.promise.level == "exact"
        assert job.picture() == at_cut, cut
        assert job.own.decay == (1 + cut) / (10 + cut)
        assert job.model.encoder.weight is job.model.decoder.weight
        assert job.train(END) == expected[cut:], cut
        assert job.picture() == after, cut
        job.manager.close()


def test_updates_that_the_scaler_skipped_are_counted_and_alarm_nobody(tmp_path: Path) -> None:
    job = Everything(tmp_path, seed=0)
    job.train(4)
    assert (job.manager.progress.step, job.manager.progress.skipped) == (4, 1)
    job.manager.close()


def test_the_types_order_and_sharing_of_plain_state_come_back(tmp_path: Path) -> None:
    shared = [1, 2]
    state: dict[Any, Any] = {"b": shared, "a": (1.5, float("nan"), -0.0, 2**70), 3: shared, None: {1, 2}, "t": "\ud800"}
    manager = sp.CheckpointManager(tmp_path, {"loop": state})
    manager.save()
    manager.close()

    again: dict[Any, Any] = {"other": 1}
    manager = sp.CheckpointManager(tmp_path, {"loop": again})
    manager.restore()

    assert repr(again) == repr(state)
    assert again["b"] is again[3]
    manager.close()


def unfreeze(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    model[0].requires_grad_(True)  # type: ignore[index]
    optimizer.add_param_group({"params": model[0].parameters(), "lr": 0.01})  # type: ignore[index]


def test_a_group_added_by_a_freeze_schedule_comes_back_with_the_checkpoint(tmp_path: Path) -> None:
    """The script needs no knowledge of the step before it restores. Field report B87."""

    def start(url: Path, seed: int) -> tuple[nn.Sequential, torch.optim.Optimizer, sp.CheckpointManager]:
        torch.manual_seed(seed)
        model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 1))
        model[0].requires_grad_(False)
        optimizer = torch.optim.Adam(model[1].parameters(), lr=0.1)
        return model, optimizer, sp.CheckpointManager(url, {"model": model, "optimizer": optimizer})

    def train(model: nn.Sequential, optimizer: Any, manager: sp.CheckpointManager, until: int) -> list[str]:
        losses = []
        while manager.progress.step < until:
            if manager.progress.step == 3 and len(optimizer.param_groups) == 1:
                unfreeze(model, optimizer)
            values = torch.randn(4, 3, generator=torch.Generator().manual_seed(manager.progress.step))
            optimizer.zero_grad()
            loss = (model(values) - 1).square().mean()
            loss.backward()
            optimizer.step()
            manager.after_update()
            losses.append(loss.item().hex())
        return losses

    expected = train(*start(tmp_path / "whole", 0), 6)
    for cut in (2, 3, 4):
        *live, manager = start(tmp_path / str(cut), 0)
        train(*live, manager, cut)
        manager.save()
        manager.close()

        *live, manager = start(tmp_path / str(cut), 4)
        manager.restore()
        assert train(*live, manager, 6) == expected[cut:], cut
        manager.close()


def half_moments(optimizer: torch.optim.Optimizer) -> None:
    for state in optimizer.state.values():
        state["exp_avg"] = state["exp_avg"].bfloat16()
        state["step"] = state["step"].double()


@pytest.mark.parametrize("make", [torch.optim.Adam, torch.optim.AdamW, torch.optim.NAdam])
def test_moments_of_another_dtype_than_their_parameters_keep_it(tmp_path: Path, make: Callable[..., Any]) -> None:
    """Field reports B93, B94, B95, B197."""
    model = nn.Linear(3, 1)
    optimizer = make(model.parameters())
    manager = sp.CheckpointManager(tmp_path, {"model": model, "optimizer": optimizer})
    model(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    half_moments(optimizer)
    manager.after_update()
    manager.save()
    manager.close()

    again = nn.Linear(3, 1)
    fresh = make(again.parameters())
    manager = sp.CheckpointManager(tmp_path, {"model": again, "optimizer": fresh})
    manager.restore()

    assert bits(fresh.state_dict()) == bits(optimizer.state_dict())
    assert next(iter(fresh.state.values()))["exp_avg"].dtype is torch.bfloat16
    manager.close()


def test_moments_follow_the_names_of_their_parameters_whatever_the_order(tmp_path: Path) -> None:
    """Two layers of equal shape, declared and listed in the other order. Field report B85."""

    def start(flipped: bool) -> tuple[nn.Module, torch.optim.Optimizer, sp.CheckpointManager]:
        model = nn.Module()
        for name in ("second", "first") if flipped else ("first", "second"):
            model.add_module(name, nn.Linear(2, 2, bias=False))
        optimizer = torch.optim.Adam(model.parameters())
        # Sums over all parameters, as in clipping, take another order: that is no exact continuation.
        contract = sp.Contract(level="same_data")
        items = {"model": model, "optimizer": optimizer}
        return model, optimizer, sp.CheckpointManager(tmp_path, items, contract=contract)

    model, optimizer, manager = start(flipped=False)
    (10 * model.first.weight.sum() + model.second.weight.sum()).backward()
    optimizer.step()
    manager.after_update()
    manager.save()
    manager.close()

    model, optimizer, manager = start(flipped=True)
    manager.restore()
    assert torch.allclose(optimizer.state[model.first.weight]["exp_avg"], torch.ones(2, 2))
    assert torch.allclose(optimizer.state[model.second.weight]["exp_avg"], torch.full((2, 2), 0.1))
    manager.close()


def test_a_slice_of_a_large_tensor_is_stored_as_the_slice(tmp_path: Path) -> None:
    """Field report B109."""
    large = torch.arange(500_000.0)
    manager = sp.CheckpointManager(tmp_path, {"loop": {"part": large[10:20]}})
    result = manager.save().wait()
    assert result.size_bytes < 100_000
    manager.close()
