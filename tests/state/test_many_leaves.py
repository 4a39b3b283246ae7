"""A dict of many tensors is looked at as one: it is stored, checked and built as one of a few is, and refused alike."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import pytest
import torch

from safepoint.errors import CorruptionError
from safepoint.format.plain import TensorLeaf, ViewLeaf, decode_plain
from safepoint.state import rebuild, tree
from safepoint.state.item import TensorSpec
from safepoint.state.rebuild import MANY, check_plain
from safepoint.state.sight import Sight
from safepoint.state.stateful import PlainItem
from safepoint.state.tree import draft_of, unflatten
from tests.state.roundtrip import same_bits

COUNT = MANY + 3
PLACE = 5


def spec(name: str, dtype: str = "float32") -> TensorSpec:
    return TensorSpec(name, dtype, (2,), (2,), (0,))


def leaves() -> dict[Any, Any]:
    return {f"k{number}": TensorLeaf(f"state/k{number}") for number in range(COUNT)}


def with_leaf(leaf: object) -> dict[Any, Any]:
    return {**leaves(), f"k{PLACE}": leaf}


WRONG: dict[str, Callable[[], dict[Any, Any]]] = {
    "another name": lambda: with_leaf(TensorLeaf("state/k1x")),
    "the name of another": lambda: with_leaf(TensorLeaf("state/k3")),
    "an unknown holder": lambda: with_leaf(TensorLeaf(f"state/k{PLACE}", container="shelf")),
    "a gradient of integers": lambda: with_leaf(TensorLeaf(f"state/k{PLACE}", requires_grad=True)),
    "a stored tensor without a leaf": lambda: with_leaf(None),
    "a view of it": lambda: with_leaf(ViewLeaf(f"state/k{PLACE}", 0, (3,), (1,))),
    "exchanged places": lambda: {**leaves(), "k1": TensorLeaf("state/k2"), "k2": TensorLeaf("state/k1")},
    "a key that is no text": lambda: {**leaves(), 7: TensorLeaf("state/[8]")},
    "a key that is escaped": lambda: {**leaves(), "a b": TensorLeaf("state/a b")},
}


def refusal(plain: dict[Any, Any]) -> str:
    names = [f"state/k{number}" for number in range(COUNT)]
    specs = {name: spec(name, "int64" if name.endswith(str(PLACE)) else "float32") for name in names}
    with pytest.raises(CorruptionError) as caught:
        check_plain({"state": plain}, specs, item="x")
    return str(caught.value)


@pytest.mark.parametrize("wrong", WRONG)
def test_a_wrong_leaf_among_many_is_refused_as_among_a_few(wrong: str, monkeypatch: pytest.MonkeyPatch) -> None:
    found = refusal(WRONG[wrong]())
    monkeypatch.setattr(rebuild, "MANY", 1000)
    assert found == refusal(WRONG[wrong]())


def test_a_leaf_of_many_that_stands_elsewhere_as_well_is_refused() -> None:
    specs = {name: spec(name) for name in (f"state/k{number}" for number in range(COUNT))}
    check_plain({"state": leaves()}, specs, item="x")
    others = TensorLeaf("state/k2"), ViewLeaf("state/k2", 0, (2,), (1,))
    for twice in ({"a": TensorLeaf("state/k2"), "state": leaves()}, *({"state": leaves(), "z": one} for one in others)):
        with pytest.raises(CorruptionError, match=r"one place for each tensor|the name of its place"):
            check_plain(twice, specs, item="x")


FORMS: dict[str, object] = {
    "two tags": {"$tensor": ["n", "tensor", "cpu", False], "$size": [1]},
    "another tag": {"$size": [1, 2]},
    "too few fields": {"$tensor": ["n", "tensor", "cpu"]},
    "a number for a name": {"$tensor": [1, "tensor", "cpu", False]},
    "a number for a flag": {"$tensor": ["n", "tensor", "cpu", 0]},
    "no list": {"$tensor": "abcd"},
}


@pytest.mark.parametrize("other", FORMS)
def test_a_form_among_many_is_decoded_or_refused_as_alone(other: str) -> None:
    def outcome(form: object) -> object:
        try:
            return decode_plain(form, where="x")
        except CorruptionError as exc:
            return str(exc)

    many = {f"k{number}": {"$tensor": [f"k{number}", "tensor", "cpu", number == 2]} for number in range(COUNT)}
    assert outcome(many) == {key: TensorLeaf(key, requires_grad=number == 2) for number, key in enumerate(many)}
    alone, among = outcome({"o": FORMS[other]}), outcome({**many, "o": FORMS[other]})
    assert among == (alone if isinstance(alone, str) else {**outcome(many), **alone})  # type: ignore[dict-item]


def test_leaves_of_many_nest_no_deeper_than_others() -> None:
    def nested(depth: int) -> object:
        form: object = {f"k{number}": {"$tensor": [f"k{number}", "tensor", "cpu", False]} for number in range(COUNT)}
        for _ in range(depth):
            form = [form]
        return form

    decode_plain(nested(63))
    with pytest.raises(CorruptionError, match="64 levels"):
        decode_plain(nested(64))


def several(change: Callable[[dict[str, Any]], object] = lambda held: None) -> dict[str, Any]:
    held: dict[str, Any] = {f"k{number}": torch.full((number + 1,), float(number)) for number in range(COUNT)}
    change(held)
    return held


def exchange(key: str, value: object) -> Callable[[dict[str, Any]], object]:
    return lambda held: held.update({key: value})


HELD: dict[str, Callable[[dict[str, Any]], object]] = {
    "as they are": lambda held: None,
    "one twice": lambda held: held.update(k1=held["k2"]),
    "a view of another": lambda held: held.update(k1=held["k7"][2:]),
    "a parameter": exchange("k1", torch.nn.Parameter(torch.ones(2))),
    "a buffer": exchange("k1", torch.nn.Buffer(torch.ones(2))),
    "one of no axis": exchange("k1", torch.tensor(3.0)),
    "a gradient": exchange("k1", torch.ones(3, requires_grad=True)),
    "a transpose": exchange("k1", torch.arange(6.0).reshape(2, 3).t()),
    "no elements": exchange("k1", torch.ones(0, 3)),
    "a sparse one": exchange("k1", torch.eye(3).to_sparse()),
    "a number": exchange("k1", 7),
    "a key that is escaped": exchange("a b", torch.ones(1)),
    "a long key": exchange("l" * 500, torch.ones(1)),
}


@pytest.mark.parametrize("change", HELD)
@pytest.mark.parametrize("kind", [dict, OrderedDict])
def test_many_tensors_are_stored_and_built_as_a_few_are(
    change: str, kind: type, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = {"class": "dict", "state": kind(several(HELD[change]))}

    def drafted() -> tuple[object, list[str], list[int]]:
        draft = draft_of(whole, Sight.of(whole), path="x")
        return draft.plain, [name for name, _ in draft.tensors], list(map(id, draft.origins))

    def built() -> object:
        plain, tensors = tree.flatten(whole)
        return unflatten(plain, dict(tensors))

    found, again = drafted(), built()
    monkeypatch.setattr(rebuild, "MANY", 1000)
    monkeypatch.setattr(tree, "MANY", 1000)
    form, names, origins = drafted()
    assert found[:2] == (form, names)
    assert change == "a sparse one" or found[2] == origins
    assert same_bits(again, built()) and type(again["state"]) is kind  # type: ignore[index]


def test_a_capture_tells_of_many_tensors_what_each_is() -> None:
    held = several()
    item = PlainItem("x", held)
    for captured in (item.capture(), item.capture()):
        for (key, tensor), one in zip(held.items(), captured.tensors, strict=True):
            shape = tuple(tensor.shape)
            assert one.spec == TensorSpec(f"state/{key}", "float32", shape, shape, (0,))
            assert one.source.tensor is tensor  # type: ignore[attr-defined]  # of a `TensorSource`
            assert one.source.name == f"x: state/{key}"  # type: ignore[attr-defined]
            assert one.source.version == tensor._version  # type: ignore[attr-defined]
            assert not one.is_leaders


def rows(change: Callable[[list[dict[Any, Any]]], object] = lambda held: None) -> dict[str, Any]:
    """Return dicts as an optimizer holds one for each parameter."""
    held: list[dict[Any, Any]] = [
        {"step": torch.tensor(float(number)), "a": torch.full((2,), float(number)), "b": torch.ones(number + 1)}
        for number in range(COUNT)
    ]
    change(held)
    return {f"k{number}": row for number, row in enumerate(held)}


ROWS: dict[str, Callable[[list[dict[Any, Any]]], object]] = {
    "as they are": lambda held: None,
    "two numbers": lambda held: [row.update(more=torch.tensor(number)) for number, row in enumerate(held)],
    "numbers alone": lambda held: [(row.pop("a"), row.pop("b")) for row in held],
    "no number": lambda held: [row.pop("step") for row in held],
    "nothing": lambda held: [row.clear() for row in held],
    "another key": lambda held: held[3].update(c=torch.ones(1)),
    "another order": lambda held: held[3].update(step=held[3].pop("step")),
    "a number among the others": lambda held: held[3].update(a=torch.tensor(1)),
    "no number among the others": lambda held: held[3].update(step=torch.ones(1)),
    "a number of Python's": lambda held: held[3].update(step=3),
    "numbers of Python's": lambda held: [row.update(step=3) for row in held],
    "a parameter": lambda held: held[3].update(a=torch.nn.Parameter(torch.ones(2))),
    "another type": lambda held: held[3].update(step=torch.tensor(1, dtype=torch.int16)),
    "a gradient": lambda held: held[3].update(a=torch.ones(2, requires_grad=True)),
    "one tensor twice": lambda held: held[3].update(a=held[4]["a"]),
    "one number twice": lambda held: held[3].update(step=held[4]["step"]),
    "a view": lambda held: held[3].update(b=held[8]["b"][2:]),
    "one row twice": lambda held: held.__setitem__(3, held[4]),
    "a dict of no text": lambda held: [row.update({7: torch.ones(1)}) for row in held],
    "a key that is escaped": lambda held: [row.update({"a b": torch.ones(1)}) for row in held],
    "a long key": lambda held: [row.update({"l" * 500: torch.ones(1)}) for row in held],
}


@pytest.mark.parametrize("change", ROWS)
def test_many_dicts_of_tensors_are_stored_as_a_few_are(change: str, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = {"first": 1.5, "state": rows(ROWS[change]), "last": torch.tensor(7)}

    def drafted() -> tuple[object, list[int], list[tuple[str, int]], list[int]]:
        draft = draft_of(whole, Sight.of(whole), path="x")
        # What stands for a view is another one each time.
        named = [(name, tensor.data_ptr()) for name, tensor in draft.tensors]
        return draft.plain, list(map(id, draft.values)), named, list(map(id, draft.origins))

    found = drafted()
    monkeypatch.setattr(tree, "MANY", 1000)
    assert found == drafted()
