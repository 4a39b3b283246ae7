"""The plain trees of ranks that hold different parts of one item, put together by name.

1. Names are put together: the entries and extra states of a module, the groups and states of an optimizer. Groups of
   optimizers that have no parameter in common are one where their options are equal, and keep their own where not.
2. What stands under a name is the first tree's that has it. The trees of all other items are values of the user's, and
   the first tree is taken as it is.

Spec: F4, C11.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from safepoint.format.leaves import Same, Shared
from safepoint.restoring.trees import differing_values

_MODULE = ("entries", "extra", "training")
_OPTIMIZER = ("class", "groups", "state", "other", "extra")
_GROUP = ("parameters", "devices", "options")


@dataclass(frozen=True, slots=True)
class Union:
    """Hold one tree made of several, and the places at which they say different things, each once."""

    tree: object
    contradictions: tuple[str, ...]


def union_of_trees(trees: Sequence[object], *, is_first_own: bool = False) -> Union:
    """Return one tree that holds every name of any of the trees.

    Names stay sorted where both trees' are. The groups of an optimizer are joined one by one, and its states follow
    them.

    Args:
        trees: The trees.
        is_first_own: Whether the first one is that of the rank itself, which alone says in which modes its modules are.
    """
    whole: Any = trees[0]
    places: dict[str, None] = {}
    for tree in trees[1:]:
        if tree == whole:
            continue
        shifted = _renumbered(tree, max(_numbers(whole), default=0) + 1)
        if is_module(whole) and is_module(tree):
            training = whole["training"] if is_first_own else _joined(whole["training"], shifted["training"])
            whole = {**_joined_module(whole, shifted, places), "training": training}
        elif is_optimizer(whole) and is_optimizer(tree):
            whole = _joined_optimizer(whole, shifted, places)
        else:
            _note(whole, tree, "", places)
    if is_optimizer(whole) and len(trees) > 1:
        whole = {**whole, "state": _in_order_of_groups(whole["groups"], whole["state"])}
    return Union(whole, tuple(places))


def is_module(tree: Any) -> bool:
    """Return whether a tree, decoded or in JSON form, is that of a module."""
    return (
        isinstance(tree, dict)
        and tuple(tree) == _MODULE
        and isinstance(tree["entries"], dict)
        and isinstance(tree["extra"], dict)
    )


def is_optimizer(tree: Any) -> bool:
    """Return whether a tree, decoded or in JSON form, is that of an optimizer."""
    return (
        isinstance(tree, dict)
        and tuple(tree) == _OPTIMIZER
        and isinstance(tree["groups"], list)
        and all(isinstance(group, dict) and tuple(group) == _GROUP for group in tree["groups"])
        and isinstance(tree["state"], dict)
        and all(isinstance(states, dict) for states in tree["state"].values())
    )


def _joined_module(first: dict[str, Any], second: dict[str, Any], places: dict[str, None]) -> dict[str, Any]:
    for path in first["extra"].keys() & second["extra"].keys():
        _note(first["extra"][path], second["extra"][path], f"extra.{path}", places)
    return {
        "entries": _joined(first["entries"], second["entries"]),
        "extra": _joined(first["extra"], second["extra"], levels=1),
    }


def _joined_optimizer(first: dict[str, Any], second: dict[str, Any], places: dict[str, None]) -> dict[str, Any]:
    for field in ("class", "other", "extra"):
        _note(first[field], second[field], field, places)
    for module, states in first["state"].items():
        others = second["state"].get(module, {})
        for name in states.keys() & others.keys():
            _note(states[name], others[name], f"state.{module}.{name}", places)
    groups = _joined_groups(first["groups"], second["groups"], places)
    return {**first, "groups": groups, "state": _joined(first["state"], second["state"], levels=2)}


def _joined_groups(first: list[Any], second: list[Any], places: dict[str, None]) -> list[Any]:
    """Return the groups of two optimizers: one where they have a parameter in common, else where they are set alike."""
    groups, free = list(first), list(range(len(first)))
    others = []
    for group in second:
        names = set(group["parameters"])
        host = next((place for place in free if names & set(first[place]["parameters"])), None)
        if host is None:
            others.append(group)
            continue
        free.remove(host)
        _note(first[host]["options"], group["options"], f"groups[{host}].options", places)
        groups[host] = _joined_group(first[host], group)
    for group in others:
        host = next((place for place in free if _are_set_alike(first[place], group)), None)
        if host is None:
            groups.append(group)
        else:
            free.remove(host)
            groups[host] = _joined_group(first[host], group)
    return groups


def _are_set_alike(first: Any, second: Any) -> bool:
    return not any(differing_values(_unnumbered(first["options"]), _unnumbered(second["options"])))


def _joined_group(first: dict[str, Any], second: dict[str, Any]) -> dict[str, Any]:
    """Return one group of an optimizer: each parameter keeps the device that stands beside it."""
    devices = dict(zip(second["parameters"], second["devices"], strict=True))
    devices.update(zip(first["parameters"], first["devices"], strict=True))
    names = list(dict.fromkeys([*first["parameters"], *second["parameters"]]))
    return {"parameters": names, "devices": [devices[name] for name in names], "options": first["options"]}


def _joined(first: Any, second: Any, *, levels: int = -1) -> Any:
    """Return two mappings joined by key, and lists of names by name, to so many levels; -1 for all."""
    if type(first) is not type(second) or not levels:
        return first
    if isinstance(first, dict):
        whole = {
            key: _joined(value, second[key], levels=levels - 1) if key in second else value
            for key, value in first.items()
        }
        whole.update((key, value) for key, value in second.items() if key not in first)
        is_sorted = _is_sorted(list(first)) and _is_sorted(list(second))
        return type(first)((key, whole[key]) for key in sorted(whole)) if is_sorted else type(first)(whole)
    if isinstance(first, list) and all(type(one) is str for one in [*first, *second]):
        names = list(dict.fromkeys([*first, *second]))
        return sorted(names) if _is_sorted(first) and _is_sorted(second) else names
    return first


def _note(first: Any, second: Any, path: str, places: dict[str, None]) -> None:
    """Note where two values differ; the numbers of values that stand at several places say nothing."""
    for difference in differing_values(_unnumbered(first), _unnumbered(second), path):
        places[difference.path] = None


def _in_order_of_groups(groups: Any, state: dict[str, Any]) -> dict[str, Any]:
    """Return the states of parameters in the order in which the groups list them, those of one module together."""
    places = {name: place for place, name in enumerate(name for group in groups for name in group["parameters"])}
    last = len(places)

    def first_of(module: str) -> int:
        return min((places.get(f"{module}/{name}", last) for name in state[module]), default=last)

    return {
        module: dict(sorted(state[module].items(), key=lambda entry: places.get(f"{module}/{entry[0]}", last)))
        for module in sorted(state, key=first_of)
    }


def _is_sorted(keys: list[Any]) -> bool:
    return all(type(key) is str for key in keys) and keys == sorted(keys)


def _numbers(tree: Any) -> Iterator[int]:
    if isinstance(tree, Shared):
        yield tree.number
        yield from _numbers(tree.value)
    elif isinstance(tree, dict):
        for value in tree.values():
            yield from _numbers(value)
    elif isinstance(tree, list | tuple):
        for value in tree:
            yield from _numbers(value)


def _renumbered(tree: Any, shift: int) -> Any:
    """Return a tree whose shared values have numbers that no other tree uses."""
    if isinstance(tree, Shared):
        return Shared(tree.number + shift, _renumbered(tree.value, shift))
    if isinstance(tree, Same):
        return Same(tree.number + shift)
    if isinstance(tree, dict):
        return type(tree)((key, _renumbered(value, shift)) for key, value in tree.items())
    if isinstance(tree, list | tuple) and type(tree) in (list, tuple):
        return type(tree)(_renumbered(value, shift) for value in tree)
    return tree


def _unnumbered(tree: Any) -> Any:
    if isinstance(tree, Shared):
        return _unnumbered(tree.value)
    if isinstance(tree, Same):
        return Same(0)
    if isinstance(tree, dict):
        return type(tree)((key, _unnumbered(value)) for key, value in tree.items())
    if type(tree) in (list, tuple):
        return type(tree)(_unnumbered(value) for value in tree)
    return tree
