"""A run's live objects, and the ways in which they may change between two saves."""

from __future__ import annotations

import contextlib
import struct
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from safepoint.state.registry import Registry


class Holder(nn.Module):
    """Hold a module as a wrapper does, and be none."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module


class Net(nn.Module):
    """Hold what a model may have: ties, buffers of both kinds, a number, a dense tensor in another order."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(3, 4)
        self.second = nn.Linear(4, 3)
        self.norm = nn.BatchNorm1d(3)
        self.tied = nn.Linear(3, 4, bias=False)
        self.tied.weight = self.first.weight
        self.spare = nn.Linear(1, 1, bias=False)
        self.held = Holder(nn.Linear(1, 1, bias=False))
        self.turns = nn.ModuleList(_in_turn(*(nn.Linear(1, 1, bias=False) for _ in range(2)), is_first=True))
        self.ends = nn.ModuleList([nn.Module(), nn.Module()])
        self.ends[0].register_parameter("moved", nn.Parameter(torch.ones(1)))
        self.ends[0].add_module("inner", nn.Linear(1, 1, bias=False))
        self.register_buffer("scale", torch.ones(2))
        self.register_buffer("hidden", torch.ones(2), persistent=False)
        self.register_buffer("empty", None)

    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        return self.norm(self.second(self.first(batch)))


class Run:
    """Hold a registry of live objects that can be changed in many ways, one after the other."""

    def __init__(self) -> None:
        torch.manual_seed(7)
        self.net = Net()
        parameters = list(self.net.parameters())
        groups = [{"params": parameters[:-2]}, {"params": parameters[-2:]}]
        self.optimizer: torch.optim.Optimizer = torch.optim.AdamW(groups, lr=0.1)
        self.plain: dict[str, Any] = {"n": 1, "list": [1, 2.5, None], "name": "a", "t": torch.ones(3)}
        self.plain["again"] = self.plain["list"]
        self.plain["map"] = {1: "a"}
        self.plain["table"] = [{"a": 1, "b": "x"}, {"a": 2, "b": "y"}]
        self.plain["nested"] = [[1], 2]
        self.plain["hollow"] = ([[[]], []], (((),), ()))
        # Changes leave these where they are, so that nothing but their places tells of it.
        first, second = self.tensors = [torch.ones(1), torch.zeros(1)]
        self.plain["pairs"] = _in_turn(first, second, is_first=True)
        self.plain["deep"] = [[first], [[second]]]
        self.plain["among"] = [1, [], first]
        self.plain["none"] = torch.empty(0)
        self.plain["two"] = {"a": 1, "b": 2}
        self.plain["split"] = [{"a": 1, "b": 2}, {"c": 3}]
        self.plain["mixed"] = [1, self.plain["t"].clone()]
        self.plain["twice"] = _in_turn([3], [4], is_first=True)
        self.plain["square"] = torch.arange(4.0).reshape(2, 2)
        self.complex = torch.tensor([1 + 2j, 3 + 4j])
        self.plain["imaginary"] = _views(self.complex.imag)
        self.plain["complex"] = torch.tensor([[5 + 6j, 7 + 8j]]).expand(2, 2).clone().t()
        # Two storages of one size, in which the same bytes lie at different places.
        self.memory = bytearray(struct.pack("<20f", *range(20)))
        self.plain["placed"] = (
            torch.frombuffer(self.memory, dtype=torch.float32, offset=16, count=16)[:4].view(2, 2).t()
        )
        # Last, because lists are numbered and tuples are not.
        self.plain["pair"] = (1, 2)
        self.step()

    def step(self) -> None:
        self.net(torch.ones(5, 3)).square().sum().backward()
        self.optimizer.step()
        self.optimizer.zero_grad()

    def registry(self) -> Registry:
        registry = Registry()
        registry.add_all({"net": self.net, "optimizer": self.optimizer, "plain": self.plain})
        return registry

    @property
    def scale(self) -> torch.Tensor:
        return next(self.net.buffers())

    @property
    def weight(self) -> torch.Tensor:
        return self.net.first.weight

    @property
    def second(self) -> Any:
        """Return a layer, whatever is around it."""
        layer = self.net.second
        return getattr(layer, "module", layer)

    def moments(self) -> dict[str, Any]:
        return self.optimizer.state[self.second.weight]


def _resize_storage(run: Run) -> None:
    """Move the memory of a tensor, and give it more than it needs."""
    run.scale.untyped_storage().resize_(run.scale.untyped_storage().nbytes() + 64)


def _retie(run: Run) -> None:
    run.net.tied.weight = nn.Parameter(run.weight.detach().clone())
    run.optimizer.add_param_group({"params": [run.net.tied.weight]})


def _swap_parameters(run: Run) -> None:
    """Give two layers each other's memory: same shapes, same addresses in sum."""
    one, other = run.net.norm.weight, run.net.norm.bias
    one.data, other.data = other.data, one.data


def _regroup(run: Run) -> None:
    group = run.optimizer.param_groups[0]
    moved = group["params"].pop()
    run.optimizer.add_param_group({"params": [moved], "lr": 0.5})


def _share(run: Run) -> None:
    run.plain["also"] = run.plain["t"]


def _overlap(run: Run) -> None:
    # A nested tensor has no such views.
    if not run.plain["t"].is_nested:
        run.plain["view"] = run.plain["t"][1:]


def _in_turn(one: Any, other: Any, *, is_first: bool) -> list[Any]:
    return [one, other, one if is_first else other]


def _rename(held: dict[str, Any], name: str, other: str) -> None:
    """Give what has one of two names the other one, at the same place."""
    others = {name: other, other: name}
    renamed = {others.get(key, key): value for key, value in held.items()}
    held.clear()
    held.update(renamed)


def _update(run: Run) -> None:
    """Train on, unless what was changed before makes that impossible."""
    with contextlib.suppress(RuntimeError, KeyError):
        run.step()


def _views(imaginary: torch.Tensor) -> list[torch.Tensor]:
    return [imaginary, imaginary[1:]]


def _place_elsewhere(run: Run) -> None:
    """Give a tensor a storage of the same size that begins elsewhere; the tensor begins at the same address."""
    run.plain["placed"] = torch.frombuffer(run.memory, dtype=torch.float32, count=16)[4:8].view(2, 2).t()


def _tie_by_memory(run: Run) -> None:
    run.net.norm.bias.data = run.net.norm.weight.data


def _rename_layer(run: Run) -> None:
    renamed = {"other" if name == "norm" else name: layer for name, layer in run.net._modules.items()}
    run.net._modules.clear()
    run.net._modules.update(renamed)
    run.net.norm = run.net._modules["other"]


def _reorder_states(run: Run) -> None:
    held = dict(reversed(run.optimizer.state.items()))
    run.optimizer.state.clear()
    run.optimizer.state.update(held)


def _share_state(run: Run) -> None:
    run.optimizer.state[run.net.norm.weight] = run.optimizer.state[run.net.norm.bias]


def _reorder_layers(run: Run) -> None:
    run.net._modules["norm"] = run.net._modules.pop("norm")


def _wrap(run: Run) -> None:
    """Put a wrapper, which no name shows, around a layer; or take it off."""
    inner = run.net.second
    run.net.second = inner.module if isinstance(inner, nn.DataParallel) else nn.DataParallel(inner)


def _wrap_in_place(run: Run) -> None:
    """Put a wrapper in the place of what holds a layer under the same name; or the other way round."""
    inner = run.net.held.module
    run.net.held = Holder(inner) if isinstance(run.net.held, nn.DataParallel) else nn.DataParallel(inner)


def _move_on(one: dict[str, Any], other: dict[str, Any]) -> None:
    """Let each of two hold what the other has; one of them has nothing."""
    kept = dict(one)
    one.clear()
    one.update(other)
    other.clear()
    other.update(kept)


def _move_boundary(run: Run) -> None:
    """Move a parameter from the end of a group to the beginning of the next one."""
    one, other = run.optimizer.param_groups[:2]
    other["params"].insert(0, one["params"].pop())


def _move_state(run: Run) -> None:
    """Give the state of one parameter to another, at the same place among all states."""
    one, other = run.second.weight, next(iter(_spare(run)._parameters.values()))
    held = [(other if key is one else key, state) for key, state in run.optimizer.state.items()]
    run.optimizer.state.clear()
    run.optimizer.state.update(held)


def _turn_class(run: Run) -> None:
    kind = torch.optim.Adam if type(run.optimizer) is torch.optim.AdamW else torch.optim.AdamW
    run.optimizer.__class__ = kind


def _inference(run: Run) -> None:
    with torch.inference_mode():
        run.plain["uncounted"] = torch.ones(2)


def _spare(run: Run) -> nn.Module:
    return next(layer for key, layer in run.net._modules.items() if key in ("spare", "kept") and layer is not None)


CHANGES: dict[str, Callable[[Run], object]] = {
    "an update": _update,
    "nothing": lambda run: None,
    "values in place": lambda run: run.scale.add_(1),
    "values past every counter": lambda run: run.weight.data.mul_(2),
    "another storage": lambda run: setattr(run.weight, "data", run.weight.data.clone()),
    "another storage of the same values": lambda run: setattr(run.scale, "data", run.scale.clone()),
    "another dtype": lambda run: setattr(run.second.bias, "data", run.second.bias.data.double()),
    "a dtype of the same size": lambda run: setattr(run.net.hidden, "data", run.net.hidden.view(torch.int32)),
    "another shape": lambda run: run.scale.resize_(run.scale.numel() + 1).zero_(),
    "another order": lambda run: setattr(run.second.weight, "data", run.second.weight.data.t().clone().t()),
    "another form of the same bytes": lambda run: run.net.hidden.unsqueeze_(0),
    "swapped memory": _swap_parameters,
    "a storage that has moved": _resize_storage,
    "frozen": lambda run: run.second.weight.requires_grad_(not run.second.weight.requires_grad),
    "untied": _retie,
    "tied": lambda run: setattr(run.net.tied, "weight", run.weight),
    "a parameter more": lambda run: setattr(run.net, "more", nn.Parameter(torch.ones(2))),
    "a parameter less": lambda run: run.net.__dict__["_parameters"].pop("more", None),
    "a layer more": lambda run: run.net.add_module(f"layer{len(run.net._modules)}", nn.Linear(2, 2)),
    "a layer none": lambda run: setattr(run.net, "norm", run.net.norm),
    "a buffer more": lambda run: run.net.register_buffer("late", torch.ones(1)),
    "a buffer less": lambda run: run.net._buffers.pop("late", None),
    "a buffer that is filled": lambda run: run.net._buffers.update(empty=torch.ones(3)),
    "a buffer that is emptied": lambda run: run.net._buffers.update(empty=None),
    "a buffer that is a parameter": lambda run: run.net._buffers.update(
        scale=nn.Parameter(run.scale.detach(), requires_grad=False)
    ),
    "a buffer that is none": lambda run: run.net._buffers.update(scale=run.scale.detach()),
    "a buffer that persists": lambda run: run.net.register_buffer("hidden", run.net.hidden, persistent=True),
    "a buffer that does not": lambda run: run.net.register_buffer("hidden", run.net.hidden, persistent=False),
    "a number": lambda run: run.net.norm.num_batches_tracked.add_(3),
    "a mode": lambda run: run.net.norm.train(not run.net.norm.training),
    "an option": lambda run: run.optimizer.param_groups[0].update(lr=run.optimizer.param_groups[0]["lr"] / 2),
    "an option's type": lambda run: run.optimizer.param_groups[0].update(lr=1),
    "an option that is true": lambda run: run.optimizer.param_groups[0].update(lr=True),
    "an option that is a tensor": lambda run: run.optimizer.param_groups[0].update(lr=torch.tensor(0.1)),
    "an option more": lambda run: run.optimizer.param_groups[0].update(note="x"),
    "an option less": lambda run: run.optimizer.param_groups[0].pop("note", None),
    "another group": _regroup,
    "no state": lambda run: run.optimizer.state.pop(run.second.weight, None),
    "a state more": lambda run: run.moments().update(extra=torch.ones(2)),
    "a state less": lambda run: run.moments().pop("exp_avg", None),
    "a state that is replaced": lambda run: run.moments().update(exp_avg_sq=torch.ones(3, 4)),
    "a step": lambda run: run.moments().update(step=torch.tensor(9.0)),
    "a step that is a number": lambda run: run.moments().update(step=9),
    "a plain value": lambda run: run.plain.update(n=run.plain["n"] + 1),
    "a value of another sign": lambda run: run.plain.update(n=-0.0),
    "a value that is true": lambda run: run.plain.update(n=True),
    "a value in place": lambda run: run.plain["list"].append(len(run.plain["list"])),
    "a text": lambda run: run.plain.update(name=f'{run.plain["name"]}b"%s{{"$open":[0,""]}}'),
    "another kind": lambda run: run.plain.update(name=[run.plain["name"]] if type(run.plain["name"]) is str else "a"),
    "a key that is true": lambda run: run.plain.update({"map": {True: "a"}}),
    "a key that is two": lambda run: run.plain.update({"map": {2: "a"}}),
    "a key that is one": lambda run: run.plain.update({"map": {1: "a"}}),
    "a nesting": lambda run: run.plain.update(nested=[[1, 2]]),
    "an order": lambda run: run.plain["mixed"].reverse(),
    "the other one twice": lambda run: run.plain.update(twice=_in_turn([3], [4], is_first=False)),
    "a name": lambda run: _rename(run.net._buffers, "scale", "factor"),
    "a layer under two names": _rename_layer,
    "a layer under one name": lambda run: run.net._modules.pop("other", None),
    "a layer that is missing": lambda run: run.net.register_module("missing", None),
    "a layer that is there": lambda run: run.net.register_module("missing", nn.Linear(1, 1)),
    "another order of layers": _reorder_layers,
    "a wrapper": _wrap,
    "a mode of one layer": lambda run: run.net.first.train(not run.net.first.training),
    "states in another order": _reorder_states,
    "a state of two parameters": _share_state,
    "a state of another parameter": _move_state,
    "another boundary between groups": _move_boundary,
    "another class": _turn_class,
    "a wrapper of the same form": _wrap_in_place,
    "the other layer twice": lambda run: run.net.turns._modules.update({"2": run.net.turns[1]}),
    "a state of no parameter": lambda run: run.optimizer.state.update({"all": {"count": 3, "sum": torch.tensor(2.0)}}),
    "a state of parameters alone": lambda run: run.optimizer.state.pop("all", None),
    "a state with parts": lambda run: run.moments().update(parts=[torch.ones(2), 3]),
    "a state without parts": lambda run: run.moments().pop("parts", None),
    "a state that is a text": lambda run: run.moments().update(parts="a text"),
    "a parameter of no module": lambda run: run.optimizer.param_groups[0]["params"].append(nn.Parameter(torch.ones(1))),
    "parameters of modules alone": lambda run: run.optimizer.param_groups[0]["params"].pop(),
    "a tensor that does not count": _inference,
    "a nested tensor": lambda run: run.plain.update(t=torch.nested.nested_tensor([torch.ones(2), torch.ones(3)])),
    "no nested tensor": lambda run: run.plain.update(t=torch.ones(3)),
    "a number that is conjugate": lambda run: run.plain.update(number=torch.tensor(1 + 2j).conj()),
    "a number that is not": lambda run: run.plain.update(number=torch.tensor(1 - 2j)),
    "a number that is negative": lambda run: run.plain.update(number=torch.tensor(1 + 2j).conj().imag),
    "a tensor twice": lambda run: run.plain.update(pairs=_in_turn(*run.tensors, is_first=True)),
    "the other tensor twice": lambda run: run.plain.update(pairs=_in_turn(*run.tensors, is_first=False)),
    "tensors nested elsewhere": lambda run: run.plain.update(deep=[[[run.tensors[0]]], [run.tensors[1]]]),
    "a value behind a list": lambda run: run.plain.update(among=[[], 1, run.tensors[0]]),
    "a tensor in the place of a value": lambda run: run.plain.update(among=[run.tensors[0], [], 1]),
    "a tensor before a list": lambda run: run.plain.update(among=[1, run.tensors[0], []]),
    "a nesting of nothing in lists": lambda run: run.plain.update(hollow=([[[], []]], run.plain["hollow"][1])),
    "a nesting of nothing in tuples": lambda run: run.plain.update(hollow=(run.plain["hollow"][0], (((), ()),))),
    "nothing on no device": lambda run: run.plain.update(none=torch.empty(0, device="meta")),
    "nothing on a device": lambda run: run.plain.update(none=torch.empty(0)),
    "a layer renamed": lambda run: _rename(run.net._modules, "spare", "kept"),
    "a parameter renamed": lambda run: _rename(_spare(run)._parameters, "weight", "kernel"),
    "a parameter of the next layer": lambda run: _move_on(*(layer._parameters for layer in run.net.ends)),
    "a layer of the next layer": lambda run: _move_on(*(layer._modules for layer in run.net.ends)),
    "a table of other keys": lambda run: run.plain.update(table=[{"a": 1, "c": "x"}, {"a": 2, "b": "y"}]),
    "a table of another text": lambda run: run.plain.update(table=[{"a": 1, "b": "x"}, {"a": 2, "b": "z"}]),
    "rows": lambda run: run.plain.update(rows=[{"a": 1, "t": torch.ones(2)}, {"b": "x", "c": None}]),
    "a key of the next row": lambda run: run.plain.update(split=[{"a": 1}, {"b": 2, "c": 3}]),
    "rows of other keys": lambda run: run.plain.update(rows=[{"a": 1}, {"t": torch.ones(2), "b": "x", "c": None}]),
    "rows that are one": lambda run: run.plain.update(rows=[{"a": 1}] * 2),
    "rows with a row": lambda run: run.plain.update(rows=[{"a": 1}, {"a": {"a": 1}}]),
    "rows with a key that is true": lambda run: run.plain.update(rows=[{1: 2}, {True: 2}]),
    "rows with a reserved key": lambda run: run.plain.update(rows=[{"a": 2}, {"safepoint.sparse": 2}]),
    "an ordered dict": lambda run: run.plain.update({"map": OrderedDict({1: "a"})}),
    "a list for a tuple": lambda run: run.plain.update(pair=[1, 2]),
    "another order of keys alone": lambda run: run.plain.update({"two": {"b": 1, "a": 2}}),
    "another order of keys": lambda run: run.plain.update(n=run.plain.pop("n")),
    "shared no more": lambda run: run.plain.update(again=list(run.plain["list"])),
    "shared again": lambda run: run.plain.update(again=run.plain["list"]),
    "a tensor in two places": _share,
    "tensors that overlap": _overlap,
    "tensors that overlap no more": lambda run: run.plain.pop("view", None),
    "a negative view": lambda run: run.plain.update(imaginary=_views(run.complex.conj().imag)),
    "a positive view": lambda run: run.plain.update(imaginary=_views(run.complex.imag)),
    "a conjugate view": lambda run: run.plain.update(complex=run.plain["complex"].conj()),
    "a shape within the same memory": lambda run: run.plain["t"].resize_(2),
    "a buffer for a tensor": lambda run: run.plain.update(t=nn.Buffer(run.plain["t"])),
    "a transposition in place": lambda run: run.plain["square"].t_(),
    "a storage that begins elsewhere": _place_elsewhere,
    "a tie of memory alone": _tie_by_memory,
    "what contains itself": lambda run: run.plain.update(itself=run.plain),
    "what contains itself no more": lambda run: run.plain.pop("itself", None),
    "a reserved key": lambda run: run.plain.update({"map": {"safepoint.sparse": 1}}),
    "an array": lambda run: run.plain.update(array=torch.ones(2).numpy()),
    "no array": lambda run: run.plain.pop("array", None),
    "a set": lambda run: run.plain.update(several={1, 2}),
    "a sparse tensor": lambda run: run.plain.update(sparse=torch.eye(3).to_sparse()),
    "no sparse tensor": lambda run: run.plain.pop("sparse", None),
}
