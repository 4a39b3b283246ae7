"""What a loader gives, counts and refuses within one process."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch.utils.data import TensorDataset

from safepoint.data import ResumableLoader
from safepoint.errors import RequestError
from tests.data.datasets import BrokenOnce, Endless, Numbers, as_list, epoch_of, flat, ids, run, take


@pytest.mark.parametrize("drop_last", [False, True])
def test_each_for_is_one_whole_epoch_in_its_own_order(drop_last: bool) -> None:
    loader = ResumableLoader(Numbers(10), 3, seed=5, drop_last=drop_last)
    expected = [epoch_of(10, 3, seed=5, epoch=epoch, drop_last=drop_last) for epoch in range(3)]
    assert run(loader, 3) == expected
    assert len(loader) == len(expected[0])
    assert expected[0] != expected[1] != expected[2]


def test_without_shuffling_each_epoch_is_in_the_order_of_the_data_set() -> None:
    loader = ResumableLoader(Numbers(5), 2, seed=5, shuffle=False)
    assert run(loader, 2) == [[[0, 1], [2, 3], [4]]] * 2


@pytest.mark.parametrize("drop_last", [False, True])
@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_the_parts_of_all_ranks_are_the_same_global_batches_for_every_world_size(
    world_size: int, drop_last: bool
) -> None:
    ranks = [
        ResumableLoader(Numbers(41), 12 // world_size, seed=2, rank=rank, world_size=world_size, drop_last=drop_last)
        for rank in range(world_size)
    ]
    by_rank = [run(loader, 2) for loader in ranks]
    together = [[flat(parts) for parts in zip(*passes, strict=True)] for passes in zip(*by_rank, strict=True)]
    assert together == [epoch_of(41, 12, seed=2, epoch=epoch, drop_last=drop_last) for epoch in range(2)]


def test_the_position_counts_what_the_loop_received() -> None:
    loader = ResumableLoader(Numbers(10), 3, seed=0)
    seen = [(loader.epoch, loader.position, loader.remaining, loader.handed) for _ in loader]
    assert seen == [(0, 1, 3, 1), (0, 2, 2, 2), (0, 3, 1, 3), (1, 0, 4, 4)]


def test_prefetched_batches_are_not_counted() -> None:
    """Field report B06."""
    loader = ResumableLoader(Numbers(40), 2, seed=0, num_workers=2, prefetch_factor=4)
    taken = take(loader, 3)
    assert (loader.handed, loader.position) == (3, 3)
    resumed = ResumableLoader(Numbers(40), 2, seed=0)
    resumed.load_state_dict(loader.state_dict())
    assert [taken + run(resumed, 1)[0]] == [epoch_of(40, 2, seed=0, epoch=0)]


def test_a_for_after_a_break_goes_on_after_the_last_batch_received() -> None:
    loader = ResumableLoader(Numbers(10), 2, seed=1)
    first = take(loader, 2)
    assert [first + run(loader, 1)[0]] == [epoch_of(10, 2, seed=1, epoch=0)]


def test_a_break_right_after_the_last_batch_leaves_no_empty_pass() -> None:
    loader = ResumableLoader(Numbers(6), 2, seed=1)
    take(loader, 3)
    assert run(loader, 1) == [epoch_of(6, 2, seed=1, epoch=1)]


def test_after_the_last_epoch_a_for_yields_nothing_and_the_loader_says_so() -> None:
    loader = ResumableLoader(Numbers(4), 2, seed=1, epochs=2)
    lengths = [(len(list(loader)), loader.finished, loader.remaining) for _ in range(4)]
    assert lengths == [(2, False, 2), (2, True, 0), (0, True, 0), (0, True, 0)]


def test_no_epochs_asked_for_is_finished_at_once() -> None:
    assert list(ResumableLoader(Numbers(4), 2, seed=1, epochs=0)) == []


def test_another_iterator_ends_the_older_one_with_an_error() -> None:
    loader = ResumableLoader(Numbers(10), 2, seed=1)
    older = iter(loader)
    first = ids(next(older))
    newer = iter(loader)
    with pytest.raises(RequestError, match="another iterator was made"):
        next(older)
    assert [first, *map(ids, newer)] == epoch_of(10, 2, seed=1, epoch=0)


@pytest.mark.parametrize("num_workers", [0, 1])
def test_a_batch_that_fails_is_not_counted_and_comes_first_next_time(num_workers: int, tmp_path: Path) -> None:
    mended = tmp_path / "mended"
    loader = ResumableLoader(
        BrokenOnce(12, 7, str(mended)), 2, seed=1, shuffle=False, num_workers=num_workers, collate_fn=as_list
    )
    live = iter(loader)
    taken = [next(live) for _ in range(3)]
    with pytest.raises(FileNotFoundError):
        next(live)
    with pytest.raises(RequestError, match="loading a batch failed"):
        next(live)
    assert (loader.handed, loader.state_dict()["batches"]) == (3, 3)
    mended.write_text("")
    assert taken + list(loader) == [[0, 1], [2, 3], [4, 5], [6, 7], [8, 9], [10, 11]]


def test_an_error_of_the_collation_reaches_the_loop() -> None:
    def refuse(samples: list[object]) -> object:
        raise KeyError("no such field")

    loader = ResumableLoader(Numbers(4), 2, seed=1, collate_fn=refuse)
    with pytest.raises(KeyError, match="no such field"):
        next(iter(loader))
    assert loader.handed == 0


def test_the_last_ids_are_those_handed_out_since_the_last_commit() -> None:
    loader = ResumableLoader(Numbers(10), 4, seed=3, rank=1, world_size=2)
    order = epoch_of(10, 10, seed=3, epoch=0)[0] + epoch_of(10, 10, seed=3, epoch=1)[0]
    seen = [loader.last_ids()]
    take(loader, 1)
    seen.append(loader.last_ids())
    loader.commit()
    seen.append(loader.last_ids())
    take(loader, 2)
    seen.append(loader.last_ids())
    # Rank 1 of 2: the second half of the eight, then of the short last two, then of the next epoch's first eight.
    assert seen == [[], order[4:8], [], [order[9], *order[14:18]]]


def test_committing_in_parts_keeps_the_rest_ahead() -> None:
    loader = ResumableLoader(Numbers(20), 2, seed=3)
    take(loader, 5)
    loader.commit(2)
    state = loader.state_dict()
    assert (loader.uncommitted, state["batches"], state["samples"], state["ahead"], state["handed"]) == (3, 2, 4, 3, 5)
    loader.commit()
    assert (loader.uncommitted, loader.state_dict()["batches"], loader.state_dict()["ahead"]) == (0, 5, 0)


@pytest.mark.parametrize("batches", [4, -1])
def test_committing_what_was_not_handed_out_is_refused(batches: int) -> None:
    loader = ResumableLoader(Numbers(20), 2, seed=3)
    take(loader, 3)
    with pytest.raises(RequestError, match="from 0 to 3"):
        loader.commit(batches)
    assert loader.uncommitted == 3


def test_the_state_is_plain_and_complete() -> None:
    loader = ResumableLoader(Numbers(10), 2, seed=9, rank=1, world_size=2, name="numbers", fingerprint="f1")
    take(loader, 4)
    assert loader.state_dict() == {
        "version": 1,
        "order": "feistel-1",
        "seed": 9,
        "shuffle": True,
        "drop_last": False,
        "epoch": 1,
        "samples": 4,
        "batches": 1,
        "batch_size": 2,
        "world_size": 2,
        "global_batch": 4,
        "handed": 4,
        "ahead": 0,
        "streams": "sample-1",
        "dataset": {"name": "numbers", "length": 10, "fingerprint": "f1"},
    }


def test_the_state_is_the_same_on_all_ranks() -> None:
    ranks = [ResumableLoader(Numbers(21), 2, seed=9, rank=rank, world_size=3) for rank in range(3)]
    states = [(take(loader, 2), loader.state_dict())[1] for loader in ranks]
    assert states[0] == states[1] == states[2]


def test_the_data_set_is_named_by_its_class_and_its_own_fingerprint() -> None:
    dataset = Numbers(10)
    dataset._fingerprint = "a1b2"  # type: ignore[attr-defined]
    identity = ResumableLoader(dataset, 2, seed=0).identity
    assert (identity.name, identity.length, identity.fingerprint) == ("Numbers", 10, "a1b2")


def test_batches_are_collated_as_torch_does() -> None:
    features, labels = torch.arange(12.0).reshape(6, 2), torch.arange(6)
    loader = ResumableLoader(TensorDataset(features, labels), 4, seed=0, shuffle=False)
    x, y = next(iter(loader))
    assert torch.equal(x, features[:4])
    assert torch.equal(y, labels[:4])


class NoLength:
    def __getitem__(self, index: int) -> int:
        return index


class Stream:
    def __iter__(self) -> Iterator[int]:
        return iter(range(3))


@pytest.mark.parametrize("dataset", [Endless(), NoLength(), Stream()])
def test_a_data_set_without_a_length_is_refused_with_what_to_use_instead(dataset: object) -> None:
    with pytest.raises(RequestError) as caught:
        ResumableLoader(dataset, 2, seed=0)  # type: ignore[arg-type]
    assert "Cursor" in caught.value.remedy
    assert "StatefulDataLoader" in caught.value.remedy


@pytest.mark.parametrize(
    ("where", "settings"),
    [
        ("batch_size", {"batch_size": 0}),
        ("seed", {"seed": -3}),
        ("rank", {"rank": 2, "world_size": 2}),
        ("world_size", {"world_size": 0}),
        ("epochs", {"epochs": -1}),
        ("ResumableLoader", {"num_workers": -1}),
        ("ResumableLoader", {"prefetch_factor": 2}),
    ],
)
def test_a_wrong_setting_is_refused_by_name(where: str, settings: dict[str, int]) -> None:
    with pytest.raises(RequestError) as caught:
        ResumableLoader(Numbers(10), **{"batch_size": 2, "seed": 0, **settings})  # type: ignore[arg-type]
    assert caught.value.where == where


def test_an_epoch_without_a_batch_is_refused() -> None:
    with pytest.raises(RequestError, match="no batch can be made"):
        ResumableLoader(Numbers(10), 4, seed=0, world_size=3, drop_last=True)


def test_an_empty_data_set_is_refused() -> None:
    with pytest.raises(RequestError, match="length of the data set"):
        ResumableLoader(Numbers(0), 4, seed=0)


def test_a_last_batch_that_some_rank_has_no_part_of_is_refused() -> None:
    """Ranks with a batch would wait for ever for the one without."""
    with pytest.raises(RequestError, match="fewer samples than there are ranks"):
        ResumableLoader(Numbers(14), 4, seed=0, world_size=3)
    ResumableLoader(Numbers(15), 4, seed=0, world_size=3)


def test_a_pass_leaves_no_warning() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        run(ResumableLoader(Numbers(10), 2, seed=1, num_workers=1), 2)
