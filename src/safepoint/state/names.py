"""Names of parameters and buffers, as the model's own code knows them.

1. A wrapper's prefix is left out wherever it stands in a name: ``module.`` of (Distributed)DataParallel, ``_orig_mod.``
   of torch.compile, ``_fsdp_wrapped_module.``, ``_checkpoint_wrapped_module.``.
2. Whether it is a wrapper is decided on the live object's class, never by the text of a name: a submodule that is
   really called ``module`` keeps its name.
3. `AveragedModel` is no wrapper: it has state of its own (``n_averaged``), so its average stays below ``module.``.
4. A module that `fully_shard` or `replicate` gave another class counts as of the one that its author wrote.
5. Parameters of `fully_shard` are put back into their sharded form before they are named: after a forward pass without
   a backward pass, as in a validation, whole ones stand in their place, which the optimizer does not know.
6. A parameter reached under several names has the first of them in alphabetical order, so that its name does not depend
   on the order in which the layers are declared.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import chain
from operator import attrgetter, methodcaller
from typing import Any

import msgspec
import torch

from safepoint.errors import RequestError

# What a module holds of each sort, by key.
CHILDREN: Callable[[torch.nn.Module], Mapping[str, torch.nn.Module | None]] = attrgetter("_modules")
PARAMETERS: Callable[[torch.nn.Module], Mapping[str, torch.nn.Parameter | None]] = attrgetter("_parameters")
BUFFERS: Callable[[torch.nn.Module], Mapping[str, torch.Tensor | None]] = attrgetter("_buffers")
# Not those of `dict`: the modules of a compiled script hold theirs in mappings of their own.
keys_of, values_of = methodcaller("keys"), methodcaller("values")

# Classes of which it is remembered what they are.
_MOST_CLASSES = 4096
_SPREADING = ("torch.nn.parallel.distributed", "DistributedDataParallel")
# The attribute under which each wrapper keeps the module it wraps. By name, because importing these classes is slow and
# some of them need a torch built with distributed support.
_WRAPPERS = {
    _SPREADING: "module",
    ("torch.nn.parallel.data_parallel", "DataParallel"): "module",
    ("torch._dynamo.eval_frame", "OptimizedModule"): "_orig_mod",
    ("torch.distributed.fsdp.fully_sharded_data_parallel", "FullyShardedDataParallel"): "_fsdp_wrapped_module",
    (
        "torch.distributed.algorithms._checkpoint.checkpoint_wrapper",
        "ActivationWrapper",
    ): "_checkpoint_wrapped_module",
}


class Slot(msgspec.Struct, frozen=True):
    """Hold one place of a module for a parameter or buffer: its full name, and where it hangs.

    `tensor` is None for a slot that is registered but empty.
    """

    name: str
    kind: str
    owner: torch.nn.Module
    key: str
    tensor: torch.Tensor | None
    is_persistent: bool


def wrapped_key(module: torch.nn.Module) -> str | None:
    """Return under which attribute a wrapper keeps what it wraps, or None for a module that is no wrapper."""
    keys = wrapping_of(type(module))  # type: ignore[arg-type]  # classes are hashable
    return next((key for key in keys if key in module._modules), None) if keys else None


def each_module(root: torch.nn.Module) -> tuple[list[torch.nn.Module], list[object]]:
    """Return every module once, a parent before what is below it, and comparable facts that tell how the tree is built.

    Two trees of equal facts have the same names at the same places of the list. torch's own walk takes several times as
    long, and so would a call for each module.
    """
    found, level, count = [root], [root], 1
    firsts = {id(None): -1, id(root): 0}
    facts: list[object] = []
    while level:
        children = list(map(CHILDREN, level))
        facts += (list(map(len, children)), list(chain.from_iterable(map(keys_of, children))))
        below: list[Any] = list(chain.from_iterable(map(values_of, children)))
        known, places = len(firsts), range(count, count + len(below))
        numbers = list(map(firsts.setdefault, map(id, below), places))
        if len(firsts) < known + len(below):
            # Some are reached a second time, or are none.
            facts.append(numbers)
            below = [one for one, number, place in zip(below, numbers, places, strict=True) if number == place]
        count += len(numbers)
        level = below
        found += level
    return found, facts


def reshard(modules: Sequence[torch.nn.Module]) -> None:
    """Free the whole parameters that `fully_shard` has gathered, and let the sharded ones stand in their place.

    Starts no collective, but the next forward pass gathers again: the ranks must do it together.
    """
    for module in _of_kind(modules, _is_fully_sharded):
        module.reshard()


def handed_out_buffers(modules: Sequence[torch.nn.Module]) -> set[int]:
    """Return the ids of the buffers that a DistributedDataParallel spreads from its leader before each forward pass."""
    found: set[int] = set()
    for module in _of_kind(modules, _is_spreading):
        if getattr(module, "broadcast_buffers", False):
            named = module.module.named_buffers()
            found.update(id(one) for name, one in named if name not in module.parameters_to_ignore)
    return found


def class_of(module: torch.nn.Module) -> type:
    """Return a module's class as its author wrote it."""
    kind: type = type(module)
    while len(kind.__bases__) == 2 and _is_of_distributed(kind.__bases__[0]):
        kind = kind.__bases__[1]
    return kind


def walk_modules(root: torch.nn.Module) -> Iterator[tuple[str, torch.nn.Module]]:
    """Yield every module with its name, once for each path that leads to it; a wrapper shares the name of its content.

    The root's name is empty. The order is that of `named_modules`.
    """
    found: list[tuple[str, torch.nn.Module]] = []
    _walk(root, "", set(), found)
    return iter(found)


def held_tensors(root: torch.nn.Module) -> list[torch.Tensor]:
    """Return every parameter and buffer, once for each module that holds it."""
    modules, _ = each_module(root)
    held = chain(map(PARAMETERS, modules), map(BUFFERS, modules))
    return [tensor for tensor in chain.from_iterable(map(values_of, held)) if tensor is not None]


def walk_slots(root: torch.nn.Module) -> list[Slot]:
    """Return the slots of all parameters, then of all buffers, once for each name that leads to them.

    Raises:
        RequestError: Two slots have the same name without their wrappers' prefixes.
    """
    reshard(each_module(root)[0])
    slots: dict[str, Slot] = {}
    modules = list(walk_modules(root))
    for prefix, owner in modules:
        for key, tensor in owner._parameters.items():
            _add(slots, Slot(_below(prefix, key), "parameter", owner, key, tensor, True))
    for prefix, owner in modules:
        if not owner._buffers:
            continue
        for key, buffer in owner._buffers.items():
            is_persistent = key not in owner._non_persistent_buffers_set
            _add(slots, Slot(_below(prefix, key), "buffer", owner, key, buffer, is_persistent))
    return list(slots.values())


def qualified_parameters(modules: Mapping[str, torch.nn.Module]) -> dict[str, torch.Tensor]:
    """Return each parameter of the registered modules once, under ``item/name``.

    A parameter of two items belongs to the one registered first.
    """
    parameters: dict[str, torch.Tensor] = {}
    seen: set[int] = set()
    for item, module in modules.items():
        slots = [slot for slot in walk_slots(module) if slot.kind == "parameter"]
        leaders: dict[int, Slot] = {}
        for slot in slots:
            leader = leaders.setdefault(id(slot.tensor), slot)
            if slot.name < leader.name:
                leaders[id(slot.tensor)] = slot
        for slot in leaders.values():
            if slot.tensor is not None and id(slot.tensor) not in seen:
                seen.add(id(slot.tensor))
                parameters[f"{item}/{slot.name}"] = slot.tensor
    return parameters


def _of_kind(modules: Sequence[torch.nn.Module], is_of_kind: Callable[[type], bool]) -> list[Any]:
    types = list(map(type, modules))
    found = {kind for kind in set(types) if is_of_kind(kind)}
    return [module for module, kind in zip(modules, types, strict=True) if kind in found] if found else []


def _is_of_distributed(kind: type) -> bool:
    return kind.__module__.startswith("torch.distributed.")


@functools.lru_cache(maxsize=_MOST_CLASSES)
def wrapping_of(kind: type) -> tuple[str, ...]:
    """Return under which attributes modules of a class may keep what they wrap; none for one that is no wrapper."""
    keys = (_WRAPPERS.get((one.__module__, one.__qualname__)) for one in kind.__mro__)
    return tuple(key for key in keys if key is not None)


@functools.lru_cache(maxsize=_MOST_CLASSES)
def _is_fully_sharded(kind: type) -> bool:
    return any(one.__qualname__ == "FSDPModule" and _is_of_distributed(one) for one in kind.__mro__)


@functools.lru_cache(maxsize=_MOST_CLASSES)
def _is_spreading(kind: type) -> bool:
    return any((one.__module__, one.__qualname__) == _SPREADING for one in kind.__mro__)


def _walk(module: torch.nn.Module, prefix: str, above: set[int], found: list[tuple[str, torch.nn.Module]]) -> None:
    if id(module) in above:
        return
    found.append((prefix, module))
    if not module._modules:
        return
    above.add(id(module))
    inner = wrapped_key(module)
    for key, child in module._modules.items():
        if child is not None:
            _walk(child, prefix if key == inner else _below(prefix, key), above, found)
    above.discard(id(module))


def _below(prefix: str, key: str) -> str:
    return f"{prefix}.{key}" if prefix else key


def _add(slots: dict[str, Slot], slot: Slot) -> None:
    other = slots.setdefault(slot.name, slot)
    if other is not slot:
        raise RequestError(
            "two tensors of a module have the same name once the wrappers' prefixes are left out",
            where=slot.name,
            found=f"a {other.kind} of {type(other.owner).__qualname__} and one of {type(slot.owner).__qualname__}",
            remedy="Rename one of them.",
        )
