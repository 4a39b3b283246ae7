"""Traits: what a tensor is besides its place in memory, of many tensors at once, and whether it is still the same.

torch compares all of it in one call, for code that it has compiled: type, dtype, device, shape, strides, flag, and what
kind of view it is. To ask for each and to compare the answers takes seven times as long. That comparison is no promise
of torch's, so it is used only where it is seen to notice each difference; elsewhere everything is asked for.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from operator import attrgetter
from typing import Any, cast

import msgspec
import torch

from safepoint.state.portions import Asking, facts_of, portions_of

_IS_NESTED = attrgetter("is_nested")
_IS_COMPLEX = attrgetter("is_complex")
_STRIDED = frozenset({torch.strided})
_ASKED: tuple[Asking, ...] = (
    partial(map, attrgetter("layout")),
    partial(map, attrgetter("shape")),
    partial(map, attrgetter("dtype")),
    partial(map, attrgetter("device")),
    partial(map, attrgetter("requires_grad")),
    partial(map, torch.Tensor.stride),
    partial(map, torch.Tensor.is_neg),
)
# Whether some tensors, given each as an argument, are like those that it was made with.
_Comparison = Callable[..., bool]


class Traits(msgspec.Struct, frozen=True):
    """Hold the traits of strided tensors, none of them twice, in columns that are comparable.

    `numbers` are the places of those without axes.
    """

    columns: list[object]
    numbers: list[int]
    count: int
    comparisons: list[_Comparison]

    @classmethod
    def of(cls, tensors: Sequence[torch.Tensor]) -> Traits | None:
        """Return the traits of tensors of torch's own types; None where one has some that are not told by them.

        Raises:
            RuntimeError: A tensor cannot be asked: it is nested.
        """
        layouts, shapes, dtypes, *others = facts_of(tensors, _ASKED)
        if not _STRIDED.issuperset(layouts):
            return None
        columns: list[object] = [shapes, dtypes, *others]
        if any(map(_IS_COMPLEX, set(dtypes))):
            columns.append(list(map(torch.Tensor.is_conj, tensors)))
        numbers = [place for place, shape in enumerate(shapes) if not shape]
        guards = _guards()
        made = [] if guards is None else [_comparison(guards, portion) for portion in portions_of(tensors)]
        return cls(columns, numbers, len(tensors), made)

    @property
    def dtypes(self) -> list[torch.dtype]:
        """Return the dtype of each."""
        return cast(list[torch.dtype], self.columns[1])

    @property
    def are_near(self) -> bool:
        """Return whether all are in host memory."""
        devices = cast(list[torch.device], self.columns[2])
        return {device.type for device in set(devices)} <= {"cpu"}

    def compared(self, count: int) -> Asking | None:
        """Return what tells of so many tensors, portion after portion, whether they have these very traits.

        None where that cannot be told without asking for them. Only tensors that have memory may be compared: torch
        ends the process where one has neither shape nor strides.
        """
        if count != self.count or not self.comparisons:
            return None
        following = iter(self.comparisons)

        def compare(portion: Sequence[torch.Tensor]) -> tuple[bool]:
            is_like = next(following)
            return (not any(map(_IS_NESTED, portion)) and is_like(*portion),)

        return compare


def _comparison(guards: Any, tensors: Sequence[torch.Tensor]) -> _Comparison:
    made: _Comparison = guards(*tensors, dynamic_dims_sizes=None, dynamic_dims_strides=None).check
    return made


@functools.cache
def _guards() -> Any:
    """Return torch's way to make comparisons; None where this torch has none that notices each difference."""
    try:
        from torch._C._dynamo.guards import TensorGuards

        for dtype in (torch.float32, torch.complex64):
            tensor = torch.ones(2, 1, dtype=dtype, device="cpu")
            compare = _comparison(TensorGuards, (tensor,))
            if compare(tensor) is not True or any(map(compare, _unlike(tensor))):
                return None
    except (ImportError, AttributeError, TypeError, ValueError, RuntimeError, SystemError):
        # What torch keeps to itself may change in whatever way.
        return None
    return TensorGuards


def _unlike(tensor: torch.Tensor) -> Iterator[torch.Tensor]:
    """Yield tensors each of which differs in one trait."""
    yield torch.nn.Parameter(tensor, requires_grad=False)
    yield tensor.detach().requires_grad_()
    yield tensor.to(torch.complex128 if tensor.is_complex() else torch.float64)
    yield tensor.to("meta")
    yield tensor.conj() if tensor.is_complex() else tensor.to(torch.int32)
    yield tensor._neg_view()
    yield tensor.reshape(2)
    yield tensor.reshape(1, 2)
    yield tensor.expand(2, 2)
    yield tensor.as_strided((2, 1), (1, 2))
    yield tensor.as_strided((2, 1), (0, 1))
