"""Restored optimizer state in live containers: what several parameters have in common is no place of one of them."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from safepoint.state.item import Permits
from tests.state.roundtrip import Stored, same_bits
from tests.state.training import items


@pytest.mark.parametrize(("before", "after"), [("apart", "one"), ("one", "apart"), ("one", "one")])
def test_a_dict_that_parameters_share_is_no_place_of_one_of_them(before: str, after: str) -> None:
    def made(how: str) -> tuple[nn.Module, torch.optim.Optimizer]:
        model = nn.Linear(3, 2)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        first, second = ({"x": torch.full((2,), value)} for value in (1.0, 2.0))
        optimizer.state.update({model.weight: first, model.bias: first if how == "one" else second})
        return model, optimizer

    (model, optimizer), (other, resumed) = made(before), made(after)
    stored, entries = Stored(items(model, optimizer)), items(other, resumed)
    shared = resumed.state[other.weight]["x"]
    targets = entries["optimizer"].targets(stored.saved["optimizer"], Permits())
    assert after == "apart" or all(target.tensor is not shared for target in targets.values())  # type: ignore[union-attr]
    stored.restore(entries)
    assert same_bits(list(resumed.state.values()), list(optimizer.state.values()))
