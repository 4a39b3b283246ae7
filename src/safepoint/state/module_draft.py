"""The draft of a module: an entry for each of its tensors, extra state, and the modules in another mode than the root.

Tensors that are nothing but dense host memory, as nearly all are, are described in columns: a call for each takes
longer than all else that is done with it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import chain, compress, repeat
from operator import attrgetter
from typing import Any

import torch

from safepoint.format.plain import ScalarLeaf, TensorLeaf
from safepoint.state.draft import Draft, NamedTensors, Values, container_of
from safepoint.state.module_tree import EXTRA_STATE
from safepoint.state.names import Slot
from safepoint.state.parts import describe
from safepoint.state.places import plain_names_below, segment
from safepoint.state.tensors import are_plainly_storable
from safepoint.state.ties import tied
from safepoint.state.tree import flatten

_ENTRY = ("kind", "persistent", "requires_grad", "value", "ties")
_NAME, _KIND, _IS_PERSISTENT = map(attrgetter, ("name", "kind", "is_persistent"))
_REQUIRES_GRAD = attrgetter("requires_grad")


def draft_module(
    item: str, slots: Sequence[Slot], *, extra: Mapping[str, Any], deviating: Sequence[str], handed_out: set[int]
) -> Draft:
    """Return the draft of a module.

    Args:
        item: The item's name, for messages.
        slots: Those of all parameters and buffers.
        extra: The extra states, by the paths of their modules.
        deviating: The paths of the modules that are in another mode than the root.
        handed_out: The ids of buffers that may differ between ranks.

    Raises:
        RequestError: A tensor or an extra state has no exact stored form; names the path.
    """
    values = Values()
    groups = tied(slots)
    firsts = [group[0] for group in groups]
    names, held = list(map(_NAME, firsts)), [slot.tensor for slot in firsts if slot.tensor is not None]
    describe_all = _described_at_once if are_plainly_storable(held) else _described
    told, named = describe_all(item, names, held, values)
    ties = [[slot.name for slot in group[1:]] for group in groups]
    rows = zip(map(_KIND, firsts), map(_IS_PERSISTENT, firsts), map(_REQUIRES_GRAD, held), told, ties, strict=True)
    entries = {name: dict(zip(_ENTRY, row, strict=True)) for name, row in zip(names, rows, strict=True)}
    of_leader = [bool(handed_out) and any(id(slot.tensor) in handed_out for slot in group) for group in groups]
    leaders = frozenset(name for name, _ in chain.from_iterable(compress(named, of_leader)))
    plain_extra, of_extra = flatten(dict(extra), path=f"{item}.get_extra_state()", prefix=EXTRA_STATE)
    tensors = [*chain.from_iterable(named), *of_extra]
    plain = {"entries": entries, "extra": plain_extra, "training": list(deviating)}
    origins = [tensor for _, tensor in tensors]
    return Draft(plain, values.found, tensors, origins, leaders, frozenset(compress(names, of_leader)))


def _described(
    item: str, names: Sequence[str], held: Sequence[torch.Tensor], values: Values
) -> tuple[list[object], list[NamedTensors]]:
    """Return what is said of each tensor, and the tensors that are stored for it."""
    told: list[object] = []
    named: list[NamedTensors] = []
    for name, tensor in zip(names, held, strict=True):
        value, parts = describe(tensor, segment(name), f"{item}.{name}")
        told.append(values.leave_scalar_open(tensor, value.container) if isinstance(value, ScalarLeaf) else value)
        named.append(parts)
    return told, named


def _described_at_once(
    item: str, names: Sequence[str], held: Sequence[torch.Tensor], values: Values
) -> tuple[list[object], list[NamedTensors]]:
    """Return the same of tensors that are `are_plainly_storable`."""
    segments = plain_names_below("", names) or list(map(segment, names))
    containers = list(map(container_of, held))
    told: list[object] = list(map(TensorLeaf, segments, containers, repeat("cpu"), map(_REQUIRES_GRAD, held)))
    named: list[NamedTensors] = [[one] for one in zip(segments, held, strict=True)]
    for place, tensor in enumerate(held):
        if not tensor.dim():
            told[place], named[place] = values.leave_scalar_open(tensor, containers[place]), []
    return told, named
