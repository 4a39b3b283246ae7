"""Data sets that show which sample was loaded, and under which random streams."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterable, Iterator
from typing import TypeVar

import numpy
import torch
from torch.utils.data import IterableDataset

from safepoint.data import GlobalOrder, ResumableLoader, sample_generator

T = TypeVar("T")


class Numbers:
    """Sample i is i."""

    def __init__(self, length: int) -> None:
        self.length = length

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int, /) -> int:
        return index


class Noisy(Numbers):
    """Sample i is i and what each kind of stream gives for it."""

    def __getitem__(self, index: int, /) -> tuple[int, float, float, float, float]:  # type: ignore[override]
        noise = torch.rand((), generator=sample_generator()).item()
        return index, random.random(), float(numpy.random.rand()), torch.rand(()).item(), noise


class BrokenOnce(Numbers):
    """Sample `broken` cannot be loaded as long as a file is absent."""

    def __init__(self, length: int, broken: int, mended: str) -> None:
        super().__init__(length)
        self.broken = broken
        self.mended = mended

    def __getitem__(self, index: int, /) -> int:
        if index == self.broken:
            with open(self.mended) as file:
                file.read()
        return index


class Endless(IterableDataset):  # type: ignore[type-arg]
    def __iter__(self) -> Iterator[int]:
        return iter(range(100))


def as_list(samples: list[object]) -> list[object]:
    """Collate nothing: a batch is the list of its samples."""
    return list(samples)


def flat(parts: Iterable[list[T]]) -> list[T]:
    """Return the elements of several lists as one list."""
    return list(itertools.chain.from_iterable(parts))


def epoch_of(length: int, batch: int, *, seed: int, epoch: int, drop_last: bool = False) -> list[list[int]]:
    """Return the batches of one whole epoch on one rank, cut from the order by plain slices."""
    order = list(GlobalOrder(length, seed=seed, epoch=epoch))
    batches = [order[start : start + batch] for start in range(0, length, batch)]
    return [one for one in batches if len(one) == batch or not drop_last]


def run(loader: ResumableLoader, passes: int) -> list[list[list[int]]]:
    """Return the ids of every batch of some passes, grouped by pass."""
    return [[ids(batch) for batch in loader] for _ in range(passes)]


def take(loader: ResumableLoader, batches: int, *, commit: bool = False) -> list[list[int]]:
    """Take exactly that many batches, over as many epochs as need be, and leave the last `for` by a break."""
    taken: list[list[int]] = []
    while len(taken) < batches:
        for batch in loader:
            taken.append(ids(batch))
            if commit:
                loader.commit()
            if len(taken) == batches:
                break
    return taken


def ids(batch: Iterable[object]) -> list[int]:
    return [int(sample) for sample in batch]  # type: ignore[call-overload]


def stream_states() -> list[object]:
    """Return the state of each global stream, comparable with ==."""
    name, keys, *rest = numpy.random.get_state()
    return [random.getstate(), (name, keys.tolist(), rest), torch.get_rng_state().tolist()]
