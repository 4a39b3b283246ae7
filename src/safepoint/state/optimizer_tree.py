"""The tree of an optimizer: of a live one, and a stored one, parsed."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from operator import attrgetter
from typing import Any

import torch

from safepoint.format.plain import Same, ScalarLeaf, Shared, TensorLeaf
from safepoint.state.groups import DEVICE_KINDS, SavedGroup, recorded_order
from safepoint.state.item import SavedItem
from safepoint.state.rebuild import SPARSE_KEY, check_plain
from safepoint.state.sight import Sight
from safepoint.state.stored import elements, field, malformed, record
from safepoint.state.tensors import check_storable
from safepoint.state.traits import Traits
from safepoint.state.tree import class_name

_DEVICE = attrgetter("device")

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
    # By the places of what is held, because asking a tensor for its hash takes longer than all else here.
    held = [(key, value) for key, value in optimizer.state.items() if isinstance(key, torch.Tensor)]
    stated = [name_of(key) for key, _ in held]
    order, places = _order_of(names, stated, recorded)
    groups = [
        {
            "parameters": names[index],
            "devices": [one.device.type for one in optimizer.param_groups[index]["params"]],
            "options": options_of(optimizer.param_groups[index]),
        }
        for index in order
    ]
    state: dict[str, dict[str, Any]] = {}
    for place in places:
        item, name = stated[place].split("/", 1)
        state.setdefault(item, {})[name] = held[place][1]
    other = {key: value for key, value in optimizer.state.items() if not isinstance(key, torch.Tensor)}
    return {"class": class_name(optimizer), "groups": groups, "state": state, "other": other, "extra": extra}


class TreeSight:
    """Look at an optimizer as at what `tree_of` returns, without building it.

    What is kept of the last time is the order in which groups and states stand in the tree.
    """

    def __init__(self) -> None:
        self._facts: list[object] | None = None
        self._order: tuple[list[int], list[int]] = ([], [])

    def of(
        self,
        optimizer: torch.optim.Optimizer,
        named: Mapping[str, torch.Tensor],
        recorded: Sequence[Sequence[str]],
        *,
        extra: dict[str, Any],
        before: Traits | None,
    ) -> Sight | None:
        """Return what is seen; None where something is held that has to be looked at in the tree.

        Args:
            optimizer: The live optimizer.
            named: The parameters by their qualified names.
            recorded: As for `tree_of`.
            extra: As for `tree_of`.
            before: As for `Sight`.
        """
        names = dict(zip(map(id, named.values()), named, strict=True))
        held = [group["params"] for group in optimizer.param_groups]
        parameters = list(chain.from_iterable(held))
        listed = list(map(names.get, map(id, parameters)))
        stated = list(map(names.get, map(id, optimizer.state)))
        if None in listed or None in stated:
            return None
        facts: list[object] = [list(map(len, held)), listed, stated, list(recorded)]
        if facts != self._facts:
            if any(name.endswith(f"/{SPARSE_KEY}") for name in stated if name is not None):
                return None
            of_groups = [[names[id(one)] for one in group] for group in held]
            self._order = _order_of(of_groups, [names[id(key)] for key in optimizer.state], recorded)
            self._facts = facts
        order, places = self._order
        options = [options_of(optimizer.param_groups[index]) for index in order]
        values = list(optimizer.state.values())
        states = [values[place] for place in places]
        sight = Sight(before)
        # The order is a fact, not what it follows from: a restore records groups, and changes nothing by that.
        sight.note((class_name(optimizer), facts[:3], order, places, list(map(_DEVICE, parameters))))
        sight.look(options)
        sight.look(states)
        sight.look(extra)
        return sight.close()


def options_of(group: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options of a live group by name."""
    # Sorted, because the order of keys says when a scheduler was built and nothing else.
    return {key: value for key, value in sorted(group.items()) if key not in NOT_OPTIONS}


def plain_options_of(group: Mapping[str, Any], path: str) -> dict[str, Any]:
    """Return `options_of` a group, its tensors as numbers.

    Raises:
        RequestError: A tensor cannot be stored.
    """
    options = options_of(group)
    for name, value in options.items():
        if isinstance(value, torch.Tensor):
            check_storable(value, f"{path}.{name}")
            options[name] = value.tolist()
    return options


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


def _order_of(
    names: Sequence[Sequence[str]], stated: Sequence[str], recorded: Sequence[Sequence[str]]
) -> tuple[list[int], list[int]]:
    """Return the order of groups, and that of states: by group, those of one module together.

    Args:
        names: The parameters of each group.
        stated: The parameters that have a state.
        recorded: As for `tree_of`.
    """
    order = recorded_order(names, recorded)
    places = {name: place for place, name in enumerate(stated)}
    listed = dict.fromkeys(name for index in order for name in names[index] if name in places)
    modules: dict[str, list[int]] = {}
    for name in (*listed, *(name for name in stated if name not in listed)):
        modules.setdefault(name.split("/", 1)[0], []).append(places[name])
    return order, list(chain.from_iterable(modules.values()))


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
