"""Portions: tensors some at a time, so that the processor's cache holds them while one fact after the other is asked.

Asked of thousands of tensors, each fact would wait for their memory anew, which takes twice as long as the asking.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, TypeVar

Thing = TypeVar("Thing")

# Returns a fact of each of some tensors.
Asking = Callable[[Sequence[Any]], Iterable[Any]]

# What is known of so many tensors fits into a megabyte.
_PORTION = 256


def portions_of(things: Sequence[Thing]) -> Iterator[Sequence[Thing]]:
    """Yield some after the other; few of them as they are."""
    if len(things) <= _PORTION:
        yield things
        return
    for begin in range(0, len(things), _PORTION):
        yield things[begin : begin + _PORTION]


def facts_of(tensors: Sequence[Any], asked: Sequence[Asking]) -> list[list[Any]]:
    """Return facts of all tensors: a list of each fact."""
    columns: list[list[Any]] = [[] for _ in asked]
    for portion in portions_of(tensors):
        for column, ask in zip(columns, asked, strict=True):
            column += ask(portion)
    return columns
