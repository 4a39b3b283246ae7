"""A boundary that is saved although an exception ends the training: where it is safe, and nowhere else."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import safepoint as sp
from safepoint.storage.local import LocalStorage
from tests.manager.jobs import Died, Job, build, picture, step, train


def steps(root: Path) -> list[int]:
    return [one.step for one in sp.open_run(root).checkpoints()]


def fail_after(job: Job, until: int, act: Callable[[Job], object] = lambda job: None) -> None:
    """Train to a boundary in a block, do something there, and leave the block by an exception."""
    with pytest.raises(Died), job.manager as manager:
        manager.restore()
        train(job, until)
        act(job)
        raise Died


def test_a_boundary_where_nothing_has_moved_is_saved_and_goes_on_exactly(tmp_path: Path) -> None:
    whole = build(tmp_path / "whole")
    train(whole, 9)
    fail_after(build(tmp_path / "run", on_exception="save"), 4)
    job = build(tmp_path / "run", seed=1)
    report = job.manager.restore()
    assert (report.step, report.promise.level) == (4, "exact")
    train(job, 9)
    assert picture(job) == picture(whole)


def test_it_is_left_out_unless_it_is_asked_for(tmp_path: Path) -> None:
    fail_after(build(tmp_path), 4)
    assert steps(tmp_path) == []


def next_batch(job: Job) -> Any:
    return next(iter(job.loader))


@pytest.mark.parametrize(
    ("act", "why"),
    [
        (next_batch, "a batch of 'data' was handed out"),
        (lambda job: step(job, next_batch(job)), "a batch of 'data' was handed out"),
        (lambda job: job.optimizer.step(), "an optimizer has stepped"),
        (lambda job: job.manager.after_microbatch(), "1 microbatches since the last update"),
        (lambda job: torch.rand(1), "random numbers ("),
        (lambda job: job.model.body[1].running_mean.add_(1), "'model' was written to"),
    ],
    ids=["batch", "update", "step", "microbatch", "stream", "tensor"],
)
def test_what_is_not_the_boundary_any_more_is_not_saved_and_says_why(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, act: Callable[[Job], object], why: str
) -> None:
    with caplog.at_level(logging.WARNING, logger="safepoint"):
        fail_after(build(tmp_path, on_exception="save"), 4, act)
    assert steps(tmp_path) == []
    assert f"step 4 is not saved after Died: {why}" in caplog.text


def test_a_boundary_that_is_saved_already_is_not_saved_again(tmp_path: Path) -> None:
    fail_after(build(tmp_path, on_exception="save", save=sp.every(updates=4)), 4)
    assert steps(tmp_path) == [4]
    fail_after(build(tmp_path, on_exception="save"), 4)
    assert steps(tmp_path) == [4]


def test_an_error_of_safepoint_is_no_reason_to_save(tmp_path: Path) -> None:
    job = build(tmp_path, on_exception="save")
    with pytest.raises(sp.RequestError), job.manager as manager:
        manager.restore()
        train(job, 2)
        manager.end_epoch()
    assert steps(tmp_path) == []


def test_an_interrupt_is_an_exception_like_others(tmp_path: Path) -> None:
    job = build(tmp_path, on_exception="save")
    with pytest.raises(KeyboardInterrupt), job.manager as manager:
        manager.restore()
        train(job, 3)
        raise KeyboardInterrupt
    assert steps(tmp_path) == [3]


class Interrupting:
    """Raise an interrupt at one call of a storage, counted from 0."""

    def __init__(self, root: Path) -> None:
        self._inner = LocalStorage(root)
        self.left: int | None = None

    def __getattr__(self, name: str) -> Any:
        # The heart beats in a thread of its own.
        if self.left is not None and threading.current_thread() is threading.main_thread():
            self.left -= 1
            if self.left < 0:
                self.left = None
                raise KeyboardInterrupt
        return getattr(self._inner, name)


def test_an_interrupt_at_any_call_of_a_save_leaves_whole_checkpoints_and_a_manager_that_saves(tmp_path: Path) -> None:
    storage: Any = Interrupting(tmp_path)
    state = {"step": 0}
    with sp.CheckpointManager(tmp_path, {"state": state}, storage=storage, keep=sp.keep(last=2)) as manager:
        manager.restore()
        for call in range(24):
            state["step"] += 1
            manager.after_update()
            storage.left = call
            with pytest.raises(KeyboardInterrupt):
                manager.save()
            state["step"] += 1
            manager.after_update()
            manager.save()
            assert manager.checkpoints()[0].step == state["step"]
    found = {"step": -1}
    for one in sp.open_run(tmp_path).checkpoints():
        sp.open_run(tmp_path).load({"state": found}, step=one.step)
        assert found["step"] == one.step
