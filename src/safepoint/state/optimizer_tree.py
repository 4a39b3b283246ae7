"""The stored tree of an optimizer, parsed."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from safepoint.format.plain import Same, ScalarLeaf, Shared, TensorLeaf
from safepoint.state.groups import DEVICE_KINDS, SavedGroup
from safepoint.state.item import SavedItem
from safepoint.state.rebuild import check_plain
from safepoint.state.stored import elements, field, malformed, record

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
