"""Wherever a run is cut, what it does afterwards is what the uninterrupted run did."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import safepoint as sp
from safepoint.data import ResumableLoader
from tests.manager.jobs import Job, Points, build, die, microbatch, picture, step, train

# Two epochs of 22 samples in batches of 4, the last one short.
UPDATES = 12


def resumed(url: Path, until: int, *, accumulation: int = 1, **options: Any) -> tuple[Job, list[Any]]:
    """Restore in a start with other seeds, train on, and return the job and what it did."""
    job = build(url, seed=77, **options)
    job.manager.restore()
    done = train(job, until, accumulation=accumulation)
    job.manager.close()
    return job, done


@pytest.mark.parametrize("drop_last", [False, True])
def test_a_run_cut_after_any_update_goes_on_bit_for_bit(tmp_path: Path, drop_last: bool) -> None:
    """Field reports B01, B02, B03, B14, B17, B35, B83, B111, B115, B182."""
    whole = build(tmp_path / "whole", drop_last=drop_last)
    expected = train(whole, UPDATES)
    after = picture(whole)
    for cut in range(UPDATES + 1):
        job = build(tmp_path / str(cut), drop_last=drop_last)
        before = train(job, cut)
        job.manager.save()
        die(job)

        job, done = resumed(tmp_path / str(cut), UPDATES, drop_last=drop_last)

        assert before + done == expected, cut
        assert picture(job) == after, cut


@pytest.mark.parametrize("cut", [3, 6, 8])
def test_workers_change_nothing_on_either_side_of_a_cut(tmp_path: Path, cut: int) -> None:
    """The save is made by two workers, the resume by none, and the reverse. Field reports B06, B18."""
    whole = build(tmp_path / "whole")
    expected = train(whole, UPDATES)
    after = picture(whole)
    for first, second in [(2, 2), (2, 0), (0, 2)]:
        url = tmp_path / f"{first}-{second}"
        job = build(url, workers=first, save=sp.every(updates=cut))
        train(job, cut + 1)
        die(job)

        job, done = resumed(url, UPDATES, workers=second)

        assert done == expected[cut:]
        assert picture(job) == after


@pytest.mark.parametrize("drop_last", [False, True])
def test_accumulation_is_cut_at_any_boundary_also_where_a_window_spans_two_epochs(
    tmp_path: Path, drop_last: bool
) -> None:
    """With drop_last an epoch has five batches, so that every second epoch's end lies inside a window.

    Field reports B217, B218.
    """
    whole = build(tmp_path / "whole", drop_last=drop_last)
    expected = train(whole, 7, accumulation=2)
    after = picture(whole)
    for cut in range(8):
        url = tmp_path / str(cut)
        job = build(url, drop_last=drop_last)
        train(job, cut, accumulation=2)
        job.manager.save()
        die(job)

        job, done = resumed(url, 7, drop_last=drop_last, accumulation=2)

        assert done == expected[2 * cut :], cut
        assert picture(job) == after, cut


def test_a_save_asked_for_inside_a_window_is_made_at_its_end_and_says_so(tmp_path: Path) -> None:
    """Field reports B217, B219."""
    whole = build(tmp_path / "whole")
    expected = train(whole, 5, accumulation=2)
    job = build(tmp_path / "run")
    train(job, 2, accumulation=2)
    batches = iter(job.loader)
    microbatch(job, next(batches))
    job.manager.after_microbatch()

    handle = job.manager.save()

    assert not handle.staged
    assert "1 microbatches" in handle.deferred and "update 3" in handle.deferred
    with pytest.raises(sp.AbortedError, match="later boundary"):
        handle.wait()
    microbatch(job, next(batches))
    job.manager.after_microbatch()
    job.optimizer.step()
    job.scheduler.step()
    job.optimizer.zero_grad()
    job.manager.after_update()
    assert handle.wait().step == 3
    assert job.manager.progress == sp.Progress(step=3, microbatches=6, samples=22, epoch_end_due=True)
    die(job)

    _, done = resumed(tmp_path / "run", 5, accumulation=2)
    assert done == expected[6:]


def test_a_batch_in_hand_defers_a_save_like_a_microbatch(tmp_path: Path) -> None:
    job = build(tmp_path)
    job.manager.restore()
    batch = next(iter(job.loader))

    handle = job.manager.save()
    assert "'data'" in handle.deferred
    step(job, batch)
    job.manager.after_update()

    assert handle.wait().step == 1
    job.manager.close()


def test_a_run_cut_twice_within_one_epoch_counts_from_its_begin(tmp_path: Path) -> None:
    """Field reports B05, B11, B13, B155, B121."""
    whole = build(tmp_path / "whole")
    expected = train(whole, UPDATES)
    after = picture(whole)
    job = build(tmp_path / "run", save=sp.every(updates=1))
    train(job, 2)
    die(job)
    job = build(tmp_path / "run", seed=3, save=sp.every(updates=1))
    job.manager.restore()
    train(job, 4)
    die(job)

    job, done = resumed(tmp_path / "run", UPDATES)

    assert done == expected[4:]
    assert picture(job) == after
    assert job.manager.progress.samples == 2 * 22


def test_a_run_cut_directly_after_a_resume_has_lost_nothing(tmp_path: Path) -> None:
    whole = build(tmp_path / "whole")
    expected = train(whole, UPDATES)
    job = build(tmp_path / "run", save=sp.every(updates=5))
    train(job, 5)
    die(job)
    for seed in (3, 4):
        job = build(tmp_path / "run", seed=seed)
        job.manager.restore()
        job.manager.save()
        die(job)
    job = build(tmp_path / "run", seed=5)
    job.manager.restore()
    die(job)

    _, done = resumed(tmp_path / "run", UPDATES)

    assert done == expected[5:]


def test_a_start_that_seeds_again_and_makes_iterators_after_its_restore_goes_on_exactly(tmp_path: Path) -> None:
    """Inside an epoch the streams are put in place when the first batch is handed out. Field report B177."""
    whole = build(tmp_path / "whole")
    expected = train(whole, UPDATES)
    job = build(tmp_path / "run", save=sp.every(updates=4))
    train(job, 4)
    die(job)

    job = build(tmp_path / "run", seed=77)
    job.manager.restore()
    build(tmp_path / "elsewhere", seed=123)
    done = train(job, UPDATES)

    assert done == expected[4:]
    job.manager.close()


def test_a_run_goes_back_within_one_process_and_computes_the_same_again(tmp_path: Path) -> None:
    """A roll-back by a second restore, as after a loss spike."""
    job = build(tmp_path, save=sp.every(updates=3))
    job.manager.restore()
    expected = train(job, 9)
    after = picture(job)

    report = job.manager.restore(step=3, branch=True)
    done = train(job, 9)

    assert report.step == 3 and len(report.superseded) == 2
    assert done == expected[3:]
    assert picture(job) == after
    assert [one.step for one in job.manager.checkpoints()] == [9, 6, 3]
    job.manager.close()


def test_a_second_restore_in_a_row_changes_nothing(tmp_path: Path) -> None:
    """Field report B77."""
    job = build(tmp_path, save=sp.every(updates=4))
    train(job, 4)
    at_four = picture(job)
    die(job)

    job = build(tmp_path, seed=8)
    job.manager.restore()
    once = picture(job)
    job.manager.restore()

    assert once == at_four
    assert picture(job) == at_four
    job.manager.close()


def test_a_loader_that_comes_late_goes_on_where_the_run_was_cut(tmp_path: Path) -> None:
    whole = build(tmp_path / "whole")
    expected = train(whole, UPDATES)
    job = build(tmp_path / "run", save=sp.every(updates=4))
    train(job, 4)
    die(job)

    job = build(tmp_path / "elsewhere", seed=7)
    items = {"model": job.model, "optimizer": job.optimizer, "scheduler": job.scheduler}
    job.manager = sp.CheckpointManager(tmp_path / "run", items)
    assert job.manager.restore(late=["data"]).promise.level == "exact"
    with pytest.raises(sp.ContractError, match="saved 22, now 23"):
        job.manager.register("data", ResumableLoader(Points(23), 4, seed=5))
    job.manager.register("data", job.loader)

    assert train(job, UPDATES) == expected[4:]
    job.manager.close()
