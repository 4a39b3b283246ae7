"""What is seen of a state: all that its stored form follows from, besides the values that are read at each save.

1. Two states of equal facts have the same stored form: the same text around their values, and the same tensors under
   the same names, cut alike, shared alike.
2. A fact holds no reference to the state and is no promise that an object lives: what was seen is compared, never
   trusted. The tensors and values belong to this look alone.
3. What a fact could not tell exactly is not seen: the whole state is then of unknown kind, and nothing is kept of it.

A state has as many tensors as a model has layers, so they are looked at in columns: one fact of all, then the next. A
call for each tensor would take longer than all of it.
"""

from __future__ import annotations

import sys
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from functools import partial
from itertools import chain, compress, repeat
from operator import add, attrgetter, contains, ge, mul
from typing import Any

import torch

from safepoint.format.plain import MAX_DEPTH
from safepoint.state.aliases import are_disjoint
from safepoint.state.draft import ATOMS, container_of
from safepoint.state.portions import Asking, facts_of
from safepoint.state.rebuild import SPARSE_KEY
from safepoint.state.shards import memories_of, ways_of
from safepoint.state.tensors import PLAIN_TYPES, STORED_DTYPES, are_distributed
from safepoint.state.traits import Traits

_KEYS = frozenset({str, int})
_OWN_STATE = attrgetter("__dict__")
_DTYPE, _SHAPE = attrgetter("dtype"), attrgetter("shape")
_REQUIRES_GRAD, _SIZE_BYTES, _ITEM_BYTES = map(attrgetter, ("requires_grad", "nbytes", "itemsize"))
# What an atom of each type leaves as a fact: nothing, but for a text.
_MARKS: dict[type, type | None] = {kind: None if kind is not str else str for kind in ATOMS}
_PLACES: tuple[Asking, ...] = (
    partial(map, torch.Tensor.data_ptr),
    partial(map, torch.Tensor.storage_offset),
    lambda tensors: map(torch.UntypedStorage.nbytes, map(torch.Tensor.untyped_storage, tensors)),
)


class Sight:
    """Look at a state, part after part; then `close`.

    `facts` are comparable; `tensors` are all that were met, each once, and `memories` what each has of this rank's
    memory; `atoms` are the values without parts that are no texts, `scalars` the tensors
    of one value, both in the order in which they were met. `repeated` are the ids of what was met more than once.
    `is_known` is whether the facts tell all; `traits` are then those of the memories.

    Args:
        before: The traits that were seen the time before: what is found to be the same is not asked for.
    """

    __slots__ = (
        "_met",
        "_numbers",
        "_open",
        "_places",
        "atoms",
        "facts",
        "is_known",
        "memories",
        "repeated",
        "scalars",
        "tensors",
        "traits",
    )

    def __init__(self, before: Traits | None = None) -> None:
        self.traits = before
        self.facts: list[object] = []
        self.tensors: Sequence[torch.Tensor] = []
        self.memories: Sequence[torch.Tensor] = []
        self.atoms: list[object] = []
        self.scalars: list[torch.Tensor] = []
        self.repeated: set[int] = set()
        self.is_known = True
        self._met: list[torch.Tensor | None] = []
        self._places: list[list[Any]] = []
        # Which lists and dicts were met, in this order: what is one object in two places is stored once.
        self._numbers: dict[int, int] = {}
        self._open: set[int] = set()

    @property
    def addresses(self) -> list[int]:
        """Return where each memory begins, if the facts tell all."""
        return self._places[0]

    @classmethod
    def of(cls, value: object, before: Traits | None = None) -> Sight:
        """Look at nested builtin values and tensors."""
        sight = cls(before)
        sight.look(value)
        return sight.close()

    def look(self, value: Any, depth: int = 0) -> None:
        """Look at a value and all that it holds; `depth` is how deeply it lies in what is looked at.

        It ends here where it nests endlessly. How deeply a state may nest is for the encoding of its tree to say.
        What is noted begins with what tells how it goes on, so that equal facts are those of equal trees.
        """
        kind = type(value)
        if kind is str:
            self.facts.append(value)
        elif kind in ATOMS:
            self.facts.append(None)
            self.atoms.append(value)
        elif issubclass(kind, torch.Tensor):
            self.facts.append(torch.Tensor)
            self._met.append(value)
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
                self.facts.append((kind, tuple(value)))
                self._check_keys(value, [value])
                self._look_within(value, list(value.values()), depth)
        else:
            self.is_known = False

    def look_at_tensors(self, tensors: Iterable[torch.Tensor | None]) -> None:
        """Look at tensors, not at what is in them; None stands for a place without one."""
        self._met += tensors

    def note(self, fact: object) -> None:
        """Note a fact that is known already."""
        self.facts.append(fact)

    def miss(self) -> None:
        """Say that there is more to the state than the facts tell."""
        self.is_known = False

    def close(self) -> Sight:
        """Look at the tensors that were met, and return all that was seen."""
        firsts = {id(None): -1}
        numbers = list(map(firsts.setdefault, map(id, self._met), range(len(self._met))))
        if len(firsts) == len(numbers) + 1:
            self.tensors = self._met  # type: ignore[assignment]  # None is not among them
        else:
            self.facts.append(numbers)
            numbered = list(enumerate(zip(numbers, self._met, strict=True)))
            self.tensors = [one for place, (number, one) in numbered if number == place and one is not None]
            self.repeated |= {id(one) for place, (number, one) in numbered if -1 < number < place}
        self.is_known = self.is_known and self._see()
        return self

    def are_plain_and_apart(self) -> bool:
        """Return whether all tensors are `are_plainly_storable` and `are_apart`, by what was seen of them."""
        if self.traits is None or not self.is_known or self.memories is not self.tensors:
            return False
        begins, offsets, held = self._places
        dtypes = self.traits.dtypes
        if not self.traits.are_near or not STORED_DTYPES.issuperset(dtypes):
            return False
        are_dense, sizes = facts_of(self.tensors, (partial(map, torch.Tensor.is_contiguous), partial(map, _SIZE_BYTES)))
        if sys.byteorder != "little" or not all(are_dense):
            return False
        if not all(begins) and any(size and not begin for size, begin in zip(sizes, begins, strict=True)):
            return False
        ends = map(add, map(mul, offsets, map(_ITEM_BYTES, dtypes)), sizes)
        return all(map(ge, held, ends)) and are_disjoint(begins, sizes)

    def _look_at_all(self, values: Sequence[Any], depth: int) -> None:
        kinds = list(map(type, values))
        if _are_leaves(set(kinds)):
            self._look_at_leaves(values, kinds)
        elif kinds.count(dict) < len(kinds) or not self._look_at_rows(values):
            for value in values:
                self.look(value, depth + 1)

    def _look_at_leaves(self, values: Sequence[Any], kinds: Sequence[type]) -> None:
        """Look at values without parts, and at tensors."""
        if _MARKS.keys().isdisjoint(set(kinds)):
            self.facts.append(kinds)
            self._met += values
            return
        marks = list(map(_MARKS.get, kinds, kinds))
        self.facts.append(marks)
        marked = list(zip(marks, values, strict=True))
        self._met += [value for mark, value in marked if mark is not None and mark is not str]
        self.atoms += [value for mark, value in marked if mark is None]
        self.facts += [value for mark, value in marked if mark is str]

    def _look_at_rows(self, rows: Sequence[dict[Any, Any]]) -> bool:
        """Look at dicts that hold nothing with parts, as at one; return whether they are such, each met first."""
        values = list(chain.from_iterable(map(dict.values, rows)))
        kinds = list(map(type, values))
        if not _are_leaves(set(kinds)):
            return False
        count = len(self._numbers)
        numbers = dict(zip(map(id, rows), range(count, count + len(rows)), strict=True))
        if len(numbers) < len(rows) or not self._numbers.keys().isdisjoint(numbers):
            return False
        self._numbers |= numbers
        keys = list(chain.from_iterable(rows))
        self.facts.append((list(map(len, rows)), keys))
        self._check_keys(keys, rows)
        self._look_at_leaves(values, kinds)
        return True

    def _check_keys(self, keys: Iterable[object], held: Sequence[dict[Any, Any]]) -> None:
        # Keys of other types may be equal without being the same.
        is_plain = _KEYS.issuperset(map(type, keys)) and not any(map(contains, held, repeat(SPARSE_KEY)))
        self.is_known = self.is_known and is_plain

    def _look_within(self, container: object, values: Sequence[Any], depth: int) -> None:
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

    def _see(self) -> bool:
        """Note the facts of the tensors; return whether they tell all of each."""
        kinds = list(map(type, self.tensors))
        self.memories = self.tensors
        if not PLAIN_TYPES.issuperset(kinds):
            self._see_shards()
        memories = self.memories
        if not PLAIN_TYPES.issuperset(map(type, memories)):
            return False
        try:
            places = self._see_memories()
        except RuntimeError:
            # Tensors of several shapes in one, which are nested, have none, and sparse ones no memory of their own.
            return False
        if self.traits is None:
            return False
        self.facts += (kinds, *self.traits.columns, *places)
        self._places = places
        if any(map(_OWN_STATE, self.tensors)):
            # A parameter has attributes by chance, a buffer by its nature.
            held = zip(kinds, self.tensors, strict=True)
            self.facts.append([kind is torch.nn.Parameter or container_of(one) for kind, one in held])
        self.scalars = [self.tensors[place] for place in self.traits.numbers]
        return True

    def _see_memories(self) -> list[list[Any]]:
        """Note the traits of the memories, and return where they lie."""
        compared = None if self.traits is None else self.traits.compared(len(self.memories))
        if compared is not None:
            # What has no memory is not compared: it cannot be asked where it lies.
            *places, verdicts = facts_of(self.memories, (*_PLACES, compared))
            if all(verdicts):
                return places
        self.traits = Traits.of(self.memories)
        return facts_of(self.memories, _PLACES)

    def _see_shards(self) -> None:
        """Note how distributed tensors are divided."""
        divided = list(compress(self.tensors, are_distributed(self.tensors)))
        self.facts += (list(map(fact, divided)) for fact in (_DTYPE, _REQUIRES_GRAD, _SHAPE))
        self.facts.append(ways_of(divided))
        self.memories = memories_of(self.tensors)


def _are_leaves(kinds: set[type]) -> bool:
    """Return whether values of these types have no parts that are looked at one by one."""
    return all(kind in ATOMS or issubclass(kind, torch.Tensor) for kind in kinds)
