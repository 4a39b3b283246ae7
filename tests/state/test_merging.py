"""Restored optimizer state in live containers: what fits stays, with what is known of it; what is shared does not."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from safepoint.state.item import Permits
from safepoint.state.optimizers import OptimizerItem
from safepoint.state.sight import Sight
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


def test_what_was_looked_at_for_a_restore_in_place_is_not_drafted_again_after_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A restored optimizer records the order of groups that it was given; here it is that of the live ones."""
    named = {f"net/{name}": nn.Parameter(torch.ones(2)) for name in "ab"}
    optimizer = torch.optim.AdamW([{"params": [one]} for one in named.values()])
    for one in named.values():
        one.grad = torch.ones(2)
    optimizer.step()
    item = OptimizerItem("optimizer", optimizer, lambda: named)
    stored = Stored({"optimizer": OptimizerItem("optimizer", optimizer, lambda: named)})
    drafts: list[str] = []
    original = OptimizerItem._draft

    def counting(self: OptimizerItem, whole: dict[str, Any], sight: Sight) -> object:
        drafts.append(self.name)
        return original(self, whole, sight)

    monkeypatch.setattr(OptimizerItem, "_draft", counting)

    stored.restore({"optimizer": item})
    item.capture()

    assert drafts == ["optimizer"]
