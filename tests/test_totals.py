"""What all ranks have consumed, as a boundary counts it without asking them."""

from __future__ import annotations

import pytest

from safepoint.boundary import Boundary
from safepoint.data import ResumableLoader
from safepoint.progress import Consumed, Progress, totals_of
from safepoint.state.steps import StepMonitor

LENGTH = 94


def boundary_of(loader: object, *, world_size: int) -> Boundary:
    boundary = Boundary(StepMonitor({}), world_size=world_size)
    boundary.watch("data", loader)
    return boundary


def loader_of(rank: int, world_size: int) -> ResumableLoader:
    return ResumableLoader(range(LENGTH), 12 // world_size, seed=5, rank=rank, world_size=world_size, name="numbers")  # type: ignore[arg-type]


@pytest.mark.parametrize("is_told", [True, False])
def test_with_the_loaders_plan_each_rank_knows_the_samples_of_all(is_told: bool) -> None:
    """94 samples are 7 global batches of 12 and one of 10, which 4 ranks divide as 2, 3, 2, 3."""
    world_size = 4
    loaders = [loader_of(rank, world_size) for rank in range(world_size)]
    boundaries = [boundary_of(loader, world_size=world_size) for loader in loaders]
    for boundary, loader in zip(boundaries, loaders, strict=True):
        for batch in loader:
            boundary.close(samples=len(batch) if is_told else None, tokens=2, batches=None)
    assert [boundary.progress.samples for boundary in boundaries] == [LENGTH] * world_size
    assert totals_of([boundary.consumed for boundary in boundaries]) == (LENGTH, world_size * 2 * 8)
    assert [boundary.consumed.samples for boundary in boundaries] == [7 * 3 + share for share in (2, 3, 2, 3)]


def test_what_a_rank_counts_otherwise_than_its_loader_is_its_own() -> None:
    loaders = [loader_of(rank, 2) for rank in range(2)]
    boundaries = [boundary_of(loader, world_size=2) for loader in loaders]
    for rank, (boundary, loader) in enumerate(zip(boundaries, loaders, strict=True)):
        next(iter(loader))
        boundary.close(samples=5 if rank else None, tokens=0, batches=None)
    assert [boundary.progress.samples for boundary in boundaries] == [12, 5]
    assert totals_of([boundary.consumed for boundary in boundaries]) == (6 + 5, 0)


def test_counts_go_on_from_the_totals_that_a_restore_and_a_save_tell() -> None:
    boundary = Boundary(StepMonitor({}), world_size=2)
    boundary.begin_at(Progress(step=3, samples=300, tokens=30), {})
    boundary.close(samples=4, tokens=1, batches=None)
    assert totals_of([boundary.consumed, Consumed(300, 30, samples=6, tokens=2, is_planned=False)]) == (310, 33)
    boundary.show_totals(samples=310, tokens=33)
    boundary.close(samples=4, tokens=1, batches=None)
    assert (boundary.progress.samples, boundary.progress.tokens) == (314, 34)
    # The next save counts from the restore again, whatever became of this one.
    assert totals_of([boundary.consumed, Consumed(300, 30, samples=12, tokens=4, is_planned=False)]) == (320, 36)


def test_one_process_counts_its_own_samples() -> None:
    loader = loader_of(0, 2)
    boundary = boundary_of(loader, world_size=1)
    next(iter(loader))
    boundary.close(samples=None, tokens=0, batches=None)
    assert boundary.progress.samples == 6
