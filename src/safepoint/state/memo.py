"""The memo of a capture: what followed from a state's facts at the save before is used again while they are the same.

1. Nothing is taken for granted: each capture looks at all of the state again, and compares every fact.
2. What is kept refers to no live object, and so keeps no memory of the training from being freed. Values, versions and
   memory are read from what this look has met.
3. A state of unknown kind is drafted anew each time. Both ways give the same item, to the byte.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence

import msgspec
import torch

from safepoint.errors import InternalError
from safepoint.format.stencil import Stencil
from safepoint.state.boxes import LocalBox
from safepoint.state.draft import Draft, text_of
from safepoint.state.item import CapturedItem, CapturedTensor, TensorSpec
from safepoint.state.shards import boxes_of, captured, division_of, source_in
from safepoint.state.sight import Sight
from safepoint.state.tensors import TensorSource, is_distributed, version_of


class _Stretch(msgspec.Struct, frozen=True):
    """Name a one-dimensional view of a tensor's storage, counted in elements."""

    begin: int
    length: int


class _KeptTensor(msgspec.Struct, frozen=True):
    """Hold what is said of a stored tensor; `place` is that of its origin among the tensors of a look.

    `parts` are its boxes on this rank; where it is not distributed, there is one, without a place in local memory.
    """

    name: str
    where: str
    is_leaders: bool
    place: int
    stretch: _Stretch | None
    parts: tuple[tuple[TensorSpec, LocalBox | None], ...]


class _Kept(msgspec.Struct, frozen=True):
    facts: list[object]
    stencil: Stencil
    places: Sequence[int]
    tensors: list[_KeptTensor]
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
            text = text_of(kept.stencil, [sight.values[place] for place in kept.places])
            return CapturedItem(self._kind, text, _seen(kept.tensors, sight.tensors), kept.division, kept.leaders)
        return self._drafted(sight, draft(), is_divided_alone=is_divided_alone)

    def named(
        self, sight: Sight, draft: Callable[[], Draft], *, is_divided_alone: bool = True
    ) -> list[tuple[str, torch.Tensor]]:
        """Return the tensors that a capture would store, live ones or views of them, by name; see `captured`."""
        kept = self._kept_of(sight)
        if kept is not None:
            return [(one.name, _tensor_of(one, sight.tensors)) for one in kept.tensors]
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
            places = _places(made.values, sight.values, self._name)
            kept_tensors = _kept_tensors(made, item, sight, self._name)
            self._kept = _Kept(sight.facts, stencil, places, kept_tensors, division, made.entries)
        return item


def _seen(kept: Sequence[_KeptTensor], tensors: Sequence[torch.Tensor]) -> tuple[CapturedTensor, ...]:
    """Return what is kept of stored tensors, with their versions and memory as they are seen."""
    found = []
    for one in kept:
        tensor = _tensor_of(one, tensors)
        for spec, box in one.parts:
            if box is None:
                source = TensorSource(tensor, one.where, version_of(tensor))
            else:
                source = source_in(tensor, box, one.where)
            found.append(CapturedTensor(spec, source, one.is_leaders))
    return tuple(found)


def _tensor_of(kept: _KeptTensor, tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    tensor, stretch = tensors[kept.place], kept.stretch
    return tensor if stretch is None else tensor.detach().as_strided((stretch.length,), (1,), stretch.begin)


def _kept_tensors(made: Draft, item: CapturedItem, sight: Sight, path: str) -> list[_KeptTensor]:
    places = {id(tensor): place for place, tensor in enumerate(sight.tensors)}
    specs = (one.spec for one in item.tensors)
    found = []
    for origin, (name, tensor) in zip(made.origins, made.tensors, strict=True):
        where, stretch, is_leaders = f"{path}: {name}", None, name in made.leaders
        boxes: Sequence[LocalBox | None] = (None,)
        if is_distributed(tensor):
            boxes, is_leaders = boxes_of(tensor, where), False
        elif tensor is not origin:
            stretch = _Stretch(int(tensor.storage_offset()), tensor.numel())
        parts = tuple((next(specs), box) for box in boxes)
        found.append(_KeptTensor(name, where, is_leaders, places[id(origin)], stretch, parts))
    return found


def _places(drafted: Sequence[object], seen: Sequence[object], where: str) -> Sequence[int]:
    """Return which values of a look are those of a draft."""
    if len(drafted) == len(seen) and all(map(operator.is_, drafted, seen)):
        return range(len(seen))
    places = {id(value): place for place, value in enumerate(seen) if isinstance(value, torch.Tensor)}
    if not all(id(value) in places for value in drafted):
        raise InternalError("a draft holds a value that was not seen", where=where)
    return [places[id(value)] for value in drafted]
