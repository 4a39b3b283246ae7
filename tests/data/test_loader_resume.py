"""A loader that resumes gives what the uninterrupted one would have given, from every place."""

from __future__ import annotations

import json
from collections.abc import Iterator

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from safepoint.data import ResumableLoader
from safepoint.errors import Difference, FormatVersionError, MismatchError, RequestError
from tests.data.datasets import Numbers, epoch_of, flat, ids, run, take

EPOCHS = 4


def every_epoch(length: int, batch: int, *, seed: int, drop_last: bool = False) -> list[list[list[int]]]:
    return [epoch_of(length, batch, seed=seed, epoch=epoch, drop_last=drop_last) for epoch in range(EPOCHS)]


def after(epochs: list[list[list[int]]], batches: int) -> list[list[list[int]]]:
    """Return what is left of some epochs after that many batches, without empty epochs."""
    rest = []
    for epoch in epochs:
        rest.append(epoch[batches:])
        batches = max(0, batches - len(epoch))
    return [epoch for epoch in rest if epoch]


def resumed(loader: ResumableLoader, like: ResumableLoader) -> ResumableLoader:
    # Through JSON, as a stand-in for a checkpoint: nothing but plain values may pass.
    like.load_state_dict(json.loads(json.dumps(loader.state_dict())))
    return like


def to_the_end(loader: ResumableLoader) -> list[list[list[int]]]:
    return list(iter(lambda: run(loader, 1)[0], []))


@pytest.mark.parametrize("commits", [False, True])
@pytest.mark.parametrize("drop_last", [False, True])
@pytest.mark.parametrize("length", [9, 10])
@pytest.mark.parametrize("cut", range(10))
def test_a_run_cut_anywhere_gives_exactly_the_rest_of_each_epoch(
    cut: int, length: int, drop_last: bool, commits: bool
) -> None:
    """Field reports B01, B02, B03, B13, B17, B111: inside an epoch, on its end, in the first and in later epochs."""
    reference = every_epoch(length, 3, seed=8, drop_last=drop_last)
    loader = ResumableLoader(Numbers(length), 3, seed=8, drop_last=drop_last)
    taken = take(loader, cut, commit=commits)
    again = resumed(loader, ResumableLoader(Numbers(length), 3, seed=8, drop_last=drop_last, epochs=EPOCHS))
    assert taken == flat(reference)[:cut]
    assert to_the_end(again) == after(reference, cut)


@settings(max_examples=50)
@given(
    length=st.integers(1, 40),
    batch=st.integers(1, 12),
    world_size=st.integers(1, 3),
    cuts=st.lists(st.integers(0, 20), min_size=1, max_size=4),
    commits=st.booleans(),
    seed=st.integers(0, 2**64 - 1),
)
def test_any_number_of_cuts_leaves_the_run_as_it_would_have_been(
    length: int, batch: int, world_size: int, cuts: list[int], commits: bool, seed: int
) -> None:
    """Field report B11: the position is cumulative, also for a cut right after a resume, before any batch."""
    length = length + batch * world_size - length % (batch * world_size)
    ranks = []
    for rank in range(world_size):

        def fresh(rank: int = rank) -> ResumableLoader:
            return ResumableLoader(Numbers(length), batch, seed=seed, rank=rank, world_size=world_size)

        loader, taken = fresh(), []
        for cut in cuts:
            taken += take(loader, cut, commit=commits)
            loader = resumed(loader, fresh())
        ranks.append(taken)
    together = [flat(parts) for parts in zip(*ranks, strict=True)]
    per_epoch = length // (batch * world_size)
    epochs = [epoch_of(length, batch * world_size, seed=seed, epoch=e) for e in range(sum(cuts) // per_epoch + 1)]
    assert together == flat(epochs)[: sum(cuts)]


def test_the_second_resume_in_one_epoch_counts_from_the_start_of_the_epoch() -> None:
    """Field report B11."""

    def fresh() -> ResumableLoader:
        return ResumableLoader(Numbers(100), 1, seed=4)

    loader = fresh()
    for batches in (30, 10):
        take(loader, batches)
        loader = resumed(loader, fresh())
    assert loader.position == 40
    assert [ids(next(iter(loader)))] == epoch_of(100, 1, seed=4, epoch=0)[40:41]


def test_a_resume_shortens_one_epoch_only() -> None:
    """Field report B05."""
    loader = ResumableLoader(Numbers(10), 1, seed=4)
    take(loader, 6)
    again = resumed(loader, ResumableLoader(Numbers(10), 1, seed=4))
    assert [len(epoch) for epoch in run(again, 3)] == [4, 10, 10]


def test_a_state_taken_on_the_end_of_an_epoch_makes_no_empty_epoch() -> None:
    """Field reports B07, B21: three epochs of sixteen, saved at sixteen, leave thirty-two."""
    loader = ResumableLoader(Numbers(16), 1, seed=4, epochs=3)
    run(loader, 1)
    state = loader.state_dict()
    assert (state["epoch"], state["samples"], state["batches"]) == (1, 0, 0)
    again = resumed(loader, ResumableLoader(Numbers(16), 1, seed=4, epochs=3))
    assert [len(epoch) for epoch in to_the_end(again)] == [16, 16]
    assert again.finished


def test_committing_the_last_batch_moves_the_state_on_while_the_for_ends_normally() -> None:
    loader = ResumableLoader(Numbers(4), 2, seed=4)
    positions = []
    for _ in loader:
        loader.commit()
        positions.append((loader.state_dict()["epoch"], loader.state_dict()["batches"]))
    assert positions == [(0, 1), (1, 0)]
    assert run(loader, 1) == [epoch_of(4, 2, seed=4, epoch=1)]


def test_a_finished_run_given_more_epochs_runs_only_those() -> None:
    """Field report B119: the limit comes from the call, the progress from the state."""
    loader = ResumableLoader(Numbers(4), 2, seed=4, epochs=2)
    to_the_end(loader)
    again = resumed(loader, ResumableLoader(Numbers(4), 2, seed=4, epochs=4))
    assert to_the_end(again) == [epoch_of(4, 2, seed=4, epoch=2), epoch_of(4, 2, seed=4, epoch=3)]


def test_what_was_handed_out_and_not_committed_is_handed_out_again() -> None:
    """Field report B09, for a loader that looks ahead."""
    loader = ResumableLoader(Numbers(20), 2, seed=6, num_workers=1, prefetch_factor=4)
    take(loader, 3, commit=True)
    take(loader, 2)
    again = resumed(loader, ResumableLoader(Numbers(20), 2, seed=6))
    assert run(again, 1) == [epoch_of(20, 2, seed=6, epoch=0)[3:]]
    assert again.handed == 10


@pytest.mark.parametrize("num_workers", [0, 2])
def test_loading_a_state_into_a_loader_with_a_live_iterator_is_never_ignored(num_workers: int) -> None:
    """Field report B10."""
    saved = ResumableLoader(Numbers(20), 2, seed=6)
    take(saved, 7)
    loader = ResumableLoader(Numbers(20), 2, seed=6, num_workers=num_workers)
    live = iter(loader)
    next(live)
    loader.load_state_dict(saved.state_dict())
    with pytest.raises(RequestError, match="a state was loaded"):
        next(live)
    assert loader.state_dict() == saved.state_dict()
    assert run(loader, 1) == [epoch_of(20, 2, seed=6, epoch=0)[7:]]
    assert loader.state_dict()["epoch"] == 1


def test_a_state_loaded_inside_a_for_ends_it_with_an_error() -> None:
    loader = ResumableLoader(Numbers(20), 2, seed=6)
    start = loader.state_dict()
    with pytest.raises(RequestError, match="a state was loaded"):
        for _ in loader:
            loader.load_state_dict(start)


def test_persistent_workers_go_to_a_loaded_position() -> None:
    loader = ResumableLoader(Numbers(20), 2, seed=6, num_workers=2, persistent_workers=True)
    start = loader.state_dict()
    first = take(loader, 3)
    loader.load_state_dict(start)
    assert run(loader, 2) == [epoch_of(20, 2, seed=6, epoch=0), epoch_of(20, 2, seed=6, epoch=1)]
    assert first == epoch_of(20, 2, seed=6, epoch=0)[:3]


@pytest.mark.parametrize("after_resume", [0, 1, 2, 3])
@pytest.mark.parametrize("before", [0, 2])
def test_another_number_of_workers_goes_on_in_the_same_order(before: int, after_resume: int) -> None:
    """Field report B18."""
    loader = ResumableLoader(Numbers(14), 2, seed=6, num_workers=before)
    take(loader, 9)
    again = resumed(loader, ResumableLoader(Numbers(14), 2, seed=6, num_workers=after_resume))
    assert run(again, 2) == [epoch_of(14, 2, seed=6, epoch=1)[2:], epoch_of(14, 2, seed=6, epoch=2)]


class Repeated(Numbers):
    """Go through a data set several times within one epoch."""

    def __init__(self, inner: Numbers, repeat: int) -> None:
        super().__init__(len(inner) * repeat)
        self.inner = inner

    def __getitem__(self, index: int, /) -> int:
        return self.inner[index % len(self.inner)]


def test_a_repeated_data_set_resumes_in_its_second_round_of_its_second_epoch() -> None:
    """Field report B14."""
    loader = ResumableLoader(Repeated(Numbers(6), 2), 2, seed=1)
    take(loader, 6 + 4)
    again = resumed(loader, ResumableLoader(Repeated(Numbers(6), 2), 2, seed=1))
    rest = epoch_of(12, 2, seed=1, epoch=1)[4:]
    assert run(again, 1) == [[[index % 6 for index in batch] for batch in rest]]


def test_the_batches_left_are_those_of_the_epoch_less_those_done() -> None:
    """Field report B19: one layer owns the position."""
    loader = ResumableLoader(Numbers(30), 2, seed=1)
    take(loader, 6)
    again = resumed(loader, ResumableLoader(Numbers(30), 2, seed=1))
    assert (len(again), again.remaining, len(run(again, 1)[0])) == (15, 9, 9)


def test_each_rank_seeks_to_its_own_rest() -> None:
    """Field report B22: ten batches on each of two ranks, not ten divided by two."""
    saved = ResumableLoader(Numbers(60), 2, seed=1, rank=1, world_size=2)
    take(saved, 10)
    rest = []
    for rank in range(2):
        again = ResumableLoader(Numbers(60), 2, seed=1, rank=rank, world_size=2)
        again.load_state_dict(saved.state_dict())
        rest.append(run(again, 1)[0])
    reference = epoch_of(60, 2, seed=1, epoch=0)
    assert rest == [reference[20::2], reference[21::2]]


@pytest.mark.parametrize(
    ("world_size", "batch_size"), [(1, 12), (2, 6), (3, 4), (4, 3), (1, 5), (2, 4), (3, 7), (1, 1)]
)
def test_another_world_or_batch_size_uses_each_sample_of_the_epoch_exactly_once(
    world_size: int, batch_size: int
) -> None:
    """Field report B118: the position counts samples."""
    saved = ResumableLoader(Numbers(60), 4, seed=7, world_size=3)
    ranks = [ResumableLoader(Numbers(60), 4, seed=7, rank=rank, world_size=3) for rank in range(3)]
    used = [sample for parts in zip(*(take(one, 2) for one in ranks), strict=True) for part in parts for sample in part]
    take(saved, 2)
    again = [
        ResumableLoader(Numbers(60), batch_size, seed=7, rank=rank, world_size=world_size) for rank in range(world_size)
    ]
    rests = [run(resumed(saved, loader), 1)[0] for loader in again]
    rest = [sample for parts in zip(*rests, strict=True) for part in parts for sample in part]
    assert used + rest == epoch_of(60, 60, seed=7, epoch=0)[0]


def test_a_changed_batch_or_world_size_is_named_by_its_word_and_taken() -> None:
    saved = ResumableLoader(Numbers(60), 4, seed=7, world_size=3)
    loader = ResumableLoader(Numbers(60), 4, seed=7, world_size=2)
    assert loader.differences(saved.state_dict()) == [
        Difference("world_size", "world size of the loader", "3", "2"),
        Difference("global_batch", "samples in a global batch", "12", "8"),
    ]
    loader.load_state_dict(saved.state_dict())


def test_a_rest_of_an_epoch_that_cannot_be_divided_is_refused_and_nothing_moves() -> None:
    saved = ResumableLoader(Numbers(16), 3, seed=7)
    take(saved, 5)
    loader = ResumableLoader(Numbers(16), 4, seed=7, world_size=2)
    before = loader.state_dict()
    with pytest.raises(RequestError, match="fewer samples than there are ranks"):
        loader.load_state_dict(saved.state_dict())
    with pytest.raises(RequestError, match="fewer samples than there are ranks"):
        loader.differences(saved.state_dict())
    assert loader.state_dict() == before


@pytest.mark.parametrize(
    ("word", "change"),
    [
        ("dataset", {"name": "other"}),
        ("dataset", {"fingerprint": "f2"}),
        ("dataset", {"fingerprint": None}),
        ("dataset", {"dataset": Numbers(21)}),
        ("dataset.order", {"seed": 5}),
        ("dataset.order", {"shuffle": False}),
        ("dataset.order", {"drop_last": True}),
    ],
)
def test_another_data_set_or_order_is_refused_by_name_and_nothing_moves(word: str, change: dict[str, object]) -> None:
    """Field report B23: also one row more."""
    settings = {"dataset": Numbers(20), "batch_size": 2, "seed": 4, "name": "numbers", "fingerprint": "f1"}
    saved = ResumableLoader(**settings)  # type: ignore[arg-type]
    take(saved, 3)
    loader = ResumableLoader(**{**settings, **change})  # type: ignore[arg-type]
    take(loader, 1)
    before = loader.state_dict()
    with pytest.raises(MismatchError) as caught:
        loader.load_state_dict(saved.state_dict())
    assert {one.word for one in caught.value.differences} == {word}
    assert loader.state_dict() == before
    loader.load_state_dict(saved.state_dict(), permit=frozenset({word}))
    assert loader.position == 3


def test_all_differences_are_listed_at_once() -> None:
    saved = ResumableLoader(Numbers(20), 2, seed=4)
    loader = ResumableLoader(Numbers(21), 3, seed=5, shuffle=False, name="n", sample_streams=False)
    assert [one.subject for one in loader.differences(saved.state_dict())] == [
        "name of the data set",
        "length of the data set",
        "seed of the order",
        "order of the samples",
        "samples in a global batch",
        "random streams of samples",
    ]


def test_a_permitted_shorter_data_set_goes_on_at_the_next_epoch_when_the_position_is_past_its_end() -> None:
    saved = ResumableLoader(Numbers(20), 2, seed=4)
    take(saved, 8)
    loader = ResumableLoader(Numbers(10), 2, seed=4)
    loader.load_state_dict(saved.state_dict(), permit=frozenset({"dataset"}))
    assert run(loader, 1) == [epoch_of(10, 2, seed=4, epoch=1)]


def test_an_order_of_an_unknown_algorithm_is_refused_even_if_all_is_permitted() -> None:
    state = {**ResumableLoader(Numbers(20), 2, seed=4).state_dict(), "order": "feistel-9"}
    loader = ResumableLoader(Numbers(20), 2, seed=4)
    with pytest.raises(MismatchError, match="feistel-9"):
        loader.load_state_dict(state, permit=frozenset({"dataset", "dataset.order"}))


def test_a_state_of_a_newer_version_asks_for_an_upgrade() -> None:
    state = {**ResumableLoader(Numbers(20), 2, seed=4).state_dict(), "version": 2, "phase_of_the_moon": 3}
    with pytest.raises(FormatVersionError, match="newer version"):
        ResumableLoader(Numbers(20), 2, seed=4).load_state_dict(state)


def without(name: str) -> dict[str, object]:
    state = ResumableLoader(Numbers(20), 2, seed=4).state_dict()
    del state[name]
    return state


def broken_states() -> Iterator[dict[str, object]]:
    good = ResumableLoader(Numbers(20), 2, seed=4).state_dict()
    yield from (without(name) for name in good)
    for name, value in good.items():
        yield {**good, name: "seven" if not isinstance(value, str) else 7}
        yield {**good, name: -1}
        yield {**good, name: None}
    yield {**good, "extra": 1}
    yield {**good, "ahead": 1}
    yield {**good, "dataset": {"name": "x", "length": 20}}
    yield {**good, "dataset": {"name": "x", "length": 20, "fingerprint": 7}}
    yield {}


@pytest.mark.parametrize("state", list(broken_states()))
def test_a_state_that_lacks_a_part_or_has_a_wrong_one_is_refused(state: dict[str, object]) -> None:
    """Field report B01: a position without its epoch or seed is none."""
    with pytest.raises(MismatchError):
        ResumableLoader(Numbers(20), 2, seed=4).load_state_dict(state)


@pytest.mark.parametrize("seen", [0, 4, 10])
def test_a_validation_pass_after_a_resume_is_whole(seen: int) -> None:
    """Field report B113: a validation loader that is not part of the state starts afresh."""
    training = ResumableLoader(Numbers(20), 2, seed=4)
    validation = ResumableLoader(Numbers(20), 2, seed=4, shuffle=False)
    take(training, 3)
    take(validation, seen)
    resumed(training, ResumableLoader(Numbers(20), 2, seed=4))
    again = ResumableLoader(Numbers(20), 2, seed=4, shuffle=False)
    assert len(run(again, 1)[0]) == 10


def test_a_validation_pass_does_not_move_the_training_position() -> None:
    training = ResumableLoader(Numbers(20), 2, seed=4)
    validation = ResumableLoader(Numbers(20), 2, seed=4, shuffle=False)
    taken = []
    for batch in training:
        taken.append(ids(batch))
        run(validation, 1)
    assert taken == epoch_of(20, 2, seed=4, epoch=0)


def test_three_restarts_on_epoch_ends_give_three_different_orders() -> None:
    """Field report B178."""
    loader = ResumableLoader(Numbers(12), 4, seed=4)
    epochs = []
    for _ in range(3):
        epochs += run(loader, 1)
        loader = resumed(loader, ResumableLoader(Numbers(12), 4, seed=4))
    assert epochs == every_epoch(12, 4, seed=4)[:3]
