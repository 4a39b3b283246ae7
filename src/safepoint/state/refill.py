"""Restored states of an optimizer's parameters, put back into its live state: all at once where they are plain.

A plain state is a dict of whole tensors and of numbers, as nearly all are. It is looked at in columns: a call for each
tensor would take longer than all that is set. Both ways leave the same objects with the same values, in the same order.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, compress, islice, repeat
from operator import attrgetter, is_, not_
from typing import Any

import torch

from safepoint.format.plain import ScalarLeaf, TensorLeaf
from safepoint.state.merging import merge_state
from safepoint.state.numbers import are_plain_numbers, scalar_tensor
from safepoint.state.rebuild import SPARSE_KEY
from safepoint.state.tensors import PLAIN_TYPES

_LEAVES = frozenset({TensorLeaf, ScalarLeaf})
_NAME, _CONTAINER, _DEVICE, _REQUIRES_GRAD = map(attrgetter, ("name", "container", "device", "requires_grad"))
_DTYPE, _IS_CPU = attrgetter("dtype"), attrgetter("is_cpu")


@dataclass(frozen=True, slots=True)
class PlainStates:
    """Hold plain states, one after the other: how many keys each has, then the keys and values of all.

    Numbers that are equal stand there as one tensor, which is handed to nobody.
    """

    lengths: list[int]
    keys: list[str]
    values: list[torch.Tensor]
    are_numbers: list[bool]

    def made(self) -> list[dict[str, torch.Tensor]]:
        """Return each state as a new dict, its numbers as new tensors."""
        told = zip(self.values, self.are_numbers, strict=True)
        values = [value.clone() if is_number else value for value, is_number in told]
        pairs = iter(zip(self.keys, values, strict=True))
        return [dict(islice(pairs, length)) for length in self.lengths]

    def suit_kernels(self, parameters: Sequence[torch.Tensor]) -> bool:
        """Return whether each ``step`` is where fused and capturable kernels read it, if these are the parameters.

        See `safepoint.state.merging.set_step`; where it is not certain, no.
        """
        steps = [value for key, value in zip(self.keys, self.values, strict=True) if key == "step"]
        return all(map(_IS_CPU, chain(steps, parameters))) and {torch.float32}.issuperset(map(_DTYPE, steps))

    def fill(self, held: Sequence[Any]) -> bool:
        """Set the numbers of live states that hold the other tensors already; return whether they are such states.

        Args:
            held: Live states no part of which stands in a second place.
        """
        if set(map(type, held)) != {dict} or list(map(len, held)) != self.lengths:
            return False
        if list(chain.from_iterable(held)) != self.keys:
            return False
        values: list[Any] = list(chain.from_iterable(map(dict.values, held)))
        are_tensors = list(map(not_, self.are_numbers))
        if not all(map(is_, compress(values, are_tensors), compress(self.values, are_tensors))):
            return False
        live, numbers = (list(compress(column, self.are_numbers)) for column in (values, self.values))
        if not are_plain_numbers(live) or list(map(_DTYPE, live)) != list(map(_DTYPE, numbers)):
            return False
        if live:
            torch._foreach_copy_(live, numbers)
        return True


def plain_states(
    trees: Mapping[str, Any],
    tensors: Mapping[str, torch.Tensor],
    kinds: Mapping[str, str],
    named: Mapping[str, torch.Tensor],
) -> PlainStates | None:
    """Return the states that stored trees stand for; None if one of them is not plain, or not known to be.

    Args:
        trees: The trees, by the names of the parameters.
        tensors: The restored tensors, by their own names.
        kinds: On which kind of device each parameter was.
        named: The parameters that there are.
    """
    stored: list[Any] = list(trees.values())
    parameters: list[Any] = list(map(named.get, trees))
    if set(map(type, stored)) != {dict} or not PLAIN_TYPES.issuperset(map(type, parameters)):
        return None
    keys: list[Any] = list(chain.from_iterable(stored))
    leaves: list[Any] = list(chain.from_iterable(map(dict.values, stored)))
    if set(map(type, keys)) != {str} or SPARSE_KEY in keys or not _LEAVES.issuperset(map(type, leaves)):
        return None
    if set(map(_CONTAINER, leaves)) != {"tensor"} or any(map(_REQUIRES_GRAD, leaves)):
        return None
    are_numbers = list(map(is_, map(type, leaves), repeat(ScalarLeaf)))
    follow = "cpu" in map(kinds.get, trees) and not all(map(_IS_CPU, parameters))
    if follow or set(map(_DEVICE, compress(leaves, are_numbers))) - {"cpu"}:
        # Numbers that lay with their parameters go where these are.
        return None
    values = _values_of(leaves, are_numbers, tensors)
    return None if values is None else PlainStates(list(map(len, stored)), keys, values, are_numbers)


def put_states(
    live: dict[Any, Any],
    parameters: Sequence[torch.Tensor],
    states: PlainStates | Sequence[Any],
    *,
    further: Mapping[Any, Any],
) -> None:
    """Let an optimizer hold the states of these parameters, in this order, then further ones, and nothing else.

    What fits is put into what is held already; see `merge_state`.
    """
    # Asking a tensor for its hash takes longer than all else here.
    is_in_order = list(map(id, live)) == list(map(id, parameters))
    held = list(live.values() if is_in_order else map(live.get, parameters))
    several = _several(live.values())
    is_filled = not several and isinstance(states, PlainStates) and states.fill(held)
    if is_filled and is_in_order and not further:
        return
    if not is_filled:
        made = states.made() if isinstance(states, PlainStates) else states
        held = list(map(merge_state, held, made, repeat(several | _several(made))))
    live.clear()
    live.update(zip(parameters, held, strict=True))
    live.update(further)


def _values_of(
    leaves: Sequence[Any], are_numbers: Sequence[bool], tensors: Mapping[str, torch.Tensor]
) -> list[torch.Tensor] | None:
    """Return what leaves stand for; None where a tensor is not there, or would not stand as it is."""
    named: list[Any] = list(map(tensors.get, map(_NAME, compress(leaves, map(not_, are_numbers)))))
    if type(None) in set(map(type, named)) or not all(map(torch.Tensor.dim, named)) or any(map(_REQUIRES_GRAD, named)):
        return None
    forms = [(leaf.dtype, leaf.data) for leaf in compress(leaves, are_numbers)]
    # Nearly all are counts of steps, and equal.
    numbers = {form: scalar_tensor(*form) for form in set(forms)}
    tensor, number = iter(named), iter(forms)
    return [numbers[next(number)] if is_number else next(tensor) for is_number in are_numbers]


def _several(values: Iterable[Any]) -> set[int]:
    """Return the ids of states, and of what is in them, that stand in several places."""
    states = list(values)
    dicts = [one for one in states if isinstance(one, dict)]
    found = [*map(id, states), *map(id, chain.from_iterable(map(dict.values, dicts)))]
    if len(set(found)) == len(found):
        return set()
    return {key for key, count in Counter(found).items() if count > 1}
