"""States of an optimizer's parameters that are put back all at once end up as those that are put back one by one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from safepoint.state import optimizers
from tests.state.roundtrip import Stored, same_bits
from tests.state.training import items

States = dict[torch.Tensor, dict[str, Any]]


def made(seed: int, *, steps: int, **options: Any) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(3, 2), nn.Linear(2, 3))
    # Of those that keep two numbers for each parameter.
    kind = torch.optim.Adam if options else torch.optim.NAdam
    optimizer = kind(model.parameters(), **options)
    for _ in range(steps):
        model(torch.ones(1, 3)).square().sum().backward()
        optimizer.step()
    return model, optimizer


def first(states: States) -> dict[str, Any]:
    return next(iter(states.values()))


def turn_keys(states: States) -> None:
    state = first(states)
    for key in list(state)[::-1]:
        state[key] = state.pop(key)


def turn_numbers(states: States) -> None:
    for parameter, state in states.items():
        numbers = {key: value for key, value in list(state.items())[::-1] if not value.dim()}
        states[parameter] = {**numbers, **{key: value for key, value in state.items() if value.dim()}}


def turn_parameters(states: States) -> None:
    for parameter in list(states)[::-1]:
        states[parameter] = states.pop(parameter)


def share_a_number(states: States) -> None:
    for state in states.values():
        state["step"] = first(states)["step"]


def share_a_dict(states: States) -> None:
    for parameter in states:
        states[parameter] = first(states)


CHANGES: dict[str, Callable[[States], object]] = {
    "nothing": lambda states: None,
    "no state": lambda states: states.clear(),
    "no state of one": lambda states: states.pop(next(iter(states))),
    "keys in another order": turn_keys,
    "numbers in another order": turn_numbers,
    "parameters in another order": turn_parameters,
    "a number as a Python one": lambda states: first(states).update(step=3.0),
    "a number of another dtype": lambda states: first(states).update(step=torch.tensor(3.0, dtype=torch.float64)),
    "a number with an axis": lambda states: first(states).update(step=torch.tensor([3.0])),
    "a number that needs grad": lambda states: first(states).update(step=torch.tensor(3.0, requires_grad=True)),
    "one number for all": share_a_number,
    "one dict for all": share_a_dict,
    "one key less": lambda states: first(states).pop("exp_avg"),
    "one key more": lambda states: first(states).update(more=torch.ones(2)),
    "a tensor of another shape": lambda states: first(states).update(exp_avg=torch.ones(7)),
    "a state of another class": lambda states: states.update({next(iter(states)): 3}),  # type: ignore[dict-item]
    "a state without a parameter": lambda states: states.update({"count": torch.tensor(3.0)}),  # type: ignore[dict-item]
}


def parts_of(state: Any) -> list[Any]:
    return [state, *state.values()] if isinstance(state, dict) else [state]


def restored(saved: Stored, change: Callable[[States], object], **options: Any) -> tuple[list[Any], list[Any]]:
    """Return the states after a restore by the names of parameters, and at which place each part of them was before."""
    model, optimizer = made(2, steps=5, **options)
    change(optimizer.state)
    before = [part for state in optimizer.state.values() for part in parts_of(state)]
    places = {id(part): place for place, part in enumerate(before)}
    saved.restore(items(model, optimizer))
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    states = [(names[id(parameter)], state) for parameter, state in optimizer.state.items()]
    return states, [[places.get(id(part)) for part in parts_of(state)] for _, state in states]


@pytest.mark.parametrize("options", [{}, {"fused": True}], ids=str)
@pytest.mark.parametrize("change", list(CHANGES))
def test_states_put_back_at_once_are_those_put_back_one_by_one(
    change: str, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    model, optimizer = made(1, steps=2, **options)
    saved = Stored(items(model, optimizer))
    states, places = restored(saved, CHANGES[change], **options)
    monkeypatch.setattr(optimizers, "plain_states", lambda *_: None)
    one_by_one = restored(saved, CHANGES[change], **options)

    named = {name: optimizer.state[parameter] for name, parameter in model.named_parameters()}
    assert same_bits(dict(states), named) and list(dict(states)) == list(named)
    assert same_bits(states, one_by_one[0])
    assert places == one_by_one[1]


@pytest.mark.parametrize("change", ["nothing", "no state"])
def test_plain_states_are_put_back_without_a_look_at_each(change: str, monkeypatch: pytest.MonkeyPatch) -> None:
    saved = Stored(items(*made(1, steps=2)))

    def refuse(*_: object) -> None:
        raise AssertionError("looked at one by one")

    monkeypatch.setattr(optimizers, "divided", refuse)
    states, _ = restored(saved, CHANGES[change])
    assert len(states) == 4


def test_new_states_have_numbers_of_their_own() -> None:
    states, _ = restored(Stored(items(*made(1, steps=2))), CHANGES["no state"])
    steps = [state["step"] for _, state in states]
    steps[0].fill_(7)
    assert list(map(float, steps)) == [7, 2, 2, 2]


@pytest.mark.parametrize("is_inference", [False, True])
def test_a_number_that_is_written_counts_the_write(is_inference: bool) -> None:
    model, optimizer = made(2, steps=5)
    saved, steps = Stored(items(*made(1, steps=2))), [state["step"] for state in optimizer.state.values()]
    before = [step._version for step in steps]
    with torch.inference_mode(is_inference):
        saved.restore(items(model, optimizer))
    assert list(map(float, steps)) == [2] * 4
    assert all(step._version > count for step, count in zip(steps, before, strict=True))


def test_numbers_made_in_inference_mode_are_written_outside_of_it() -> None:
    model, optimizer = made(2, steps=5)
    with torch.inference_mode():
        steps = [torch.tensor(5.0) for _ in optimizer.state]
    for state, step in zip(optimizer.state.values(), steps, strict=True):
        state["step"] = step
    Stored(items(*made(1, steps=2))).restore(items(model, optimizer))
    assert list(map(float, steps)) == [2] * 4
