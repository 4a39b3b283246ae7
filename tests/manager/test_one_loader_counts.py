"""One loader counts the epochs, every epoch comes to its end, and nothing of a training is left out without a word."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader

import safepoint as sp
from safepoint.ambient import SystemAmbient
from safepoint.data import Cursor, ResumableLoader
from safepoint.state.steps import StepMonitor
from tests.manager.jobs import Points, bits, build, close_window, die, microbatch, step

BATCHES = 6


def manager_of(url: Path, **items: object) -> sp.CheckpointManager:
    return sp.CheckpointManager(url, items, contract=sp.Contract("approximate"))


@pytest.mark.parametrize("foreign", [False, True])
@pytest.mark.parametrize("flushes", [False, True])
def test_an_epoch_with_a_window_left_over_is_closed_like_any_other(
    tmp_path: Path, foreign: bool, flushes: bool
) -> None:
    loader: Any = DataLoader(Points(10), 2) if foreign else ResumableLoader(range(10), 2, seed=0)  # type: ignore[arg-type]
    manager = manager_of(tmp_path, loop={}, **({} if foreign else {"data": loader}))
    manager.restore()
    closed = []
    for epoch in manager.epochs(3):
        for number, _ in enumerate(manager.batches(loader), 1):
            manager.after_microbatch()
            if number % 2 == 0:
                manager.after_update()
        if flushes:
            manager.after_update()
        closed.append((epoch, manager.progress.step, manager.epoch_end_due))
    updates = 3 if flushes else 2
    assert closed == [(number, updates * (number + 1), True) for number in range(3)]
    assert manager.progress.epoch == 3 and manager.progress.microbatches == (15 if flushes else 14)
    manager.close()


def test_a_skipped_last_batch_ends_its_epoch_and_does_not_come_back(tmp_path: Path) -> None:
    job = build(tmp_path, save=sp.every(updates=1))
    seen = []
    for epoch in job.manager.epochs(2):
        for number, batch in enumerate(job.manager.batches(job.loader), 1):
            if number == BATCHES:
                job.manager.skip_batch()
                continue
            step(job, batch)
            job.manager.after_update()
        seen.append(epoch)
    job.manager.save()
    assert seen == [0, 1] and job.manager.progress.step == 2 * (BATCHES - 1)
    job.manager.close()
    job = build(tmp_path)
    job.manager.restore()
    assert (job.loader.epoch, job.loader.position) == (2, 0)
    job.manager.close()


def test_a_body_that_leaves_its_epoch_unfinished_is_an_error(tmp_path: Path) -> None:
    job = build(tmp_path)
    with pytest.raises(sp.RequestError, match="in the middle of an epoch"):
        for _ in job.manager.epochs(3):
            for batch in job.manager.batches(job.loader):
                step(job, batch)
                job.manager.after_update()
                break
    job.manager.close()


def test_a_restore_in_the_body_begins_the_epoch_again_from_there(tmp_path: Path) -> None:
    job = build(tmp_path, save=sp.every(updates=2))
    numbers, gone_back = [], False
    for epoch in job.manager.epochs(2):
        numbers.append(epoch)
        for batch in job.manager.batches(job.loader):
            step(job, batch)
            job.manager.after_update()
            if job.manager.progress.step == 9 and not gone_back:
                gone_back = bool(job.manager.restore().step)
                break
    assert numbers == [0, 1, 1] and job.manager.progress.step == 2 * BATCHES
    job.manager.close()


def test_epochs_go_on_when_the_loader_was_not_restored(tmp_path: Path) -> None:
    job = build(tmp_path, save=sp.every(updates=BATCHES))
    numbers: list[int] = []

    def train(job: Any, epochs: int) -> None:
        for epoch in job.manager.epochs(epochs):
            numbers.append(epoch)
            for batch in job.manager.batches(job.loader):
                step(job, batch)
                job.manager.after_update()

    train(job, 2)
    job.manager.close()
    job = build(tmp_path)
    job.manager.restore(skip={"data"})
    train(job, 4)
    assert numbers == [0, 1, 2, 3]
    job.manager.close()


@pytest.mark.parametrize("validates", ["by itself", "by the manager", "beforehand"])
def test_passes_over_another_registered_loader_end_no_epoch(tmp_path: Path, validates: str) -> None:
    other = ResumableLoader(range(4), 2, seed=1, shuffle=False)
    data = ResumableLoader(range(12), 2, seed=0)
    manager = manager_of(tmp_path, validation=other, data=data)
    manager.restore()
    if validates == "beforehand":
        list(manager.batches(other))
    ends = []
    for epoch in manager.epochs(3):
        for number, _ in enumerate(manager.batches(data)):
            manager.after_update()
            if number == 2 and validates == "by itself":
                list(other)
        if validates == "by the manager":
            list(manager.batches(other))
        ends.append((epoch, manager.progress.step))
    assert ends == [(0, 6), (1, 12), (2, 18)]
    assert (manager.progress.microbatches, manager.progress.samples) == (18, 36)
    manager.close()


def test_two_loaders_side_by_side_count_as_one(tmp_path: Path) -> None:
    manager = manager_of(tmp_path, loop={})
    first, second = (DataLoader(Points(12), 2) for _ in range(2))  # type: ignore[arg-type]
    ends = []
    for epoch in manager.epochs(2):
        for _ in zip(manager.batches(first), manager.batches(second), strict=False):
            manager.after_update()
        ends.append((epoch, manager.progress.step, manager.progress.microbatches))
    assert ends == [(0, 6, 6), (1, 12, 12)]
    manager.close()


def test_a_loop_that_closes_its_epochs_itself_resumes_from_a_death_in_its_first_epochs_end(tmp_path: Path) -> None:
    def start() -> Any:
        made = build(
            tmp_path, scheduler=lambda one: torch.optim.lr_scheduler.StepLR(one, 1, gamma=0.5), save=sp.every(updates=1)
        )
        made.manager.restore()
        return made

    def run(job: Any, dies: bool) -> None:
        while job.manager.progress.epoch < 2:
            for batch in job.manager.batches(job.loader):
                step(job, batch, steps_scheduler=False)
                job.manager.after_update()
            if dies:
                return
            if job.manager.epoch_end_due:
                job.scheduler.step()
                job.manager.end_epoch()

    job = start()
    run(job, dies=True)
    assert max(one.step for one in job.manager.checkpoints()) == BATCHES - 1
    die(job)
    job = start()
    run(job, dies=False)
    assert job.optimizer.param_groups[0]["lr"] == 0.0125 and job.manager.progress.step == 2 * BATCHES
    job.manager.close()


@pytest.mark.parametrize("by_manager", [False, True])
def test_a_script_that_closes_no_epoch_has_its_save_before_the_next_ones_first_batch(
    tmp_path: Path, by_manager: bool
) -> None:
    job = build(tmp_path, save=sp.every(updates=BATCHES))
    at_end: list[int] = []
    for number in range(2):
        for batch in job.manager.batches(job.loader) if by_manager else job.loader:
            if number == 1 and not at_end:
                at_end = [one.step for one in job.manager.checkpoints()]
            step(job, batch)
            job.manager.after_update()
    assert at_end == [BATCHES]
    manifest = sp.open_run(tmp_path).manifest()
    assert (manifest.progress.epoch, manifest.progress.epoch_end_due, manifest.conditions.reasons) == (1, False, {})
    job.manager.close()


class Clock(SystemAmbient):
    """A system whose clock stands still until it is moved."""

    seconds = 0.0

    def monotonic(self) -> float:
        return self.seconds


def test_no_save_is_made_at_an_epochs_end_inside_a_window(tmp_path: Path) -> None:
    clock = Clock()
    job = build(tmp_path, save=sp.every(minutes=1), ambient=clock)
    job.manager.restore()
    for epoch in job.manager.epochs(2):
        for number, batch in enumerate(job.manager.batches(job.loader), 1):
            microbatch(job, batch)
            job.manager.after_microbatch()
            if number % 4 == 0:
                close_window(job)
                job.manager.after_update()
        clock.seconds += 61
        if epoch:
            assert [one.step for one in job.manager.checkpoints()] == [2]
    job.manager.close()


def test_a_loader_without_a_length_may_end_its_epoch_with_a_short_window(tmp_path: Path) -> None:
    class Stream:
        at = 0

        def __iter__(self) -> Iterator[int]:
            while self.at < 7:
                self.at += 1
                yield self.at
            self.at = 0

        def state_dict(self) -> dict[str, int]:
            return {"at": self.at}

        def load_state_dict(self, state: dict[str, int]) -> None:
            self.at = state["at"]

    def run(window: int, stops: bool) -> None:
        stream = Stream()
        with sp.CheckpointManager(tmp_path, {"data": stream}, save=sp.every(updates=1)) as manager:
            manager.restore()
            numbered = (pair for _ in manager.epochs(2) for pair in enumerate(manager.batches(stream), 1))
            for number, value in numbered:
                manager.after_microbatch()
                if number % window == 0 or value == 7:
                    manager.after_update()
                    if stops:
                        return

    run(4, stops=True)
    with pytest.raises(sp.ContractError, match="another number of microbatches") as caught:
        run(1, stops=False)
    assert "Nothing was changed" not in str(caught.value)


def test_a_restore_lets_gradients_of_the_weights_before_go(tmp_path: Path) -> None:
    job = build(tmp_path, save=sp.every(updates=1))
    batch = next(iter(job.loader))
    step(job, batch)
    job.manager.after_update()
    microbatch(job, batch)
    job.manager.restore()
    assert all(one.grad is None for one in job.model.parameters())
    job.manager.close()


def test_a_scheduler_stepped_after_its_boundary_lowers_the_promise(tmp_path: Path) -> None:
    job = build(tmp_path, save=sp.every(updates=1))
    for batch in list(job.loader)[:3]:
        step(job, batch, steps_scheduler=False)
        job.manager.after_update(batches=1)
        job.scheduler.step()
    job.manager.close()
    assert set(sp.open_run(tmp_path).manifest().conditions.reasons) == {"scheduler.late"}


def test_a_refused_restore_leaves_the_training_its_run(tmp_path: Path) -> None:
    job = build(tmp_path, save=sp.every(updates=1))
    batches = iter(job.loader)
    step(job, next(batches))
    job.manager.after_update()
    with pytest.raises(sp.NotFoundError):
        job.manager.restore(step=99, branch=True)
    step(job, next(batches))
    job.manager.after_update()
    assert [one.step for one in job.manager.checkpoints()] == [2, 1]
    job.manager.close()


def test_batches_do_not_say_how_far_a_cursor_is_used(tmp_path: Path) -> None:
    cursor = Cursor()
    manager = manager_of(tmp_path, input=cursor)
    cursor.advance(2)
    with pytest.raises(sp.RequestError, match=r"cursor.commit"):
        manager.after_update(batches=1)
    cursor.commit(1)
    manager.after_update(batches=1)
    assert cursor.uncommitted == 1
    manager.close()


def test_what_a_start_draws_at_an_epochs_begin_is_told(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    job = build(tmp_path)
    for batch in job.loader:
        step(job, batch)
        job.manager.after_update()
    job.manager.end_epoch()
    job.manager.save()
    job.manager.close()
    job = build(tmp_path)
    job.manager.restore()
    torch.rand(3)
    next(job.manager.batches(job.loader))
    assert any("random streams moved" in one for one in caplog.messages)
    job.manager.close()


def test_a_manager_that_could_not_be_made_leaves_no_hook(tmp_path: Path) -> None:
    from torch.optim import optimizer as module

    StepMonitor({}).close()  # takes off what dropped managers of other tests left
    before = len(module._global_optimizer_post_hooks), len(module._global_optimizer_pre_hooks)
    model = torch.nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for bad in ({"bad": object()}, {}):
        with pytest.raises(sp.RequestError):
            items = {"model": model, "optimizer": optimizer, **bad}
            sp.CheckpointManager(tmp_path, items, config=None if bad else object())
    StepMonitor({}).close()
    assert (len(module._global_optimizer_post_hooks), len(module._global_optimizer_pre_hooks)) == before


def test_an_object_that_cannot_be_registered_can_be_tried_again(tmp_path: Path) -> None:
    manager = manager_of(tmp_path, loop={})
    optimizer = torch.optim.SGD(torch.nn.Linear(1, 1).parameters(), lr=0.1)
    optimizer.param_groups[0]["weird"] = object()
    model = torch.nn.Linear(1, 1)
    optimizer.add_param_group({"params": list(model.parameters()), "weird": 1})
    for _ in range(2):
        with pytest.raises(sp.RequestError) as caught:
            manager.register("optimizer", optimizer)
        assert "is taken" not in str(caught.value)
    assert bits(manager.progress) == bits(sp.Progress())
    manager.close()
