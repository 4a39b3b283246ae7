"""Gradient scalers as items."""

from __future__ import annotations

import torch

from safepoint.state.item import Permits
from safepoint.state.scalers import ScalerItem
from tests.state.roundtrip import Stored


def scaler(scale: float = 1024.0, *, enabled: bool = True) -> torch.amp.GradScaler:
    return torch.amp.GradScaler("cpu", init_scale=scale, growth_interval=3, enabled=enabled)


def step(live: torch.amp.GradScaler, weight: torch.nn.Parameter, gain: float = 1.0) -> None:
    optimizer = torch.optim.SGD([weight], lr=0.1)
    live.scale((weight * gain).sum()).backward()
    live.step(optimizer)
    live.update()
    weight.grad = None


def items(live: torch.amp.GradScaler) -> dict[str, ScalerItem]:
    return {"scaler": ScalerItem("scaler", live)}


def test_scale_and_growth_go_on_where_they_were() -> None:
    """Field reports B33, B35."""
    straight, weight = scaler(), torch.nn.Parameter(torch.ones(2))
    step(straight, weight, gain=float("inf"))
    step(straight, weight)
    step(straight, weight)
    assert (straight.get_scale(), straight._get_growth_tracker()) == (512.0, 2)
    resumed = scaler(2.0)
    Stored(items(straight)).restore(items(resumed))
    step(resumed, weight)
    assert (resumed.get_scale(), resumed._get_growth_tracker()) == (1024.0, 0)


def test_unscaling_works_right_after_a_restore() -> None:
    """Field report B34."""
    straight, weight = scaler(), torch.nn.Parameter(torch.ones(2))
    step(straight, weight)
    resumed = scaler(2.0)
    Stored(items(straight)).restore(items(resumed))
    weight.grad = torch.full((2,), 1024.0)
    resumed.unscale_(torch.optim.SGD([weight], lr=0.1))
    assert weight.grad.tolist() == [1.0, 1.0]


def test_a_scaler_not_used_yet_is_not_used_after_either() -> None:
    used, weight = scaler(8.0), torch.nn.Parameter(torch.ones(2))
    step(used, weight)
    Stored(items(scaler(64.0))).restore(items(used))
    assert used._scale is None and used.get_scale() == 64.0
    step(used, weight)
    assert used.get_scale() == 64.0


def test_enabled_on_one_side_only_is_a_difference() -> None:
    stored = Stored(items(scaler()))
    assert stored.words(items(scaler(enabled=False))) == ["scaler.enabled"]
    assert Stored(items(scaler(enabled=False))).words(items(scaler())) == ["scaler.enabled"]
    permits = Permits(frozenset({"scaler.enabled"}))
    assert stored.restore(items(scaler(enabled=False)), permits) == {"scaler": ["the scaler"]}
    assert Stored(items(scaler(enabled=False))).restore(items(scaler(enabled=False))) == {"scaler": []}


def test_capturing_leaves_the_scaler_as_it_is() -> None:
    fresh = scaler()
    Stored(items(fresh))
    assert fresh._scale is None
