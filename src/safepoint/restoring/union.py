"""The plain trees of ranks that hold different parts of one item, put together by name.

Where two trees contradict each other, the first one's value stays.

Spec: F4, C11.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any

from safepoint.format.leaves import Same, Shared

_GROUP = ("parameters", "devices", "options")
_OPTIMIZER = ("class", "groups", "state", "other", "extra")


def union_of_trees(trees: Sequence[object]) -> object:
    """Return one tree that holds what any of the trees holds.

    Mappings are joined by key, lists of names by name; both stay sorted where both were. The groups of an optimizer are
    joined one by one, and its states follow them.
    """
    whole = trees[0]
    for tree in trees[1:]:
        if tree != whole:
            highest = max(_numbers(whole), default=0)
            whole = _joined(whole, _renumbered(tree, highest + 1))
    if isinstance(whole, dict) and tuple(whole) == _OPTIMIZER and len(trees) > 1:
        return {**whole, "state": _in_order_of_groups(whole["groups"], whole["state"])}
    return whole


def _joined(first: Any, second: Any) -> Any:
    if type(first) is not type(second):
        return first
    if isinstance(first, Shared):
        return Shared(first.number, _joined(first.value, second.value))
    if isinstance(first, dict):
        if tuple(first) == tuple(second) == _GROUP:
            return _joined_group(first, second)
        whole = {key: _joined(value, second[key]) if key in second else value for key, value in first.items()}
        whole.update((key, value) for key, value in second.items() if key not in first)
        is_sorted = _is_sorted(list(first)) and _is_sorted(list(second))
        return type(first)((key, whole[key]) for key in sorted(whole)) if is_sorted else type(first)(whole)
    if isinstance(first, list):
        if all(type(one) is str for one in [*first, *second]):
            names = list(dict.fromkeys([*first, *second]))
            return sorted(names) if _is_sorted(first) and _is_sorted(second) else names
        if len(first) == len(second):
            return [_joined(one, other) for one, other in zip(first, second, strict=True)]
    return first


def _joined_group(first: dict[str, Any], second: dict[str, Any]) -> dict[str, Any]:
    """Return one group of an optimizer: each parameter keeps the device that stands beside it."""
    devices = dict(zip(second["parameters"], second["devices"], strict=True))
    devices.update(zip(first["parameters"], first["devices"], strict=True))
    names = list(dict.fromkeys([*first["parameters"], *second["parameters"]]))
    options = _joined(first["options"], second["options"])
    return {"parameters": names, "devices": [devices[name] for name in names], "options": options}


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
        return dataclasses.replace(tree, number=tree.number + shift)
    if isinstance(tree, dict):
        return type(tree)((key, _renumbered(value, shift)) for key, value in tree.items())
    if isinstance(tree, list | tuple) and type(tree) in (list, tuple):
        return type(tree)(_renumbered(value, shift) for value in tree)
    return tree
