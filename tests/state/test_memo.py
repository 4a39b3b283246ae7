"""A capture that remembers gives to the byte what a first one gives, whatever has changed in between."""

from __future__ import annotations

import datetime
import gc
import random
import weakref
import zoneinfo
from collections.abc import Callable
from typing import Any

import msgspec
import pytest
import torch
from torch import nn
from torch.testing._internal.two_tensor import TwoTensor

from safepoint.errors import RequestError
from safepoint.format.plain import MAX_DEPTH, encode_plain
from safepoint.state import modules
from safepoint.state.glance import Glances, ParameterNames
from safepoint.state.item import CapturedItem, Item
from safepoint.state.memo import Memo
from safepoint.state.modules import ModuleItem
from safepoint.state.names import qualified_parameters
from safepoint.state.optimizers import OptimizerItem
from safepoint.state.registry import Registry
from safepoint.state.sight import Sight
from safepoint.state.stateful import PlainItem
from safepoint.state.tensors import TensorSource
from safepoint.state.tree import flatten, unflatten
from tests.state.changes import CHANGES, Run
from tests.state.roundtrip import Stored


def content(captured: CapturedItem) -> tuple[object, ...]:
    """Return all that is stored of an item."""
    tensors = []
    for one in captured.tensors:
        data = bytearray(one.source.nbytes)
        one.source.copy_into(memoryview(data))
        memory = one.source.in_place()
        assert memory is None or bytes(memory) == bytes(data)
        if isinstance(one.source, TensorSource):
            unseen = msgspec.structs.replace(one.source, address=None)
            assert TensorSource.addresses([one.source]) == TensorSource.addresses([unseen])
            assert one.source.address is None or [one.source.address] == TensorSource.addresses([unseen])
        tensors.append((one.spec, one.is_leaders, bytes(data)))
    return captured.type, captured.tree, tensors, captured.division, captured.leaders


def capture(item: Item) -> tuple[object, ...]:
    """Return all that is stored, or why nothing can be."""
    try:
        return content(item.capture())
    except RequestError as exc:
        return ("refused", str(exc))


def fresh(run: Run) -> dict[str, tuple[object, ...]]:
    return {name: capture(item) for name, item in run.registry().items.items() if name != "rng"}


def remembered(registry: Registry) -> dict[str, tuple[object, ...]]:
    return {name: capture(item) for name, item in registry.items.items() if name != "rng"}


def stored(found: tuple[Any, ...]) -> object:
    """Return the text of an item and the names of its tensors; None if it was refused."""
    return None if found[0] == "refused" else (found[1], [spec.name for spec, _, _ in found[2]])


def visited(value: object) -> object:
    """Return what is stored of nested values by a visit of each of them."""
    try:
        plain, tensors = flatten({"class": "dict", "state": value})
        return msgspec.json.encode(encode_plain(plain)), [name for name, _ in tensors]
    except RequestError:
        return None


@pytest.mark.parametrize("name", list(CHANGES))
def test_a_change_shows_in_the_next_capture(name: str) -> None:
    run = Run()
    registry = run.registry()
    remembered(registry)

    CHANGES[name](run)

    first = fresh(run)
    assert remembered(registry) == first
    assert stored(first["plain"]) == visited(run.plain)


@pytest.mark.parametrize("seed", [*range(6), *(pytest.param(seed, marks=pytest.mark.soak) for seed in range(6, 200))])
def test_captures_among_changes_of_any_order_are_those_of_a_first_capture(seed: int) -> None:
    rng = random.Random(seed)
    run = Run()
    registry = run.registry()
    done = []
    for _ in range(12):
        name = rng.choice(list(CHANGES))
        done.append(name)
        CHANGES[name](run)
        assert remembered(registry) == fresh(run), f"seed {seed}: {done}"


def test_a_state_of_equal_facts_is_not_drafted_again(monkeypatch: pytest.MonkeyPatch) -> None:
    run = Run()
    registry = run.registry()
    remembered(registry)
    drafts: list[str] = []
    original = Memo.captured

    def counting(self: Memo, sight: Any, draft: Callable[[], Any], **options: Any) -> CapturedItem:
        return original(self, sight, lambda: (drafts.append(self._name), draft())[1], **options)

    monkeypatch.setattr(Memo, "captured", counting)
    run.step()
    run.plain["n"] = 77
    remembered(registry)

    assert drafts == []


def test_a_second_capture_says_where_memory_begins_that_holds_what_is_stored() -> None:
    held = {"a": torch.ones(3), "b": torch.ones(2, 2)}
    item = PlainItem("plain", held)
    item.capture()

    seen: list[Any] = [one.source for one in item.capture().tensors]
    assert [one.address for one in seen] == [one.data_ptr() for one in held.values()]


def test_what_is_remembered_keeps_no_tensor_alive() -> None:
    run = Run()
    registry = run.registry()
    remembered(registry)
    moments = [weakref.ref(one) for one in run.moments().values()]
    replaced = weakref.ref(run.scale)

    run.optimizer.state.clear()
    run.net.register_buffer("scale", torch.ones(2))
    gc.collect()

    assert [one() for one in (*moments, replaced)] == [None] * (len(moments) + 1)


def test_a_value_that_cannot_be_stored_is_named_by_its_path_at_the_next_capture_too() -> None:
    run = Run()
    registry = run.registry()
    remembered(registry)

    run.plain["list"][0] = datetime.datetime(2025, 3, 1, tzinfo=zoneinfo.ZoneInfo("Europe/Berlin"))

    with pytest.raises(RequestError, match=r"plain\.state\.list\[0\]"):
        registry.items["plain"].capture()


def test_a_capture_leaves_storages_as_resizable_as_they_were() -> None:
    run = Run()
    registry = run.registry()

    for item in registry.items.values():
        for one in item.capture().tensors:
            one.source.in_place()

    assert run.scale.untyped_storage().resizable()
    assert run.moments()["exp_avg"].untyped_storage().resizable()


def test_buffers_that_a_wrapper_begins_to_hand_out_show_in_the_next_capture(monkeypatch: pytest.MonkeyPatch) -> None:
    run = Run()
    registry = run.registry()
    before = remembered(registry)

    monkeypatch.setattr(modules, "handed_out_buffers", lambda module: {id(run.scale)})

    assert [remembered(registry) == fresh(run) != before for _ in range(2)] == [True, True]


def test_storages_of_two_sizes_are_told_apart_where_a_tensor_lies_at_the_same_address_in_both() -> None:
    memory = bytearray(64)
    large, small = (torch.frombuffer(memory, dtype=torch.float32, count=count)[:2] for count in (16, 2))

    assert large.data_ptr() == small.data_ptr()
    assert Sight.of([large]).facts != Sight.of([small]).facts == Sight.of([small]).facts


def test_a_parameter_that_becomes_a_buffer_shows_in_the_next_capture() -> None:
    module = nn.Module()
    module.held = nn.Parameter(torch.ones(2))
    item = ModuleItem("module", module)
    item.capture()

    held = module._parameters.pop("held")
    module.register_buffer("held", held)

    assert content(item.capture()) == content(ModuleItem("module", module).capture())
    assert b'"kind":"buffer"' in item.capture().tree


def test_a_module_under_another_name_shows_in_the_next_capture() -> None:
    run = Run()
    registry = run.registry()
    before = remembered(registry)

    registry.remove("net")
    registry.add("model", run.net)

    first = OptimizerItem("optimizer", run.optimizer, lambda: qualified_parameters({"model": run.net}))
    assert capture(registry.items["optimizer"]) == capture(first) != before["optimizer"]


def test_modules_in_another_order_keep_their_names() -> None:
    one, other = nn.Linear(1, 1), nn.Linear(1, 1)
    names = ParameterNames(Glances())
    for registered in ({"a": one, "b": other}, {"b": other, "a": one}):
        expected = qualified_parameters(registered)
        assert list(map(id, names.of(registered).values())) == list(map(id, expected.values()))
        assert list(names.of(registered)) == list(expected)


def test_a_parameter_on_another_device_than_its_state_shows_in_the_next_capture() -> None:
    named = {"net/held": nn.Parameter(torch.ones(2))}
    optimizer = torch.optim.AdamW(named.values(), lr=0.1)
    item = OptimizerItem("optimizer", optimizer, lambda: named)
    optimizer.state[named["net/held"]] = {"sum": torch.ones(2)}
    before = content(item.capture())

    moved = nn.Parameter(torch.ones(2, device="meta"))
    optimizer.state[moved] = optimizer.state.pop(named["net/held"])
    named["net/held"] = optimizer.param_groups[0]["params"][0] = moved

    assert content(item.capture()) == content(OptimizerItem("optimizer", optimizer, lambda: named).capture()) != before


def test_a_restored_order_of_groups_shows_in_the_next_capture() -> None:
    named = {f"net/{name}": nn.Parameter(torch.ones(1)) for name in "ab"}
    one, other = (
        OptimizerItem("optimizer", torch.optim.SGD([{"params": [held]} for held in order], lr=0.1), lambda: named)
        for order in (named.values(), reversed(named.values()))
    )
    before = content(one.capture())

    Stored({"optimizer": other}).restore({"optimizer": one})

    assert content(one.capture()) == content(other.capture()) != before


def test_a_parameter_whose_name_is_reserved_among_states_is_refused() -> None:
    net = nn.Module()
    net.safepoint = nn.Module()
    net.safepoint.sparse = nn.Parameter(torch.ones(1))
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.1)
    optimizer.state[net.safepoint.sparse] = {"sum": torch.ones(2)}

    with pytest.raises(RequestError, match="reserved"):
        OptimizerItem("optimizer", optimizer, lambda: qualified_parameters({"net": net})).capture()


def test_another_part_of_a_tensor_that_wraps_parts_shows_in_the_next_capture() -> None:
    module = nn.Module()
    module.register_parameter("two", nn.Parameter(TwoTensor(torch.ones(2), torch.zeros(2))))
    item = ModuleItem("module", module)
    before = content(item.capture())

    module.two.b = torch.full((2,), 5.0)

    assert content(item.capture()) == content(ModuleItem("module", module).capture()) != before


def _contains_itself() -> list[Any]:
    held: list[Any] = [1]
    held.append(held)
    return held


def _nested(depth: int) -> list[Any]:
    held: list[Any] = []
    for _ in range(depth):
        held = [held]
    return held


def _of_two_dtypes() -> list[torch.Tensor]:
    tensor = torch.arange(4)
    return [tensor, tensor.view(torch.int32)]


def _freed() -> torch.Tensor:
    tensor = torch.ones(2)
    tensor.untyped_storage().resize_(0)
    return tensor


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (_contains_itself(), "contains itself"),
        ({"safepoint.sparse": 1}, "reserved"),
        (_nested(70), "too deeply"),
        (_nested(5000), "too deeply"),
        (_freed(), "lost its memory"),
        (torch.ones(2, device="meta"), "no values"),
        (_of_two_dtypes(), "two dtypes"),
    ],
)
def test_what_looks_plain_and_cannot_be_stored_is_refused_by_its_path(value: object, text: str) -> None:
    with pytest.raises(RequestError, match=text) as caught:
        PlainItem("plain", {"held": value}).capture()
    assert "plain.state.held" in str(caught.value)


# Each with how many levels it has of its own.
LEAST: dict[str, tuple[int, Callable[[], Any]]] = {
    "a list": (0, lambda: []),
    "a dict": (1, lambda: {"a": 1}),
    "a row": (1, lambda: [{}]),
    "rows": (2, lambda: [{"a": 1}, {"b": "x"}]),
    "a tuple": (1, lambda: (1,)),
    "a tensor": (1, lambda: [torch.ones(1)]),
}


@pytest.mark.parametrize("least", list(LEAST))
def test_nesting_is_bounded_alike_whatever_is_nested(least: str) -> None:
    levels, make = LEAST[least]
    for depth in range(61 - levels, 66 - levels):
        value = make()
        for _ in range(depth):
            value = [value]
        item = PlainItem("plain", value)
        for _ in range(2):
            # The state lies one level below the root of the tree.
            assert (capture(item)[0] == "refused") == (1 + depth + levels > MAX_DEPTH), depth


@pytest.mark.parametrize(("place", "level"), [("option", 4), ("state", 4), ("extra", 2)])
def test_the_nesting_of_an_optimizer_is_counted_from_the_root_of_its_tree(place: str, level: int) -> None:
    class Telling(torch.optim.SGD):
        more: object = None

        def state_dict(self) -> dict[str, Any]:
            return {**super().state_dict(), "more": self.more}

    parameter = nn.Parameter(torch.ones(1))
    optimizer = Telling([parameter], lr=0.1)
    item = OptimizerItem("optimizer", optimizer, lambda: {"net/held": parameter})
    for depth in range(58, 66):
        value = _nested(depth)
        optimizer.more = value if place == "extra" else None
        optimizer.param_groups[0]["more"] = value if place == "option" else None
        optimizer.state[parameter] = {"more": value if place == "state" else None}
        for _ in range(2):
            assert (capture(item)[0] == "refused") == (level + depth > MAX_DEPTH), depth


def test_rows_that_are_one_object_are_stored_as_one() -> None:
    one, other = {"a": 1}, {"b": 2}

    item = PlainItem("plain", {"rows": [one, other, one], "more": [other], "again": [one, {"c": 3}]})
    first, second = (unflatten(item.capture().plain, {})["state"] for _ in range(2))

    assert first == second == {"rows": [one, other, one], "more": [other], "again": [one, {"c": 3}]}
    for state in (first, second):
        assert state["rows"][0] is state["rows"][2] is state["again"][0]
        assert state["rows"][1] is state["more"][0]


def test_a_row_of_many_is_met_again_elsewhere() -> None:
    one, other = {"a": 1}, {"b": 2}

    state = unflatten(PlainItem("plain", {"rows": [one, other], "more": [other, {}]}).capture().plain, {})["state"]

    assert state["rows"][1] is state["more"][0]


def test_an_extra_state_shows_in_the_next_capture() -> None:
    class Counting(nn.Module):
        count = 0

        def get_extra_state(self) -> dict[str, int]:
            return {"count": self.count}

        def set_extra_state(self, state: dict[str, int]) -> None:
            self.count = state["count"]

    run = Run()
    run.net.add_module("counting", counting := Counting())
    registry = run.registry()
    remembered(registry)

    counting.count = 5

    assert remembered(registry) == fresh(run)
    assert b'"count":5' in registry.items["net"].capture().tree
