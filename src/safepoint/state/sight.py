"""What is seen of a state: all that its stored form follows from, besides the values that are read at each save.

1. Two states of equal facts have the same stored form: the same text around their values, and the same tensors under
   the same names, cut alike, shared alike.
2. A fact holds no reference to the state and is no promise that an object lives: what was seen is compared, never
   trusted. The tensors and values belong to this look alone.
3. What a fact could not tell exactly is not seen: the whole state is then of unknown kind, and nothing is kept of it.
"""

from __future__ import annotations

from collections import OrderedDict
from operator import attrgetter
from typing import Any

import torch

from safepoint.format.plain import MAX_DEPTH
from safepoint.state.draft import ATOMS, container_of
from safepoint.state.rebuild import SPARSE_KEY
from safepoint.state.shards import local_of, way_of
from safepoint.state.tensors import PLAIN_TYPES, is_distributed

_KEYS = frozenset({str, int})
_SHOWN = attrgetter("dtype", "device", "requires_grad", "shape")


class Sight:
    """Look at a state, part after part.

    `facts` are comparable; `tensors` are all that were met, each once; `values` are the atoms that are no texts,
    and the tensors of one value, in the order in which they were met. `repeated` are
    the ids of what was met more than once. `is_known` is whether the facts tell all.
    """

    __slots__ = ("_meshes", "_numbers", "_open", "facts", "is_known", "repeated", "tensors", "values")

    def __init__(self) -> None:
        self.facts: list[object] = []
        self.tensors: list[torch.Tensor] = []
        self.values: list[object] = []
        self.is_known = True
        # Which objects were met, in this order: what is one object in two places is stored once.
        self._numbers: dict[int, int] = {}
        self.repeated: set[int] = set()
        self._open: set[int] = set()
        # What was told of each mesh: many tensors lie on one.
        self._meshes: dict[int, object] = {}

    @classmethod
    def of(cls, value: object) -> Sight:
        """Look at nested builtin values and tensors."""
        sight = cls()
        sight.look(value, 0)
        return sight

    def look(self, value: Any, depth: int) -> None:
        """Look at a value and all that it holds. Each leaves one fact, so that equal facts are those of equal trees."""
        kind = type(value)
        if kind is str:
            # Texts hardly ever change, and there is one for each name.
            self.facts.append(value)
        elif kind in ATOMS:
            self.facts.append(None)
            self.values.append(value)
        elif isinstance(value, torch.Tensor):
            self.look_at_tensor(value)
        elif depth > MAX_DEPTH:
            self.is_known = False
        elif kind is tuple:
            self.facts.append((kind, len(value)))
            self._look_at_all(value, depth)
        elif kind is list:
            if self._is_met_first(value):
                self.facts.append((kind, len(value)))
                self._look_within(value, value, depth)
        elif kind is dict or kind is OrderedDict:
            if self._is_met_first(value):
                keys = tuple(value)
                # Keys of other types may be equal without being the same.
                self.is_known = self.is_known and _KEYS.issuperset(map(type, keys)) and SPARSE_KEY not in value
                self.facts.append((kind, keys))
                self._look_within(value, value.values(), depth)
        else:
            self.is_known = False

    def note(self, fact: object) -> None:
        """Note a fact that is known already."""
        self.facts.append(fact)

    def miss(self) -> None:
        """Say that there is more to the state than the facts tell."""
        self.is_known = False

    def look_at_tensor(self, tensor: torch.Tensor | None) -> None:
        """Look at a tensor, not at what is in it."""
        if tensor is None:
            self.facts.append(None)
            return
        if not self._is_met_first(tensor):
            return
        kind, memory = type(tensor), tensor
        if kind not in PLAIN_TYPES and is_distributed(tensor):
            memory = local_of(tensor)
            self.facts.append((kind, _SHOWN(tensor), way_of(tensor, self._meshes)))
        if type(memory) not in PLAIN_TYPES or memory.layout is not torch.strided or memory.is_nested:
            self.is_known = False
            return
        shown = _SHOWN(memory)
        storage_bytes = memory.untyped_storage().nbytes()
        is_conj = shown[0].is_complex and memory.is_conj()
        place = (memory.data_ptr(), memory.storage_offset(), storage_bytes, memory.stride())
        holder = kind if kind is torch.nn.Parameter or not tensor.__dict__ else container_of(tensor)
        self.facts.append((holder, shown, place, memory.is_neg(), is_conj))
        self.tensors.append(tensor)
        if not tensor.dim():
            self.values.append(tensor)

    def _look_at_all(self, values: Any, depth: int) -> None:
        for value in values:
            if type(value) in PLAIN_TYPES:
                self.look_at_tensor(value)
            else:
                self.look(value, depth + 1)

    def _look_within(self, container: object, values: Any, depth: int) -> None:
        self._open.add(id(container))
        self._look_at_all(values, depth)
        self._open.discard(id(container))

    def _is_met_first(self, thing: object) -> bool:
        key, count = id(thing), len(self._numbers)
        number = self._numbers.setdefault(key, count)
        if number == count:
            return True
        self.repeated.add(key)
        # What contains itself is refused, with its path.
        self.is_known = self.is_known and key not in self._open
        self.facts.append(number)
        return False
