"""The tree of an optimizer: of a live one, and a stored one, parsed."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from safepoint.format.plain import Same, ScalarLeaf, Shared, TensorLeaf
from safepoint.state.groups import DEVICE_KINDS, SavedGroup, recorded_order
from safepoint.state.item import SavedItem
from safepoint.state.rebuild import check_plain
from safepoint.state.stored import elements, field, malformed, record
from safepoint.state.tree import class_name

# What a group holds besides its options.
NOT_OPTIONS = ("params", "param_names")


@dataclass(frozen=True, slots=True)
class SavedOptimizer:
    """Hold a stored tree, parsed; `states` by the qualified names of parameters."""

    class_name: str
    groups: list[SavedGroup]
    states: dict[str, Any]
    other: dict[Any, Any]
    extra: dict[str, Any]


def tree_of(
    optimizer: torch.optim.Optimizer,
    name_of: Callable[[torch.Tensor], str],
    recorded: Sequence[Sequence[str]],
    *,
    extra: dict[str, Any],
) -> dict[str, Any]:
    """Return the live state by the names of parameters.

    Args:
        optimizer: The live optimizer.
        name_of: Returns the qualified name of a parameter.
        recorded: The groups of a restored checkpoint by their parameters, whose order the live ones take.
        extra: What an overridden `state_dict` adds.
    """
    names = [[name_of(one) for one in group["params"]] for group in optimizer.param_groups]
    order = recorded_order(names, recorded)
    groups = [
        {
            "parameters": names[index],
            "devices": [one.device.type for one in optimizer.param_groups[index]["params"]],
            "options": options_of(optimizer.param_groups[index]),
        }
        for index in order
    ]
    state: dict[str, dict[str, Any]] = {}
    # By identity, as torch does it; asking a tensor for its hash takes longer than all else here.
    held = {id(key): (key, value) for key, value in optimizer.state.items() if isinstance(key, torch.Tensor)}
    listed = dict.fromkeys(id(one) for index in order for one in optimizer.param_groups[index]["params"])
    for key in [*(one for one in listed if one in held), *(one for one in held if one not in listed)]:
        parameter, value = held[key]
        item, name = name_of(parameter).split("/", 1)
        state.setdefault(item, {})[name] = value
    other = {key: value for key, value in optimizer.state.items() if not isinstance(key, torch.Tensor)}
    return {"class": class_name(optimizer), "groups": groups, "state": state, "other": other, "extra": extra}


def options_of(group: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options of a live group by name."""
    # Sorted, because the order of keys says when a scheduler was built and nothing else.
    return {key: value for key, value in sorted(group.items()) if key not in NOT_OPTIONS}


def parse_optimizer(saved: SavedItem, item: str) -> SavedOptimizer:
    """Return what a stored tree says, once it is known that all of it can be set.

    Raises:
        CorruptionError: No capture makes such a tree.
    """
    whole = record(saved.plain, {"class": str, "groups": list, "state": dict, "other": dict, "extra": dict}, item=item)
    check_plain(saved.plain, saved.specs, item=item)
    groups = []
    for group in whole["groups"]:
        parts = record(group, {"parameters": list, "devices": list, "options": dict}, item=f"{item}.groups")
        names, devices, options = (parts[key] for key in ("parameters", "devices", "options"))
        elements([*names, *devices, *options], str, item=f"{item}.groups")
        if len(names) != len(devices) or set(devices) - DEVICE_KINDS:
            raise malformed(f"{item}.groups", "a kind of device for each parameter", f"{len(names)}, {devices[:4]}")
        if list(options) != sorted(options) or set(options) & {*NOT_OPTIONS}:
            raise malformed(f"{item}.groups", "options in order", ", ".join(options))
        groups.append(SavedGroup(tuple(names), tuple(devices), options))
    states = states_of(whole["state"], item)
    if list(states) != _in_order(groups, states):
        raise malformed(f"{item}.state", "parameters in the order of their groups", ", ".join(states)[:120])
    for name, value in states.items():
        _check_step(value, f"{item}.state.{name}", saved)
    if any(type(key) is not str for key in whole["extra"]):
        raise malformed(f"{item}.extra", "names", ", ".join(map(repr, whole["extra"])))
    return SavedOptimizer(whole["class"], groups, states, whole["other"], whole["extra"])


def states_of(states: dict[str, Any], item: str) -> dict[str, Any]:
    """Return the stored state of each parameter by its qualified name, in stored order."""
    return {
        f"{module}/{name}": value
        for module in elements(list(states), str, item=f"{item}.state")
        for name, value in field(states, module, dict, item=f"{item}.state").items()
    }


def _in_order(groups: list[SavedGroup], states: dict[str, Any]) -> list[str]:
    """Return the names of states as a capture lists them: by group, those of one module together."""
    listed = dict.fromkeys(name for group in groups for name in group.parameters if name in states)
    names = [*listed, *(name for name in states if name not in listed)]
    modules = list(dict.fromkeys(name.split("/", 1)[0] for name in names))
    return sorted(names, key=lambda name: modules.index(name.split("/", 1)[0]))


def _check_step(value: Any, where: str, saved: SavedItem) -> None:
    value = value.value if isinstance(value, Shared) else value
    step = value.get("step", 0) if isinstance(value, dict) else 0
    step = step.value if isinstance(step, Shared) else step
    if isinstance(step, TensorLeaf) and saved.specs[step.name].global_shape == (1,):
        return
    if type(step) not in (int, float, ScalarLeaf, Same):
        raise malformed(f"{where}.step", "a number", type(step).__name__)
