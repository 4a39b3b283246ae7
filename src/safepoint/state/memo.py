"""The memo of a capture: what followed from a state's facts at the save before is used again while they are the same.

1. Nothing is taken for granted: each capture looks at all of the state again, and compares every fact.
2. What is kept refers to no live object, and so keeps no memory of the training from being freed. Values, versions and
   memory are read from what this look has met.
3. A state of unknown kind is drafted anew each time. Both ways give the same item, to the byte.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import repeat
from operator import attrgetter, is_, itemgetter

import msgspec
import torch

from safepoint.errors import InternalError
from safepoint.format.plain import Path
from safepoint.format.stencil import Stencil, encode_text
from safepoint.state.boxes import LocalBox
from safepoint.state.draft import Draft, text_of, texts_of
from safepoint.state.item import CapturedItem, CapturedTensor, TensorSpec
from safepoint.state.memory import all_writes_of, are_direct, versions_of
from safepoint.state.shards import boxes_of, captured, division_of, view_of
from safepoint.state.sight import Sight
from safepoint.state.tensors import TensorSource, are_distributed, is_distributed
from safepoint.state.traits import Traits

_NAME, _TENSOR = itemgetter(0), itemgetter(1)
_PLACE, _PART = itemgetter(1), itemgetter(2)
_SPEC, _WHERE, _IS_LEADERS = attrgetter("spec"), attrgetter("source.name"), attrgetter("is_leaders")


class _Stretch(msgspec.Struct, frozen=True):
    """Name a one-dimensional view of a tensor's storage, counted in elements."""

    begin: int
    length: int


class _KeptTensors(msgspec.Struct, frozen=True):
    """Hold in columns what is said of stored boxes; `places` are those of their tensors among the ones of a look.

    `views` tell, by the number of a box, which part of its tensor's memory it is, where it is not all of it.
    `are_direct` is whether each box is all of it, and that is host memory which holds it as it is stored.
    """

    specs: list[TensorSpec]
    wheres: list[str]
    is_leaders: list[bool]
    places: list[int]
    views: dict[int, _Stretch | LocalBox]
    are_direct: bool = False


class _Kept(msgspec.Struct, frozen=True):
    """Hold what followed from facts; `places` are those of the open values among the ones of a look.

    `paths` are those of the atoms, for messages; `names` are those of the stored tensors, each with its place and its
    part as in `_KeptTensors`.
    """

    facts: list[object]
    traits: Traits | None
    stencil: Stencil
    places: list[int]
    paths: list[Path]
    tensors: _KeptTensors
    names: list[tuple[str, int, _Stretch | None]]
    division: str
    leaders: frozenset[str]


class Memo:
    """Capture one item, again and again.

    Args:
        name: The item's name.
        kind: Its type.
    """

    def __init__(self, name: str, kind: str) -> None:
        self._name, self._kind = name, kind
        self._kept: _Kept | None = None

    @property
    def traits(self) -> Traits | None:
        """Return those of the tensors that were seen the time before, for the next look."""
        return None if self._kept is None else self._kept.traits

    def captured(self, sight: Sight, draft: Callable[[], Draft], *, is_divided_alone: bool = True) -> CapturedItem:
        """Return the item.

        Args:
            sight: What is seen of the state now.
            draft: Makes the draft of the same state, from nothing but what is among the facts.
            is_divided_alone: Whether the item says itself how its distributed tensors are divided.

        Raises:
            RequestError: A value cannot be stored; named by its path.
        """
        kept = self._kept_of(sight)
        if kept is not None:
            atoms = [encode_text(one, path=path) for one, path in zip(sight.atoms, kept.paths, strict=True)]
            texts = atoms + texts_of(sight.scalars)
            text = kept.stencil.fill([texts[place] for place in kept.places])
            return CapturedItem(self._kind, text, _seen(kept.tensors, sight), kept.division, kept.leaders)
        return self._drafted(sight, draft(), is_divided_alone=is_divided_alone)

    def named(
        self, sight: Sight, draft: Callable[[], Draft], *, is_divided_alone: bool = True
    ) -> list[tuple[str, torch.Tensor]]:
        """Return the tensors that a capture would store, live ones or views of them, by name; see `captured`."""
        kept = self._kept_of(sight)
        if kept is not None:
            tensors = sight.tensors
            return [
                (name, tensors[place] if part is None else _part_of(tensors[place], part))
                for name, place, part in kept.names
            ]
        made = draft()
        self._drafted(sight, made, is_divided_alone=is_divided_alone)
        return made.tensors

    def _kept_of(self, sight: Sight) -> _Kept | None:
        """Return what is kept, if it follows from what is seen."""
        kept = self._kept
        return kept if kept is not None and sight.is_known and kept.facts == sight.facts else None

    def _drafted(self, sight: Sight, made: Draft, *, is_divided_alone: bool) -> CapturedItem:
        """Return the item of a draft, and keep what follows from the facts."""
        self._kept = None
        stencil = Stencil.cut(made.plain, path=self._name)
        tensors = captured(made.tensors, self._name, leaders=made.leaders)
        division = division_of(made.tensors) if is_divided_alone else ""
        item = CapturedItem(self._kind, text_of(stencil, made.values), tensors, division, made.entries)
        if sight.is_known:
            places, names = _places(made.values, sight, self._name), _names(made, sight)
            tensors_kept = _kept_tensors(names, item, sight, self._name)
            paths = [path for place, path in zip(places, stencil.paths, strict=True) if place < len(sight.atoms)]
            self._kept = _Kept(
                sight.facts, sight.traits, stencil, places, paths, tensors_kept, names, division, made.entries
            )
        return item


def _seen(kept: _KeptTensors, sight: Sight) -> tuple[CapturedTensor, ...]:
    """Return what is kept of stored tensors, with their versions and memory as they are seen."""
    memories = list(map(sight.memories.__getitem__, kept.places))
    addresses = map(sight.addresses.__getitem__, kept.places) if kept.are_direct else repeat(None)
    for number, part in kept.views.items():
        memories[number] = _part_of(memories[number], part)
    if sight.memories is sight.tensors:
        sources = map(TensorSource, memories, kept.wheres, versions_of(memories), repeat(None), addresses)
    else:
        tensors = [sight.tensors[place] for place in kept.places]
        told = zip(tensors, are_distributed(tensors), strict=True)
        counters = [one if is_divided else None for one, is_divided in told]
        sources = map(TensorSource, memories, kept.wheres, all_writes_of(memories, counters), counters, addresses)
    return tuple(map(CapturedTensor, kept.specs, sources, kept.is_leaders))


def _part_of(memory: torch.Tensor, part: _Stretch | LocalBox) -> torch.Tensor:
    if isinstance(part, LocalBox):
        return view_of(memory.detach(), part)
    return memory.detach().as_strided((part.length,), (1,), part.begin)


def _names(made: Draft, sight: Sight) -> list[tuple[str, int, _Stretch | None]]:
    """Return the name of each stored tensor, the place of its origin among those of a look, and its part of it."""
    places = dict(zip(map(id, sight.tensors), range(len(sight.tensors)), strict=True))
    if all(map(is_, made.origins, map(_TENSOR, made.tensors))):
        return list(zip(map(_NAME, made.tensors), map(places.__getitem__, map(id, made.origins)), repeat(None)))
    return [
        (name, places[id(origin)], None if tensor is origin else _Stretch(int(tensor.storage_offset()), tensor.numel()))
        for origin, (name, tensor) in zip(made.origins, made.tensors, strict=True)
    ]


def _kept_tensors(
    names: Sequence[tuple[str, int, _Stretch | None]], item: CapturedItem, sight: Sight, path: str
) -> _KeptTensors:
    if sight.memories is sight.tensors and set(map(_PART, names)) == {None}:
        specs, wheres = list(map(_SPEC, item.tensors)), list(map(_WHERE, item.tensors))
        leaders, places = list(map(_IS_LEADERS, item.tensors)), list(map(_PLACE, names))
        return _KeptTensors(specs, wheres, leaders, places, {}, are_direct(sight.memories))
    kept = _KeptTensors([], [], [], [], {})
    found = iter(item.tensors)
    for name, place, part in names:
        where, tensor = f"{path}: {name}", sight.tensors[place]
        parts: Sequence[_Stretch | LocalBox | None] = (part,)
        if is_distributed(tensor):
            shape = tuple(sight.memories[place].shape)
            parts = [None if box.shape == shape else box for box in boxes_of(tensor, where)]
        for one in parts:
            box = next(found)
            if one is not None:
                kept.views[len(kept.places)] = one
            kept.specs.append(box.spec)
            kept.wheres.append(where)
            kept.is_leaders.append(box.is_leaders)
            kept.places.append(place)
    return kept


def _places(drafted: Sequence[object], sight: Sight, where: str) -> list[int]:
    """Return which values of a look, its atoms and then its scalars, are those of a draft."""
    scalars = {id(one): place for place, one in enumerate(sight.scalars, len(sight.atoms))}
    atoms = iter(enumerate(sight.atoms))
    places = []
    for value in drafted:
        if isinstance(value, torch.Tensor):
            place, is_seen = scalars.get(id(value), -1), id(value) in scalars
        else:
            place, atom = next(atoms, (-1, None))
            is_seen = place >= 0 and atom is value
        if not is_seen:
            raise InternalError("a draft holds a value that was not seen", where=where)
        places.append(place)
    return places
