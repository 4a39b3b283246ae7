"""Augmentation: the same for a sample whoever loads it, and never at the expense of the streams of training."""

from __future__ import annotations

import random

import numpy
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from safepoint.data import ResumableLoader, sample_generator
from safepoint.errors import RequestError
from tests.data.datasets import Noisy, Numbers, as_list, flat, stream_states, take


def noisy(length: int = 12, batch: int = 2, **settings: object) -> ResumableLoader:
    return ResumableLoader(
        Noisy(length),
        batch,
        seed=3,
        collate_fn=as_list,
        **settings,  # type: ignore[arg-type]
    )


def epochs(loader: ResumableLoader, count: int = 2) -> list[object]:
    return [list(loader) for _ in range(count)]


@pytest.mark.parametrize("sample_streams", [True, False])
@pytest.mark.parametrize("num_workers", [1, 2, 3])
def test_any_number_of_workers_augments_each_sample_alike(num_workers: int, sample_streams: bool) -> None:
    alone = epochs(noisy(sample_streams=sample_streams))
    assert epochs(noisy(num_workers=num_workers, sample_streams=sample_streams)) == alone


@pytest.mark.parametrize("persistent_workers", [False, True])
def test_a_resumed_loader_augments_as_the_uninterrupted_one(persistent_workers: bool) -> None:
    settings = {"num_workers": 2, "persistent_workers": persistent_workers}
    reference = flat(epochs(noisy(**settings)))  # type: ignore[arg-type]
    loader = noisy(**settings)
    taken = [batch for batch, _ in zip(loader, range(4), strict=False)]
    again = noisy(**settings)
    again.load_state_dict(loader.state_dict())
    assert taken == reference[:4]
    # zip asked for one batch more than it kept.
    assert flat(epochs(again)) == reference[5:]


def test_another_batch_size_or_world_size_augments_each_sample_alike() -> None:
    whole = sorted(flat(next(iter([list(noisy(batch=4))]))))
    halves = [list(noisy(batch=1, rank=rank, world_size=2)) for rank in range(2)]
    assert sorted(flat(flat(halves))) == whole


def test_each_sample_and_each_epoch_has_its_own_noise() -> None:
    samples = flat(flat(epochs(noisy())))  # type: ignore[arg-type]
    for kind in range(1, 5):
        assert len({sample[kind] for sample in samples}) == 24
    assert len({value for sample in samples for value in sample[1:]}) == 24 * 4


def test_another_seed_gives_other_noise() -> None:
    one = {sample[0]: sample for sample in flat(noisy())}
    other = {sample[0]: sample for sample in flat(ResumableLoader(Noisy(12), 2, seed=4, collate_fn=as_list))}
    assert all(one[index][1:] != other[index][1:] for index in one)


@pytest.mark.parametrize("num_workers", [0, 2])
@pytest.mark.parametrize("sample_streams", [True, False])
def test_neither_an_iterator_nor_a_pass_moves_a_stream_of_training(num_workers: int, sample_streams: bool) -> None:
    random.gauss(0, 1), numpy.random.randn(1), torch.randn(3)
    before = stream_states()
    loader = noisy(num_workers=num_workers, sample_streams=sample_streams)
    live = iter(loader)
    assert stream_states() == before
    for _ in live:
        assert stream_states() == before
    state = loader.state_dict()
    loader.load_state_dict(state)
    list(loader)
    assert stream_states() == before


def test_streams_of_training_that_moved_between_batches_stay_moved() -> None:
    expected = torch.Generator().manual_seed(5)
    torch.manual_seed(5)
    drawn = [torch.rand(()).item() for _ in noisy()]
    assert drawn == [torch.rand((), generator=expected).item() for _ in range(6)]


def test_what_training_draws_does_not_change_the_noise() -> None:
    undisturbed = list(noisy())
    random.seed(1), numpy.random.seed(1), torch.manual_seed(1)
    assert list(noisy()) == undisturbed


class Failing(Numbers):
    def __getitem__(self, index: int, /) -> int:
        random.random(), numpy.random.rand(), torch.rand(())
        raise OSError("unreadable")


def test_a_sample_that_cannot_be_loaded_leaves_the_streams_of_training_as_they_were() -> None:
    before = stream_states()
    with pytest.raises(OSError, match="unreadable"):
        next(iter(ResumableLoader(Failing(4), 2, seed=1)))
    assert stream_states() == before
    with pytest.raises(RequestError):
        sample_generator()


def masked(samples: list[object]) -> list[float]:
    return [random.random(), float(numpy.random.rand()), torch.rand(()).item(), torch_rand_of_batch()]


def torch_rand_of_batch() -> float:
    return torch.rand((), generator=sample_generator()).item()


@pytest.mark.parametrize("sample_streams", [True, False])
def test_a_collation_that_draws_gives_the_same_in_a_worker_and_moves_nothing_here(sample_streams: bool) -> None:
    before = stream_states()
    here, there = (
        list(
            ResumableLoader(
                Numbers(6), 2, seed=1, collate_fn=masked, num_workers=workers, sample_streams=sample_streams
            )
        )
        for workers in (0, 2)
    )
    assert stream_states() == before
    assert here == there
    assert len({value for batch in here for value in batch}) == 12


class InBatches(Numbers):
    """Load whole batches at once, and say so."""

    def __getitems__(self, indices: list[int]) -> list[tuple[str, int, float]]:
        return [("many", index, random.random()) for index in indices]

    def __getitem__(self, index: int, /) -> tuple[str, int, float]:  # type: ignore[override]
        return ("one", index, random.random())


@pytest.mark.parametrize(("sample_streams", "way"), [(True, "one"), (False, "many")])
def test_whole_batches_are_asked_for_where_streams_are_per_batch(sample_streams: bool, way: str) -> None:
    def load(workers: int) -> list[tuple[str, int, float]]:
        return flat(
            ResumableLoader(
                InBatches(6), 2, seed=1, collate_fn=as_list, num_workers=workers, sample_streams=sample_streams
            )
        )

    assert {sample[0] for sample in load(0)} == {way}
    assert load(0) == load(2)


def test_the_generator_of_a_sample_goes_on_within_the_sample() -> None:
    class Twice(Numbers):
        def __getitem__(self, index: int, /) -> tuple[float, float]:  # type: ignore[override]
            first = torch.rand((), generator=sample_generator()).item()
            return first, torch.rand((), generator=sample_generator()).item()

    samples = flat(ResumableLoader(Twice(4), 2, seed=1, collate_fn=as_list))
    assert len({value for sample in samples for value in sample}) == 8


def test_there_is_no_generator_outside_a_sample() -> None:
    next(iter(noisy()))
    with pytest.raises(RequestError, match="no sample is being loaded"):
        sample_generator()


def test_per_sample_and_per_batch_streams_are_told_apart_by_the_state() -> None:
    differences = noisy(sample_streams=False).differences(noisy().state_dict())
    assert [(one.word, one.saved, one.current) for one in differences] == [("rng", "sample-1", "batch-1")]


@settings(max_examples=30)
@given(cut=st.integers(0, 13), seed=st.integers(0, 2**64 - 1))
def test_a_cut_anywhere_keeps_the_noise(cut: int, seed: int) -> None:
    def fresh() -> ResumableLoader:
        return ResumableLoader(Noisy(6), 1, seed=seed, collate_fn=first_and_noise)

    reference = flat(list(loader) for loader in [fresh()] for _ in range(3))
    loader = fresh()
    take(loader, cut)
    again = fresh()
    again.load_state_dict(loader.state_dict())
    assert flat(list(again) for _ in range(3))[: 18 - cut] == reference[cut:]


class Sample(int):
    """A number with noise, so that it can be taken for its id."""

    noise: tuple[float, ...] = ()

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Sample) and int(self) == int(other) and self.noise == other.noise

    def __hash__(self) -> int:
        return hash(int(self))


def first_and_noise(samples: list[tuple[int, float, float, float, float]]) -> list[Sample]:
    made = [Sample(sample[0]) for sample in samples]
    for one, sample in zip(made, samples, strict=True):
        one.noise = sample[1:]
    return made
