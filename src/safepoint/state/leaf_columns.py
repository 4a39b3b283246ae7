"""Leaves of many plain tensors, made in columns: a call for each takes longer than all else that is done with it."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain, repeat
from operator import attrgetter
from typing import Any

import msgspec
import torch

from safepoint.format.leaves import OpenScalar, TensorLeaf
from safepoint.state.draft import NamedTensors
from safepoint.state.places import plain_names_within
from safepoint.state.portions import portions_of
from safepoint.state.tensors import dtype_name

_OWN_STATE, _LAYOUT, _DTYPE = attrgetter("__dict__"), attrgetter("layout"), attrgetter("dtype")
_IS_CPU, _REQUIRES_GRAD = attrgetter("is_cpu"), attrgetter("requires_grad")


class Rows(msgspec.Struct, frozen=True):
    """Hold what stands for dicts of tensors: `leaves`, and what these are read from, in the order of the dicts.

    `opened` are the tensors of one value, whose leaves are open; `named` are the others.
    """

    leaves: list[dict[str, object]]
    opened: list[torch.Tensor]
    named: NamedTensors


def tensor_leaves(tensors: Sequence[torch.Tensor], names: Sequence[str]) -> list[TensorLeaf] | None:
    """Return the leaf of each tensor under its name; None where one is a number, or not plain host memory."""
    flags: list[bool] = []
    for portion in portions_of(tensors):
        if not _are_plain(portion) or not all(map(torch.Tensor.dim, portion)):
            return None
        flags += map(_REQUIRES_GRAD, portion)
    return list(map(TensorLeaf, names, repeat("tensor"), repeat("cpu"), flags))


def rows_of(held: Sequence[dict[str, Any]], names: Sequence[str], *, first: int) -> Rows | None:
    """Return what stands for dicts of equal keys that hold plain tensors, under each key numbers or none; else None.

    Args:
        held: The dicts.
        names: What each is called.
        first: The number of the first open leaf.
    """
    keys = list(held[0])
    if set(map(type, keys)) != {str} or not all(map(keys.__eq__, map(list, held))):
        return None
    columns: list[tuple[Any, ...]] = list(zip(*map(dict.values, held), strict=True))
    if not all(map(_are_plain, columns)):
        return None
    opened = [column for column in columns if not column[0].dim()]
    numbers = iter([range(first + place, first + len(opened) * len(held), len(opened)) for place in range(len(opened))])
    leaves: list[Sequence[object] | None] = []
    named: list[list[tuple[str, torch.Tensor]]] = []
    for key, column in zip(keys, columns, strict=True):
        within = plain_names_within(names, key)
        if within is None:
            return None
        if column[0].dim():
            leaves.append(tensor_leaves(column, within))
            named.append(list(zip(within, column, strict=True)))
        else:
            leaves.append(_open_scalars(column, next(numbers)))
    known = [column for column in leaves if column is not None]
    if len(known) < len(keys):
        return None
    return Rows(
        [dict(zip(keys, row, strict=True)) for row in zip(*known, strict=True)],
        list(chain.from_iterable(zip(*opened, strict=True))),
        list(chain.from_iterable(zip(*named, strict=True))),
    )


def _open_scalars(tensors: Sequence[torch.Tensor], numbers: Sequence[int]) -> list[OpenScalar] | None:
    if any(map(torch.Tensor.dim, tensors)):
        return None
    dtypes, flags = map(dtype_name, map(_DTYPE, tensors)), map(_REQUIRES_GRAD, tensors)
    return list(map(OpenScalar, numbers, dtypes, repeat("tensor"), repeat("cpu"), flags))


def _are_plain(tensors: Sequence[Any]) -> bool:
    """Return whether all are tensors and nothing besides, strided ones in host memory."""
    if set(map(type, tensors)) != {torch.Tensor} or any(map(_OWN_STATE, tensors)):
        return False
    return set(map(_LAYOUT, tensors)) == {torch.strided} and all(map(_IS_CPU, tensors))
