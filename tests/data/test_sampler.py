"""A batch sampler for a plain `DataLoader`, which must be told what is finished with."""

from __future__ import annotations

import pytest
from torch.utils.data import DataLoader

from safepoint.data import ResumableLoader, ResumableSampler
from safepoint.errors import MismatchError, RequestError
from tests.data.datasets import Numbers, epoch_of, flat, ids


def test_each_iterator_is_the_next_epoch() -> None:
    sampler = ResumableSampler(10, batch_size=3, seed=5)
    assert len(sampler) == 4
    assert [list(sampler) for _ in range(3)] == [epoch_of(10, 3, seed=5, epoch=epoch) for epoch in range(3)]


@pytest.mark.parametrize("drop_last", [False, True])
def test_the_parts_of_the_ranks_are_the_global_batches(drop_last: bool) -> None:
    parts = [
        list(ResumableSampler(Numbers(22), batch_size=2, seed=5, rank=rank, world_size=3, drop_last=drop_last))
        for rank in range(3)
    ]
    together = [flat(batch) for batch in zip(*parts, strict=True)]
    assert together == epoch_of(22, 6, seed=5, epoch=0, drop_last=drop_last)


@pytest.mark.parametrize("num_workers", [0, 2])
@pytest.mark.parametrize("cut", range(9))
def test_a_torch_loader_cut_anywhere_goes_on_after_what_was_committed(cut: int, num_workers: int) -> None:
    """Field report B06: a loader with workers has asked the sampler for more than training received."""
    sampler = ResumableSampler(10, batch_size=3, seed=5)
    loader = DataLoader(Numbers(10), batch_sampler=sampler, num_workers=num_workers)  # type: ignore[arg-type]
    taken: list[list[int]] = []
    while len(taken) < cut:
        for batch in loader:
            taken.append(ids(batch))
            sampler.commit()
            if len(taken) == cut:
                break
    again = ResumableSampler(10, batch_size=3, seed=5)
    again.load_state_dict(sampler.state_dict())
    rest = flat([list(again), list(again)])
    reference = flat(epoch_of(10, 3, seed=5, epoch=epoch) for epoch in range(4))
    assert taken + rest == reference[: cut + len(rest)]
    assert len(rest) == 8 - cut % 4


def test_a_sampler_that_was_never_told_what_is_finished_refuses_to_state_a_position() -> None:
    sampler = ResumableSampler(10, batch_size=3, seed=5)
    assert sampler.state_dict()["samples"] == 0
    next(iter(sampler))
    with pytest.raises(RequestError, match="never told") as caught:
        sampler.state_dict()
    assert "ResumableLoader" in caught.value.remedy


def test_a_resumed_sampler_states_its_position_before_the_first_batch() -> None:
    sampler = ResumableSampler(10, batch_size=3, seed=5)
    next(iter(sampler))
    sampler.commit()
    again = ResumableSampler(10, batch_size=3, seed=5)
    again.load_state_dict(sampler.state_dict())
    assert again.state_dict() == sampler.state_dict()
    assert (again.epoch, again.position, again.uncommitted) == (0, 1, 0)


def test_committing_what_was_not_yielded_is_refused() -> None:
    sampler = ResumableSampler(10, batch_size=3, seed=5)
    next(iter(sampler))
    with pytest.raises(RequestError, match="from 0 to 1"):
        sampler.commit(2)


def test_a_loaded_state_ends_a_live_iterator_with_an_error() -> None:
    """Field report B10."""
    sampler = ResumableSampler(10, batch_size=3, seed=5)
    live = iter(sampler)
    next(live)
    sampler.load_state_dict(ResumableSampler(10, batch_size=3, seed=5).state_dict())
    with pytest.raises(RequestError, match="no longer the sampler's own"):
        next(live)


def test_another_iterator_ends_the_older_one_with_an_error() -> None:
    sampler = ResumableSampler(10, batch_size=3, seed=5)
    older = iter(sampler)
    first = next(older)
    newer = list(sampler)
    with pytest.raises(RequestError, match="no longer the sampler's own"):
        next(older)
    assert [first, *newer] == epoch_of(10, 3, seed=5, epoch=0)


def test_an_iterator_made_after_a_commit_starts_at_the_committed_place() -> None:
    sampler = ResumableSampler(10, batch_size=3, seed=5)
    live = iter(sampler)
    next(live), next(live)
    sampler.commit()
    assert list(sampler) == epoch_of(10, 3, seed=5, epoch=0)[1:]


def test_another_data_set_is_refused_and_named() -> None:
    """Field report B23."""
    sampler = ResumableSampler(Numbers(11), batch_size=3, seed=5)
    with pytest.raises(MismatchError, match="length of the data set: saved 10, now 11"):
        sampler.load_state_dict(ResumableSampler(Numbers(10), batch_size=3, seed=5).state_dict())


def test_a_state_goes_from_a_loader_to_a_sampler_with_the_change_of_streams_named() -> None:
    loader = ResumableLoader(Numbers(10), 3, seed=5)
    next(iter(loader))
    sampler = ResumableSampler(Numbers(10), batch_size=3, seed=5)
    assert [one.word for one in sampler.differences(loader.state_dict())] == ["rng"]
    sampler.load_state_dict(loader.state_dict())
    assert list(sampler) == epoch_of(10, 3, seed=5, epoch=0)[1:]
