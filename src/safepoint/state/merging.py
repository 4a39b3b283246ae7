"""Restored optimizer state into live containers: what can stay the same object stays it.

Compiled steps, captured graphs and user code hold references to state tensors, to an `lr` tensor and to the list of
parameters.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from safepoint.format.plain import Same, Shared, TensorLeaf, ViewLeaf
from safepoint.state.groups import ordered
from safepoint.state.shards import local_of
from safepoint.state.tensors import write_into


def merge_state(old: Any, new: Any, several: set[int]) -> Any:
    """Return the new state in the old containers and tensors where these fit and belong to one place only."""
    if type(old) is not dict or type(new) is not dict or not several.isdisjoint((id(old), id(new))):
        return new
    merged = {key: _keep(old.get(key), value, several) for key, value in new.items()}
    old.clear()
    old.update(merged)
    return old


def set_step(value: Any, parameter: torch.Tensor, group: Mapping[str, Any]) -> None:
    """Put a state's ``step`` where fused and capturable kernels read it: on the parameter's device, as float32.

    A checkpoint written without these flags has it elsewhere, or as a number.
    """
    if isinstance(value, dict) and "step" in value and (group.get("fused") or group.get("capturable")):
        value["step"] = torch.as_tensor(value["step"]).to(dtype=torch.float32, device=parameter.device)


def set_option(group: dict[str, Any], key: str, value: Any) -> None:
    """Set one option of a group; a tensor option that fits is filled in place."""
    live = group.get(key)
    number = isinstance(value, int | float) and not isinstance(value, bool)
    if isinstance(live, torch.Tensor) and isinstance(value, torch.Tensor) and live.shape == value.shape:
        write_into(live, value)
    elif isinstance(live, torch.Tensor) and live.dim() == 0 and number:
        write_into(live, torch.as_tensor(value))
    else:
        # Groups would share one tensor if the same were given to several.
        group[key] = value.clone() if isinstance(value, torch.Tensor) else value


def reorder(group: dict[str, Any], name_of: Callable[[torch.Tensor], str], order: Sequence[str]) -> None:
    """Put a group's parameters into the order of these names, within the list itself: LBFGS keeps a reference to it."""
    by_name = {name_of(one): one for one in group["params"]}
    if len(by_name) != len(group["params"]):
        # torch allows a parameter to stand twice in a group, with a warning; such a list keeps its order.
        return
    labels = dict(zip(by_name, group.get("param_names", by_name), strict=True))
    names = ordered(list(by_name), order)
    group["params"][:] = [by_name[name] for name in names]
    if "param_names" in group:
        group["param_names"][:] = [labels[name] for name in names]


def leaves_of(plain: Any) -> list[TensorLeaf | ViewLeaf]:
    """Return the leaves of a plain tree that name tensors."""
    found: list[TensorLeaf | ViewLeaf] = []
    _gather(plain, found)
    return found


def is_shared(plain: Any) -> bool:
    """Return whether a plain tree holds a value that stands in several places, of which this tree may be only one."""
    if isinstance(plain, Shared | Same):
        return True
    if isinstance(plain, dict):
        return any(is_shared(value) for value in plain.values())
    return isinstance(plain, list | tuple) and any(is_shared(value) for value in plain)


def unshared_names(states: Mapping[str, Any]) -> set[str]:
    """Return the tensors that lie directly in the dict of a parameter and share memory with nothing.

    `states` holds the plain state of each parameter.
    """
    plain = [state for state in states.values() if isinstance(state, dict)]
    return {leaf.name for state in plain for leaf in state.values() if isinstance(leaf, TensorLeaf)}


def _gather(plain: Any, found: list[TensorLeaf | ViewLeaf]) -> None:
    if isinstance(plain, TensorLeaf | ViewLeaf):
        found.append(plain)
    elif isinstance(plain, Shared):
        _gather(plain.value, found)
    elif isinstance(plain, dict):
        for value in plain.values():
            if type(value) is not str:
                _gather(value, found)
    elif isinstance(plain, list | tuple):
        for value in plain:
            if type(value) is not str:
                _gather(value, found)


def _keep(old: Any, new: Any, several: set[int]) -> Any:
    if old is new:
        return new
    if not isinstance(old, torch.Tensor) or not isinstance(new, torch.Tensor) or type(old) is not type(new):
        return new
    if old.dtype != new.dtype or old.shape != new.shape or old.device != new.device or old.layout != torch.strided:
        return new
    if id(old) in several or id(new) in several or old.requires_grad != new.requires_grad:
        return new
    if old.dim() == 0:
        write_into(old, new)
        return old
    before, after = local_of(old), local_of(new)
    is_same = before.numel() and before.data_ptr() == after.data_ptr() and before.stride() == after.stride()
    return old if is_same else new
