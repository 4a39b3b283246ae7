"""State that a module's own `state_dict` adds to its parameters, buffers and extra state, and that would be lost.

Invariants:

1. Only modules that can add something are asked: those whose class overrides `state_dict` or `_save_to_state_dict`, or
   that carry a `state_dict` hook. What torch itself defines is known to add nothing and is not asked.
2. Only something added is refused. An entry is known by its key, or by its memory: a hook that renames, leaves out or
   converts entries keeps its module registrable.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from operator import attrgetter
from typing import Any

import torch

from safepoint.errors import RequestError
from safepoint.state.names import walk_modules
from safepoint.state.placement import undisturbed_streams

_EXTRA_KEY = "_extra_state"
_HOOKS = attrgetter("_state_dict_hooks")


def may_have_own_state(modules: Iterable[torch.nn.Module], kinds: Iterable[type[torch.nn.Module]]) -> bool:
    """Return whether any of these modules, whose classes are given besides, is one that can add something."""
    return any(map(_HOOKS, modules)) or any(map(_is_class_with_own, kinds))


def refuse_own_state(item: str, root: torch.nn.Module) -> None:
    """Refuse modules whose `state_dict` holds more than parameters, buffers and extra state.

    Calls the `state_dict` of modules that override or hook it.

    Raises:
        RequestError: Names the module and the keys.
    """
    for path, module in walk_modules(root):
        if _has_own_private_entries(module):
            entries: dict[str, Any] = {}
            module._save_to_state_dict(entries, "", True)
            known = {*module._parameters, *module._buffers, _EXTRA_KEY}
            _refuse(item, path, [key for key in entries if key not in known])
        if _has_own_state_dict(module):
            _refuse(item, path, list(_added(module)))


def has_own_code(entry: object) -> bool:
    """Return whether code that is neither torch's nor safepoint's runs where a live object tells its state.

    Not of modules: only theirs that may add something or have extra state run any.
    """
    if isinstance(entry, torch.nn.Module):
        return False
    if isinstance(entry, torch.optim.Optimizer):
        # Only an overridden one is called.
        return type(entry).state_dict is not torch.optim.Optimizer.state_dict
    maker = getattr(entry, "state_dict", None)
    is_own = maker is not None and _origin_of(maker) not in ("torch", "safepoint")
    return is_own or any(map(has_own_code, getattr(entry, "_schedulers", ())))


def has_extra_state(kind: type[torch.nn.Module]) -> bool:
    """Return whether modules of a class have extra state."""
    return kind.get_extra_state is not torch.nn.Module.get_extra_state


def _is_class_with_own(kind: type[torch.nn.Module]) -> bool:
    return kind._save_to_state_dict is not torch.nn.Module._save_to_state_dict or not _is_of_torch(kind.state_dict)


def _has_own_private_entries(module: torch.nn.Module) -> bool:
    return type(module)._save_to_state_dict is not torch.nn.Module._save_to_state_dict


def _has_own_state_dict(module: torch.nn.Module) -> bool:
    makers = [type(module).state_dict, *module._state_dict_hooks.values()]
    return any(not _is_of_torch(maker) for maker in makers)


def _is_of_torch(maker: Any) -> bool:
    return _origin_of(maker) == "torch"


def _origin_of(maker: Any) -> str:
    """Return the name of the package that a function is of."""
    origin = getattr(getattr(maker, "func", maker), "__module__", None) or type(maker).__module__
    return str(origin).split(".")[0]


def _added(module: torch.nn.Module) -> Iterator[str]:
    tensors = [*module.named_parameters(remove_duplicate=False), *module.named_buffers(remove_duplicate=False)]
    names = {name for name, _ in tensors}
    for path, inner in module.named_modules(remove_duplicate=False):
        if has_extra_state(type(inner)):
            names.add(f"{path}.{_EXTRA_KEY}" if path else _EXTRA_KEY)
    memory = {_address(tensor) for _, tensor in tensors}
    with undisturbed_streams():
        whole = module.state_dict()
    yield from _unknown(whole, "", names, memory)


def _unknown(value: Any, key: str, names: set[str], memory: set[object]) -> Iterator[str]:
    if key in names:
        return
    if isinstance(value, Mapping):
        for inner, element in value.items():
            yield from _unknown(element, f"{key}.{inner}" if key else str(inner), names, memory)
    elif not (isinstance(value, torch.Tensor) and _address(value) in memory):
        yield key or "(all)"


def _address(tensor: torch.Tensor) -> object:
    is_plain = type(tensor.detach()) is torch.Tensor and tensor.layout == torch.strided
    # Tensors without memory, on the meta device or of no bytes, all report address 0.
    address = tensor.data_ptr() if is_plain and not tensor.is_meta else 0
    return (str(tensor.device), address) if address else id(tensor)


def _refuse(item: str, path: str, keys: list[str]) -> None:
    if keys:
        raise RequestError(
            "a module's state_dict() holds state that is neither parameter, buffer nor extra state",
            where=f"{item}.{path}" if path else item,
            found=", ".join(sorted(keys)),
            remedy="Keep it in a buffer, or return it from get_extra_state() and take it in set_extra_state(); "
            "hooks and an overridden state_dict() are not part of what is stored.",
        )
