"""Random streams for augmentation that depend on the sample, not on the worker that happens to load it.

Invariants:

1. Around each sample the global streams of python, numpy and torch (CPU) are seeded from (seed, epoch, position in the
   order); around the collation of a batch from (seed, epoch, position of its first sample). Whatever draws from them
   gives the same numbers with any number of workers, and after a resume.
2. In the training process they are put back after each batch: loading moves no stream that training draws from.

This file is the one place of the package that touches python's `random`. It draws nothing from it.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import numpy
import torch
from torch.utils.data import get_worker_info

from safepoint.data.dataset import MapDataset
from safepoint.data.order import derive
from safepoint.data.position import Batch
from safepoint.errors import RequestError

PER_SAMPLE = "sample-1"
PER_BATCH = "batch-1"

_SAMPLE, _COLLATE, _BATCH, _OWN_GENERATOR = range(4)


def sample_generator() -> torch.Generator:
    """Return the generator of the sample that is being loaded, the same object until the next sample.

    For augmentation that does not use the global streams. To be called inside `dataset[i]`; inside `collate_fn` and
    ``__getitems__`` it is the generator of the batch.

    Raises:
        RequestError: No sample of a `ResumableLoader` is being loaded.
    """
    stream = _CURRENT.get()
    if stream is None:
        raise RequestError(
            "no sample is being loaded, so there is no generator of a sample",
            where="sample_generator()",
            remedy="Call it inside the data set's __getitem__, with the data set in a ResumableLoader.",
        )
    return stream.generator()


class Fetch:
    """Load batches as the data set of a torch `DataLoader`, under streams of their own.

    torch's fetcher calls ``__getitems__`` with whatever its batch sampler yields, in the worker. The batch is collated
    in here too, so that a collation that draws random numbers (such as token masking) is covered.
    """

    def __init__(
        self, dataset: MapDataset, collate: Callable[[list[Any]], object], *, seed: int, per_sample: bool
    ) -> None:
        self._dataset = dataset
        self._collate = collate
        self._seed = seed
        self._per_sample = per_sample

    def __getitems__(self, batch: Batch) -> object:
        if get_worker_info() is not None:
            return self._load(batch)
        before = _read_streams()
        try:
            return self._load(batch)
        finally:
            _put_back(before)

    def _load(self, batch: Batch) -> object:
        token = _CURRENT.set(None)
        try:
            if self._per_sample:
                samples = self._load_each(batch)
                self._enter(_COLLATE, batch.epoch, batch.start)
                return self._collate(samples)
            self._enter(_BATCH, batch.epoch, batch.start)
            many = getattr(self._dataset, "__getitems__", None)
            return self._collate(many(batch.indices) if many else [self._dataset[index] for index in batch.indices])
        finally:
            _CURRENT.reset(token)

    def _load_each(self, batch: Batch) -> list[object]:
        samples = []
        for position, index in enumerate(batch.indices, batch.start):
            self._enter(_SAMPLE, batch.epoch, position)
            samples.append(self._dataset[index])
        return samples

    def _enter(self, purpose: int, epoch: int, position: int) -> None:
        _seed_streams(derive(self._seed, epoch, position, purpose))
        _CURRENT.set(_Stream(derive(self._seed, epoch, position, purpose, _OWN_GENERATOR)))


def as_loaded(batch: object) -> object:
    """Return a batch that `Fetch` has collated already; stands where torch's loader collates."""
    return batch


class _Stream:
    """Make the generator of one sample when it is first asked for: most samples never ask."""

    __slots__ = ("_generator", "_seed")

    def __init__(self, seed: int) -> None:
        self._seed = seed
        self._generator: torch.Generator | None = None

    def generator(self) -> torch.Generator:
        if self._generator is None:
            self._generator = torch.Generator().manual_seed(self._seed)
        return self._generator


# The data set's own code asks for the generator with no argument that could carry it; a context variable keeps the
# answer apart for each thread.
_CURRENT: ContextVar[_Stream | None] = ContextVar("safepoint_sample", default=None)


@dataclass(frozen=True, slots=True)
class _StreamStates:
    python: Any  # opaque tuples of the libraries, only handed back to them
    numpy: Any
    torch: torch.Tensor


def _read_streams() -> _StreamStates:
    return _StreamStates(random.getstate(), numpy.random.get_state(), torch.default_generator.get_state())


def _put_back(states: _StreamStates) -> None:
    random.setstate(states.python)
    numpy.random.set_state(states.numpy)
    torch.default_generator.set_state(states.torch)


def _seed_streams(number: int) -> None:
    random.seed(number)
    # numpy takes more than 32 bits only as a list, and then takes longer than the two others together.
    numpy.random.seed(number >> 32)
    # Not torch.manual_seed: it seeds every accelerator too, which training draws from.
    torch.default_generator.manual_seed(number)
