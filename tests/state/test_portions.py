"""Tensors are looked at some at a time: what is told of them is the same, whichever portion the odd one is in."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch

from safepoint.errors import RequestError
from safepoint.state import portions
from safepoint.state.portions import facts_of, portions_of
from safepoint.state.stateful import PlainItem

COUNT = 10


@pytest.fixture(autouse=True)
def few_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(portions, "_PORTION", 4)


@pytest.mark.parametrize("count", [0, 1, 3, 4, 5, 8, 9])
def test_portions_are_all_of_it_in_order(count: int) -> None:
    listed = list(range(count))
    assert [one for portion in portions_of(listed) for one in portion] == listed
    assert all(len(portion) <= 4 for portion in portions_of(listed))
    assert facts_of(listed, [partial(map, str), lambda some: [one * 2 for one in some]]) == [
        [str(one) for one in listed],
        [2 * one for one in listed],
    ]


CHANGES: dict[str, Callable[[dict[str, Any], str], object]] = {
    "another shape": lambda held, key: held.update({key: torch.ones(3, 2)}),
    "another type": lambda held, key: held.update({key: torch.ones(6, dtype=torch.float64)}),
    "a gradient": lambda held, key: held[key].requires_grad_(),
    "other strides": lambda held, key: held.update({key: torch.ones(2, 3).t()}),
    "a sparse one": lambda held, key: held.update({key: torch.eye(3).to_sparse()}),
    "a nested one": lambda held, key: held.update({key: torch.nested.nested_tensor([torch.ones(1), torch.ones(2)])}),
    "a number": lambda held, key: held.update({key: torch.tensor(4)}),
    "a buffer": lambda held, key: held.update({key: torch.nn.Buffer(torch.ones(6))}),
    "a view of the last one": lambda held, key: held.update({key: held[f"k{COUNT}"][1:3]}),
    "no memory": lambda held, key: held[key].untyped_storage().resize_(0),
}


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize("place", [1, 5, COUNT - 1])
@pytest.mark.parametrize("change", CHANGES)
def test_an_odd_tensor_is_noticed_in_any_portion(change: str, place: int, monkeypatch: pytest.MonkeyPatch) -> None:
    held: dict[str, Any] = {f"k{number}": torch.full((6,), float(number)) for number in range(COUNT + 1)}

    def outcome(item: PlainItem) -> object:
        try:
            captured = item.capture()
        except RequestError as exc:
            return str(exc)
        return captured.tree, [(one.spec, one.source.nbytes) for one in captured.tensors]

    item = PlainItem("x", held)
    before = outcome(item)
    CHANGES[change](held, f"k{place}")
    found = outcome(item), outcome(PlainItem("x", held))
    monkeypatch.setattr(portions, "_PORTION", 1000)
    assert found == (outcome(PlainItem("x", held)),) * 2 != (before,) * 2
