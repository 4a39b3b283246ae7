"""Objects with a state of their own, and plain containers."""

from __future__ import annotations

from collections import OrderedDict
from typing import Any

import pytest
import torch

from safepoint.errors import RequestError
from safepoint.state.item import Permits
from safepoint.state.stateful import PlainItem, StatefulItem
from tests.state.roundtrip import Stored, same_bits


class Average:
    """An exponential average of a user's own, with a decay that warms up."""

    def __init__(self, model: torch.nn.Module) -> None:
        self.updates = 0
        self.shadow = {name: one.detach().clone() for name, one in model.named_parameters()}
        self.asked = 0

    @property
    def decay(self) -> float:
        return min(0.99, (1 + self.updates) / (10 + self.updates))

    def update(self, model: torch.nn.Module) -> None:
        self.updates += 1
        for name, one in model.named_parameters():
            self.shadow[name].lerp_(one.detach(), 1 - self.decay)

    def state_dict(self) -> dict[str, Any]:
        self.asked += 1
        return {"updates": self.updates, "shadow": self.shadow}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.updates = state["updates"]
        self.shadow = state["shadow"]


class Other(Average):
    pass


def averaged(seed: int, updates: int) -> tuple[torch.nn.Module, Average]:
    torch.manual_seed(seed)
    model = torch.nn.Linear(3, 2)
    average = Average(model)
    for _ in range(updates):
        model.weight.data.add_(0.5)
        average.update(model)
    return model, average


def test_an_average_of_the_user_goes_on_with_its_decay() -> None:
    """Field reports B27, B29."""
    model, straight = averaged(1, 4)
    _, resumed = averaged(2, 0)
    Stored({"ema": StatefulItem("ema", straight)}).restore({"ema": StatefulItem("ema", resumed)})
    assert resumed.decay == straight.decay == 5 / 14
    straight.update(model)
    resumed.update(model)
    assert same_bits(resumed.shadow, straight.shadow)


def test_what_is_handed_over_shares_nothing_with_the_source() -> None:
    model, straight = averaged(1, 1)
    _, resumed = averaged(2, 0)
    Stored({"ema": StatefulItem("ema", straight)}).restore({"ema": StatefulItem("ema", resumed)})
    kept = resumed.shadow["weight"].clone()
    straight.update(model)
    assert torch.equal(resumed.shadow["weight"], kept)


def test_the_state_is_asked_for_once_a_capture() -> None:
    _, average = averaged(1, 0)
    StatefulItem("ema", average).capture()
    assert average.asked == 1


def test_an_object_of_another_class_is_a_difference() -> None:
    """Field report B30."""
    model, average = averaged(1, 0)
    stored = Stored({"ema": StatefulItem("ema", average)})
    assert stored.words({"ema": StatefulItem("ema", Other(model))}) == ["ema.type"]
    assert stored.words({"ema": PlainItem("ema", {})}) == ["ema.type"]


def test_a_state_that_is_not_plain_is_refused_by_its_path() -> None:
    _, average = averaged(1, 0)
    average.shadow["weight"] = lambda: None  # type: ignore[assignment]
    with pytest.raises(RequestError) as caught:
        StatefulItem("ema", average).capture()
    assert caught.value.where == "ema.state.shadow.weight"


@pytest.mark.parametrize("kind", [dict, OrderedDict])
def test_a_registered_dict_is_the_same_object_filled_again(kind: type) -> None:
    """Field reports B38, B39: counters of patience and best scores."""
    source = kind(best=0.25, patience=2, history=[1, 2], weights=torch.ones(2))
    live = kind(best=9.0, stale=True)
    inner = live
    Stored({"early": PlainItem("early", source)}).restore({"early": PlainItem("early", live)})
    assert inner is live
    assert same_bits(live, source)
    assert list(live) == list(source)


def test_a_registered_list_is_the_same_object_filled_again() -> None:
    live: list[Any] = ["stale"]
    Stored({"log": PlainItem("log", [1, [2.5]])}).restore({"log": PlainItem("log", live)}, Permits())
    assert live == [1, [2.5]]


def test_a_list_is_no_dict() -> None:
    assert Stored({"x": PlainItem("x", [])}).words({"x": PlainItem("x", {})}) == ["x.type"]
