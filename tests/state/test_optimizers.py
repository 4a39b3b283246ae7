"""Optimizers as items: an interrupted run's next updates are bit-equal, whatever the order of construction."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from safepoint.errors import RequestError
from safepoint.state.item import Permits
from safepoint.state.names import qualified_parameters
from safepoint.state.optimizers import OptimizerItem
from tests.state.roundtrip import Stored, same_bits
from tests.state.training import Lookup, Net, by_name, items, two_groups, update

OPTIMIZERS: dict[str, tuple[str, dict[str, Any]]] = {
    "Adadelta": ("Adadelta", {"lr": 0.5}),
    "Adafactor": ("Adafactor", {"lr": 0.05}),
    "Adagrad": ("Adagrad", {"lr": 0.1}),
    "Adam": ("Adam", {"lr": 0.02, "amsgrad": True}),
    "Adam fused": ("Adam", {"lr": 0.02, "fused": True}),
    "Adam foreach": ("Adam", {"lr": 0.02, "foreach": True}),
    "Adam tensor lr": ("Adam", {"lr": torch.tensor(0.02)}),
    "AdamW": ("AdamW", {"lr": 0.02, "weight_decay": 0.1}),
    "Adamax": ("Adamax", {"lr": 0.02}),
    "ASGD": ("ASGD", {"lr": 0.02, "t0": 2}),
    "LBFGS": ("LBFGS", {"lr": 0.5, "max_iter": 3, "line_search_fn": "strong_wolfe"}),
    "NAdam": ("NAdam", {"lr": 0.02}),
    "RAdam": ("RAdam", {"lr": 0.02}),
    "RMSprop": ("RMSprop", {"lr": 0.02, "momentum": 0.9, "centered": True}),
    "Rprop": ("Rprop", {"lr": 0.02}),
    "SGD": ("SGD", {"lr": 0.05, "momentum": 0.9, "nesterov": True}),
    "SGD plain": ("SGD", {"lr": 0.05}),
    "SparseAdam": ("SparseAdam", {"lr": 0.05}),
    "Muon": ("Muon", {"lr": 0.02}),
}


def build(case: str, seed: int, *, flipped: bool) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(seed)
    name, options = OPTIMIZERS[case]
    kind = getattr(torch.optim, name, None)
    if kind is None:
        pytest.skip(f"this torch has no {name}")
    options = {key: value.clone() if isinstance(value, torch.Tensor) else value for key, value in options.items()}
    model: Any = Lookup(flipped=flipped) if name == "SparseAdam" else Net(flipped=flipped, bias=name != "Muon")
    if name == "LBFGS":
        return model, kind(list(model.parameters()), **options)
    return model, two_groups(kind, model, flipped=flipped, options=options)


def stepped(seed: int, **options: Any) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(seed)
    model = Net()
    optimizer = torch.optim.AdamW(model.parameters(), **{"lr": 0.02, **options})
    update(model, optimizer, 0)
    return model, optimizer


@pytest.mark.parametrize("target_steps", [0, 2])
@pytest.mark.parametrize("case", OPTIMIZERS)
def test_the_next_five_updates_are_bit_equal_in_another_order_of_construction(case: str, target_steps: int) -> None:
    """Field reports B35, B85, B93; the kind OPTM as a whole."""
    model, optimizer = build(case, 1, flipped=False)
    for index in range(3):
        update(model, optimizer, index)
    stored = Stored(items(model, optimizer))
    other, resumed = build(case, 2, flipped=True)
    for index in range(target_steps):
        update(other, resumed, index)
    stored.restore(items(other, resumed))
    assert same_bits(by_name(other, resumed), by_name(model, optimizer))
    straight = [update(model, optimizer, index) for index in range(3, 8)]
    assert [update(other, resumed, index) for index in range(3, 8)] == straight
    assert same_bits(by_name(other, resumed), by_name(model, optimizer))


@pytest.mark.parametrize("case", OPTIMIZERS)
def test_capturing_at_every_update_changes_nothing(case: str) -> None:
    """Field report B26."""
    model, optimizer = build(case, 1, flipped=False)
    other, watched = build(case, 1, flipped=False)
    before = torch.get_rng_state()
    Stored(items(other, watched))
    assert len(watched.state) == len(build(case, 1, flipped=False)[1].state)
    torch.set_rng_state(before)
    for index in range(4):
        update(model, optimizer, index)
        update(other, watched, index)
        Stored(items(other, watched))
    assert torch.equal(torch.get_rng_state(), before)
    assert same_bits(by_name(other, watched), by_name(model, optimizer))


@pytest.mark.parametrize(("parameters", "moments"), [(torch.float32, torch.bfloat16), (torch.bfloat16, torch.float32)])
def test_state_keeps_its_own_dtype(parameters: torch.dtype, moments: torch.dtype) -> None:
    """Field reports B94, B95."""
    model = Net().to(parameters)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for parameter in model.parameters():
        optimizer.state[parameter]["momentum_buffer"] = torch.randn_like(parameter, dtype=moments)
    other = Net().to(parameters)
    resumed = torch.optim.SGD(other.parameters(), lr=0.1, momentum=0.9)
    Stored(items(model, optimizer)).restore(items(other, resumed))
    assert {state["momentum_buffer"].dtype for state in resumed.state.values()} == {moments}
    assert same_bits(
        [state["momentum_buffer"] for state in resumed.state.values()],
        [state["momentum_buffer"] for state in optimizer.state.values()],
    )


@pytest.mark.parametrize("step", [7, 7.0, torch.tensor(7.0), torch.tensor(7), torch.tensor(7.0, dtype=torch.float64)])
def test_the_step_count_keeps_its_form(step: Any) -> None:
    model, optimizer = stepped(1)
    for state in optimizer.state.values():
        state["step"] = step.clone() if isinstance(step, torch.Tensor) else step
    other, resumed = stepped(2)
    Stored(items(model, optimizer)).restore(items(other, resumed))
    for state in resumed.state.values():
        assert type(state["step"]) is type(step)
        assert same_bits(state["step"], step)


def test_a_fused_optimizer_takes_over_plain_state() -> None:
    """Field report B93."""
    model, optimizer = stepped(1)
    for state in optimizer.state.values():
        state["step"] = 1
    torch.manual_seed(2)
    other = Net()
    resumed = torch.optim.AdamW(other.parameters(), lr=0.02, fused=True)
    Stored(items(model, optimizer)).restore(items(other, resumed), Permits(current=frozenset({"optimizer.fused"})))
    assert resumed.param_groups[0]["fused"] is True
    assert all(state["step"].dtype == torch.float32 for state in resumed.state.values())
    update(other, resumed, 1)
    assert all(state["step"].item() == 2 for state in resumed.state.values())


def test_a_parameter_never_stepped_has_no_state_before_and_after() -> None:
    """Field report B97."""
    model = Net()
    model.second.bias.requires_grad_(False)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.02)
    update(model, optimizer, 0)
    other, resumed = stepped(2)
    assert len(resumed.state) == 4
    Stored(items(model, optimizer)).restore(items(other, resumed))
    assert len(resumed.state) == 3
    assert other.second.bias not in resumed.state
    assert not other.second.bias.requires_grad
    for index in range(1, 3):
        assert update(model, optimizer, index) == update(other, resumed, index)


def test_live_state_tensors_and_dicts_keep_their_identity() -> None:
    model, optimizer = stepped(1)
    other, resumed = stepped(2)
    kept = {id(state): {key: id(value) for key, value in state.items()} for state in resumed.state.values()}
    Stored(items(model, optimizer)).restore(items(other, resumed))
    assert {id(state): {key: id(value) for key, value in state.items()} for state in resumed.state.values()} == kept
    assert same_bits(by_name(other, resumed), by_name(model, optimizer))


def test_a_tensor_learning_rate_is_filled_in_place() -> None:
    model, optimizer = stepped(1, lr=torch.tensor(0.5))
    other, resumed = stepped(2, lr=torch.tensor(0.1))
    rate = resumed.param_groups[0]["lr"]
    Stored(items(model, optimizer)).restore(items(other, resumed))
    assert resumed.param_groups[0]["lr"] is rate
    assert rate.item() == 0.5


def test_state_that_shares_tensors_shares_them_again() -> None:
    model, optimizer = stepped(1)
    count, table = torch.tensor(3.0), torch.zeros(4)
    for state in optimizer.state.values():
        state["step"], state["table"] = count, table[:3]
    other, resumed = stepped(2)
    Stored(items(model, optimizer)).restore(items(other, resumed))
    first, second = list(resumed.state.values())[:2]
    assert first["step"] is second["step"]
    first["table"].fill_(9)
    assert second["table"].tolist() == [9, 9, 9]


def test_groups_added_later_are_created_again_in_their_order() -> None:
    """Field report B87."""

    def grown(seed: int, *, grow: bool) -> tuple[Any, torch.optim.Optimizer]:
        torch.manual_seed(seed)
        model = nn.ModuleList([nn.Linear(2, 2) for _ in range(3)])
        optimizer = torch.optim.SGD(model[0].parameters(), lr=0.1, momentum=0.9)
        if grow:
            optimizer.add_param_group({"params": model[2].parameters(), "lr": 0.3})
            optimizer.add_param_group({"params": model[1].parameters(), "lr": 0.2, "weight_decay": 0.5})
        sum(layer(torch.ones(1, 2)).sum() for layer in model).backward()
        optimizer.step()
        return model, optimizer

    model, optimizer = grown(1, grow=True)
    other, resumed = grown(2, grow=False)
    Stored(items(model, optimizer)).restore(items(other, resumed))
    assert [group["lr"] for group in resumed.param_groups] == [0.1, 0.3, 0.2]
    assert [group["weight_decay"] for group in resumed.param_groups] == [0, 0, 0.5]
    assert resumed.param_groups[1]["params"][0] is other[2].weight
    assert same_bits(by_name(other, resumed), by_name(model, optimizer))


@pytest.mark.parametrize("is_there", [True, False])
def test_a_group_without_parameters_keeps_its_options(is_there: bool) -> None:
    model, optimizer = stepped(1)
    other, resumed = stepped(2)
    optimizer.add_param_group({"params": [], "lr": 0.75})
    if is_there:
        resumed.add_param_group({"params": []})
    Stored(items(model, optimizer)).restore(items(other, resumed))
    assert [group["lr"] for group in resumed.param_groups] == [0.02, 0.75]


@pytest.mark.parametrize("named", ["neither", "live"])
def test_optimizers_built_with_names_keep_their_labels(named: str) -> None:
    torch.manual_seed(1)
    model, other = Net(), Net(flipped=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.5)
    update(model, optimizer, 0)
    given = other.named_parameters() if named == "live" else other.parameters()
    resumed = torch.optim.SGD(given, lr=0.1, momentum=0.5)
    Stored(items(model, optimizer)).restore(items(other, resumed))
    group = resumed.param_groups[0]
    labels = {id(parameter): name for name, parameter in other.named_parameters()}
    if named == "live":
        assert group["param_names"] == [labels[id(parameter)] for parameter in group["params"]]
    assert same_bits(by_name(other, resumed), by_name(model, optimizer))


def test_another_grouping_is_a_difference_that_names_the_parameters() -> None:
    """Field report B89."""
    model, optimizer = stepped(1)
    other = Net()
    split = two_groups(torch.optim.AdamW, other, flipped=False, options={"lr": 0.02})
    (found,) = items(other, split)["optimizer"].check(Stored(items(model, optimizer)).saved["optimizer"])
    assert found.word == "optimizer.groups"
    assert "model/first.weight" in found.subject
    (found,) = items(model, optimizer)["optimizer"].check(Stored(items(other, split)).saved["optimizer"])
    assert found.word == "optimizer.groups"


def test_a_permitted_regrouping_keeps_state_by_name() -> None:
    model, optimizer = stepped(1)
    torch.manual_seed(2)
    other = Net()
    split = two_groups(torch.optim.AdamW, other, flipped=True, options={"lr": 0.5})
    Stored(items(model, optimizer)).restore(items(other, split), Permits(frozenset({"optimizer.groups"})))
    assert [group["lr"] for group in split.param_groups] == [0.02, 0.02]
    assert same_bits(by_name(other, split), by_name(model, optimizer))


def test_another_head_keeps_old_state_and_lists_the_new() -> None:
    """Field reports B86, B98."""
    torch.manual_seed(1)
    model = nn.ModuleDict({"body": nn.Linear(2, 2), "old": nn.Linear(2, 2)})
    other = nn.ModuleDict({"body": nn.Linear(2, 2), "new": nn.Linear(2, 2)})
    made = []
    for net in (model, other):
        optimizer = torch.optim.AdamW(net.parameters(), lr=0.1)
        sum(layer(torch.ones(1, 2)).sum() for layer in net.values()).backward()
        optimizer.step()
        made.append(optimizer)
    stored = Stored(items(model, made[0]))
    words = {"model.added", "model.removed", "optimizer.added", "optimizer.removed"}
    assert set(stored.words(items(other, made[1]))) == words
    fresh = made[1].state[other["new"].weight]["exp_avg"].clone()
    left = stored.restore(items(other, made[1]), Permits(frozenset(words)))
    assert left["optimizer"] == ["model/new.weight", "model/new.bias"]
    assert torch.equal(made[1].state[other["new"].weight]["exp_avg"], fresh)
    assert same_bits(made[1].state[other["body"].weight], made[0].state[model["body"].weight])


def test_a_parameter_without_a_name_is_refused() -> None:
    model, optimizer = stepped(1)
    optimizer.add_param_group({"params": [nn.Parameter(torch.ones(3))]})
    with pytest.raises(RequestError, match=r"no registered module") as caught:
        items(model, optimizer)["optimizer"].capture()
    assert "(3,)" in str(caught.value.found)


def test_an_option_on_one_side_only_is_a_difference() -> None:
    model, optimizer = stepped(1)
    other, resumed = stepped(2)
    optimizer.param_groups[0]["trust"] = 0.5
    resumed.param_groups[0]["warm"] = 3
    stored = Stored(items(model, optimizer))
    assert sorted(stored.words(items(other, resumed))) == ["optimizer.trust", "optimizer.warm"]
    stored.restore(items(other, resumed), Permits(frozenset({"optimizer.trust", "optimizer.warm"})))
    assert resumed.param_groups[0]["warm"] == 3
    assert resumed.param_groups[0]["trust"] == 0.5


def test_the_stored_options_win_unless_the_live_ones_are_asked_for() -> None:
    """Field reports B78, B81."""
    model, optimizer = stepped(1, weight_decay=0.5)
    stored = Stored(items(model, optimizer))
    other, resumed = stepped(2, lr=0.7, weight_decay=0.25)
    stored.restore(items(other, resumed))
    assert (resumed.param_groups[0]["lr"], resumed.param_groups[0]["weight_decay"]) == (0.02, 0.5)
    other, resumed = stepped(2, lr=0.7, weight_decay=0.25)
    stored.restore(items(other, resumed), Permits(current=frozenset({"optimizer.lr"})))
    assert (resumed.param_groups[0]["lr"], resumed.param_groups[0]["weight_decay"]) == (0.7, 0.5)


def test_another_class_is_a_difference() -> None:
    model, optimizer = stepped(1)
    other = Net()
    adam = torch.optim.Adam(other.parameters())
    assert "optimizer.type" in Stored(items(model, optimizer)).words(items(other, adam))


def test_hooks_and_steps_never_run() -> None:
    model, optimizer = stepped(1)
    for register in ("state_dict_pre", "state_dict_post", "load_state_dict_pre", "load_state_dict_post"):
        getattr(optimizer, f"register_{register}_hook")(lambda *_: pytest.fail("a hook ran"))
    optimizer.register_step_pre_hook(lambda *_: pytest.fail("a step ran"))
    Stored(items(model, optimizer)).restore(items(model, optimizer))


class Counting(torch.optim.SGD):
    """Keeps a counter outside of `state`, as some optimizers outside of torch do."""

    rounds = 0

    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "rounds": self.rounds}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.rounds = state_dict["rounds"]
        super().load_state_dict({key: value for key, value in state_dict.items() if key != "rounds"})


def test_what_an_overridden_state_dict_adds_comes_back() -> None:
    """Field report B91: optimizers with state that is not a tensor of a parameter."""
    model, other = Net().bfloat16(), Net().bfloat16()
    made = [Counting(net.parameters(), lr=0.1, momentum=0.9) for net in (model, other)]
    made[0].rounds = 5
    for parameter in model.parameters():
        made[0].state[parameter]["momentum_buffer"] = torch.ones_like(parameter, dtype=torch.float32)
    Stored(items(model, made[0])).restore(items(other, made[1]))
    assert made[1].rounds == 5
    assert same_bits(by_name(other, made[1]), by_name(model, made[0]))
    assert {state["momentum_buffer"].dtype for state in made[1].state.values()} == {torch.float32}


def test_state_without_a_parameter_comes_back() -> None:
    model, optimizer = stepped(1)
    optimizer.state["lookahead"] = {"k": 5, "slow": [torch.ones(2)]}
    other, resumed = stepped(2)
    resumed.state["stale"] = 1
    Stored(items(model, optimizer)).restore(items(other, resumed))
    assert same_bits(resumed.state["lookahead"], optimizer.state["lookahead"])
    assert "stale" not in resumed.state


def test_a_restored_run_captures_equal_bytes_whatever_the_order_of_its_groups() -> None:
    model, optimizer = build("Adam", 1, flipped=False)
    update(model, optimizer, 0)
    stored = Stored(items(model, optimizer))
    other, resumed = build("Adam", 2, flipped=True)
    live = items(other, resumed)
    stored.restore(live)
    again = Stored(live)
    assert again.text == stored.text
    assert again.data == stored.data


def test_the_count_is_the_highest_of_all_parameters() -> None:
    model, optimizer = stepped(1)
    optimizer.state[model.first.weight]["step"] = torch.tensor(7.0)
    item: Any = items(model, optimizer)["optimizer"]
    assert item.count() == 7


def test_configuration_is_that_of_registration() -> None:
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    item = OptimizerItem("optimizer", optimizer, lambda: qualified_parameters({"model": model}))
    optimizer.param_groups[0]["lr"] = 0.01
    configuration: Any = item.configuration()
    assert configuration["class"] == "SGD"
    assert configuration["groups"][0]["options"]["lr"] == 0.1
    assert configuration["groups"][0]["parameters"] == 4
