"""A glance at a module: all that the names of its parameters and buffers follow from, in columns.

1. Two modules of equal facts have the same names at the same places of `tensors`, whatever the tensors are.
2. Each module of the tree is looked at once, level by level. A call for each of them would take longer than all of it.
3. Parameters of `fully_shard` are put back into their sharded form before they are looked at (`names`, rule 5).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from itertools import chain, repeat
from operator import attrgetter, is_, ne
from typing import Any

import msgspec
import torch

from safepoint.state.names import (
    BUFFERS,
    PARAMETERS,
    each_module,
    held_tensors,
    keys_of,
    qualified_parameters,
    reshard,
    values_of,
    wrapping_of,
)

_IS_TRAINING: Callable[[torch.nn.Module], bool] = attrgetter("training")


class Glance(msgspec.Struct, frozen=True):
    """Hold what was seen of a module.

    `modules` are all of it, each once, a parent before what is below it, and `kinds` their classes, each once. `facts`
    are comparable and hold no reference to a module. `parameters` and `buffers` are what the slots hold, in the order
    of the modules; a tensor of several slots is listed for each.
    """

    modules: list[torch.nn.Module]
    kinds: frozenset[type]
    facts: list[object]
    parameters: list[torch.Tensor | None]
    buffers: list[torch.Tensor | None]

    def is_same(self, other: Glance) -> bool:
        """Return whether the very same modules hold the very same tensors, in the same places."""
        if self.facts != other.facts:
            return False
        ours, theirs = (chain(one.modules, one.parameters, one.buffers) for one in (self, other))
        return all(map(is_, ours, theirs))

    @property
    def modes(self) -> list[bool] | None:
        """Return which modules are in another mode than the root, to train or to evaluate; None if none is."""
        modes = list(map(_IS_TRAINING, self.modules))
        return list(map(ne, modes, repeat(modes[0]))) if len(set(modes)) > 1 else None


def glance_at(root: torch.nn.Module) -> Glance:
    """Look at a module and all below it."""
    modules, tree = each_module(root)
    reshard(modules)
    types = list(map(type, modules))
    kinds = frozenset(types)
    wrappings = {kind: wrapping_of(kind) for kind in kinds}
    wrapped = list(map(wrappings.__getitem__, types)) if any(wrappings.values()) else None
    parameters, buffers = (list(map(held, modules)) for held in (PARAMETERS, BUFFERS))
    other = [frozenset(one._non_persistent_buffers_set) for one, held in zip(modules, buffers, strict=True) if held]
    facts: list[object] = [tree, wrapped, _keys(parameters), _keys(buffers), other]
    return Glance(modules, kinds, facts, _tensors(parameters), _tensors(buffers))


class Glances:
    """Look at modules: within `shared` once at each, whoever asks, and else whenever it is asked."""

    def __init__(self) -> None:
        self._seen: dict[int, Glance] | None = None

    @contextmanager
    def shared(self) -> Iterator[None]:
        """Share what is seen within the block; it is let go of at its end.

        Where code within it may change a module, `forget` is called.
        """
        self._seen = {}
        try:
            yield
        finally:
            self._seen = None

    def at(self, root: torch.nn.Module) -> Glance:
        """Look at a module and all below it."""
        if self._seen is None:
            return glance_at(root)
        found = self._seen.get(id(root))
        if found is None:
            found = self._seen[id(root)] = glance_at(root)
        return found

    def tensors_of(self, root: torch.nn.Module) -> list[torch.Tensor]:
        """Return every parameter and buffer, once for each module that holds it."""
        found = (self._seen or {}).get(id(root))
        if found is None:
            return held_tensors(root)
        return [one for one in chain(found.parameters, found.buffers) if one is not None]

    def forget(self) -> None:
        """Look at all modules anew, because code ran that may change any of them."""
        if self._seen is not None:
            self._seen = {}


class ParameterNames:
    """Name the parameters of modules as `qualified_parameters` does, again and again.

    What is kept of the last time are the names, and at which places of what is seen the named ones stand.
    """

    def __init__(self, glances: Glances) -> None:
        self._glances = glances
        self._facts: list[object] | None = None
        self._names: list[str] = []
        self._places: list[int] = []

    def of(self, modules: Mapping[str, torch.nn.Module]) -> dict[str, torch.Tensor]:
        """Return each parameter of the registered modules once, under ``item/name``."""
        glances = [self._glances.at(module) for module in modules.values()]
        tensors: list[Any] = list(chain.from_iterable(one.parameters for one in glances))
        firsts = {id(None): -1}
        numbers = list(map(firsts.setdefault, map(id, tensors), range(len(tensors))))
        # Which slots hold one and the same parameter, and which hold none.
        ties = numbers if len(firsts) <= len(numbers) else None
        facts = [list(modules), [one.facts for one in glances], ties]
        if facts != self._facts:
            named = qualified_parameters(modules)
            self._names, self._places = list(named), [firsts[id(one)] for one in named.values()]
            self._facts = facts
        return dict(zip(self._names, [tensors[place] for place in self._places], strict=True))


def _keys(held: list[Mapping[str, torch.Tensor | None]]) -> tuple[list[int], list[str]]:
    return list(map(len, held)), list(chain.from_iterable(map(keys_of, held)))


def _tensors(held: Iterable[Mapping[str, torch.Tensor | None]]) -> list[torch.Tensor | None]:
    return list(chain.from_iterable(map(values_of, held)))
