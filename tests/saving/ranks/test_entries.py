"""Values of the plain trees that several ranks hold are compared like their tensors."""

from __future__ import annotations

import dataclasses

import pytest

from safepoint.errors import AbortedError
from safepoint.format.plain import ScalarLeaf, Shared
from safepoint.state.item import CapturedItem
from tests.saving.ranks.job import Held, Holding, Ranks, box, indexes, manifests, weights_at


def number(value: int) -> ScalarLeaf:
    return ScalarLeaf("int8", bytes([value]))


def entry(value: object, *ties: str) -> dict[str, object]:
    return {"kind": "parameter", "persistent": True, "requires_grad": True, "value": value, "ties": list(ties)}


def module(scales: dict[str, int], *ties: str) -> dict[str, object]:
    entries = {name: entry(number(value), *ties) for name, value in scales.items()}
    return {"entries": entries, "extra": {}, "training": []}


def optimizer(parameters: list[str], lr: object, steps: dict[str, object]) -> dict[str, object]:
    group = {"parameters": parameters, "devices": ["cpu"] * len(parameters), "options": {"lr": lr}}
    return {"class": "Adam", "groups": [group], "state": {"model": steps}, "other": {}, "extra": {}}


def holding(type_name: str, *trees: object, is_leaders: bool = False) -> Holding:
    """Return ranks that hold one item with these trees, and one tensor of it in common."""

    class Leaders(Held):
        def capture(self) -> CapturedItem:
            names = frozenset(self.plain["entries"]) if is_leaders else frozenset()  # type: ignore[index]
            return dataclasses.replace(super().capture(), leaders=names)

    return lambda rank, world_size, step: [Leaders("it", type_name, trees[rank], [box("w", weights_at(step), 0, 96)])]


STEPS = {"a": {"step": number(3)}}


@pytest.mark.parametrize(
    ("type_name", "trees", "found"),
    [
        (
            "module",
            [module({"scale": 1}), module({"scale": 1}), module({"scale": 2})],
            "it: scale: ranks 0, 1 unlike rank 2",
        ),
        (
            "optimizer",
            [optimizer(["model/a"], lr, STEPS) for lr in (0.1, 0.2, 0.1)],
            "it: lr of the group of model/a: ranks 0, 2 unlike rank 1",
        ),
        (
            "optimizer",
            [optimizer(["model/a"], 0.1, {"a": {"step": number(step)}}) for step in (3, 4, 4)],
            "it: state of model/a: rank 0 unlike ranks 1, 2",
        ),
    ],
    ids=["parameter", "option", "step"],
)
def test_a_value_that_differs_is_named_on_all_ranks_or_noted(type_name: str, trees: list[object], found: str) -> None:
    """Spec: C5.4"""
    job = Ranks(3, holding(type_name, *trees))
    for outcome in job.run(lambda rank: rank.save(10)):
        assert isinstance(outcome.error, AbortedError), outcome.error
        assert found in str(outcome.error)
    assert manifests(job.storage) == []
    noting = Ranks(3, holding(type_name, *trees), refuses_difference=False)
    for outcome in noting.run(lambda rank: rank.save(10)):
        outcome.returned()
    (manifest,) = manifests(noting.storage)
    assert found in manifest.agreement and found in manifest.conditions.reasons["replicas"]


@pytest.mark.parametrize(
    ("type_name", "trees"),
    [
        ("module", [module({"a": 1, "both": 5}), module({"b": 2, "both": 5})]),
        ("module", [module({"a": 1}), module({"a": 1}, "b")]),
        ("optimizer", [optimizer(["model/a"], 0.1, STEPS), optimizer(["model/b"], 0.2, {"b": {"step": number(4)}})]),
        (
            "optimizer",
            [optimizer(["model/a"], Shared(1, 0.1), STEPS), optimizer(["model/a", "model/b"], Shared(2, 0.1), STEPS)],
        ),
    ],
    ids=["entries", "ties", "groups", "numbers"],
)
def test_ranks_that_hold_other_parts_may_list_other_entries(type_name: str, trees: list[object]) -> None:
    job = Ranks(2, holding(type_name, *trees))
    for outcome in job.run(lambda rank: rank.save(10)):
        outcome.returned()
    (manifest,) = manifests(job.storage)
    assert manifest.conditions.reasons == {}
    assert ["it" in index.items for index in indexes(job.storage, manifest)] == [True, True]


def test_values_that_are_the_leader_s_may_differ() -> None:
    """Spec: C5.4"""
    job = Ranks(2, holding("module", module({"count": 1}), module({"count": 2}), is_leaders=True))
    for outcome in job.run(lambda rank: rank.save(10)):
        outcome.returned()
    (manifest,) = manifests(job.storage)
    assert manifest.conditions.reasons == {}


@pytest.mark.parametrize("every", [0, 1])
def test_values_are_compared_as_often_as_tensors(every: int) -> None:
    job = Ranks(2, holding("module", module({"a": 1}), module({"a": 2})), compares_every=every)
    errors = [outcome.error for outcome in job.run(lambda rank: rank.save(10))]
    assert [error is None for error in errors] == [not every, not every], errors
