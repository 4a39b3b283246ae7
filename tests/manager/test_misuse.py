"""Calls that would make a run another one are refused, with what to do instead."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import safepoint as sp
from safepoint.data import Cursor
from safepoint.saving import live
from safepoint.state.tensors import TensorSource
from tests.manager.jobs import Died, bits, build, die, picture, train


class Plain:
    """A start without a loader."""

    def __init__(self, url: Path, **options: object) -> None:
        self.model = nn.Linear(2, 1)
        self.optimizer = torch.optim.Adam(self.model.parameters())
        self.manager = sp.CheckpointManager(
            url,
            {"model": self.model, "optimizer": self.optimizer},
            **options,  # type: ignore[arg-type]
        )

    def step(self) -> None:
        self.model(torch.ones(1, 2)).sum().backward()
        self.optimizer.step()


def test_a_save_after_a_step_without_its_boundary_names_the_numbers(tmp_path: Path) -> None:
    job = Plain(tmp_path)
    job.step()
    job.manager.after_update()
    job.step()
    job.step()

    with pytest.raises(sp.RequestError, match="2 more steps of 'optimizer'") as caught:
        job.manager.save()

    assert "after update 1" in str(caught.value) and "after_update()" in str(caught.value)
    job.manager.after_update()
    assert job.manager.save().committed
    job.manager.close()


def test_a_due_save_is_not_made_by_close_from_a_state_of_no_boundary(tmp_path: Path) -> None:
    """The end of an epoch leaves a save due; a step before `close` makes the state another one."""
    job = build(tmp_path, save=sp.every(updates=6))
    for _ in job.manager.epochs(2):
        for values, ids in job.manager.batches(job.loader):
            (job.model(values) - ids).square().mean().backward()
            job.optimizer.step()
            job.manager.after_update()
        break
    job.optimizer.step()
    with pytest.raises(sp.RequestError, match="1 more steps"):
        job.manager.close()
    assert job.manager.checkpoints() == []


def test_training_on_a_run_with_checkpoints_without_a_restore_is_refused_at_the_first_boundary(tmp_path: Path) -> None:
    """Field report B138."""
    job = build(tmp_path, save=sp.every(updates=2))
    train(job, 2)
    die(job)
    before = sorted((tmp_path / "generations").iterdir())

    job = build(tmp_path, seed=1)
    with pytest.raises(sp.RequestError, match=r"Call restore\(\)"):
        train(job, 1)
    job.manager.close()
    job = build(tmp_path, seed=1)
    with pytest.raises(sp.RequestError, match="restart=True"):
        job.manager.save()

    assert sorted((tmp_path / "generations").iterdir()) == before
    assert job.manager.restore().step == 2
    job.manager.close()


def test_restart_begins_anew_and_supersedes_what_there_was(tmp_path: Path) -> None:
    job = build(tmp_path, save=sp.every(updates=2))
    expected = train(job, 4)
    die(job)

    job = build(tmp_path, restart=True, save=sp.every(updates=2))
    report = job.manager.restore()
    assert report.is_fresh
    assert train(job, 3) == expected[:3]
    assert [one.step for one in job.manager.checkpoints()] == [2]
    # It begins anew once: a second restore goes back to what the new branch has.
    assert job.manager.restore().step == 2
    job.manager.close()


def test_a_restart_without_a_restore_begins_anew_too(tmp_path: Path) -> None:
    job = build(tmp_path, save=sp.every(updates=2))
    train(job, 4)
    die(job)
    job = build(tmp_path, restart=True, save=sp.every(updates=1))
    train(job, 1)
    job.manager.close()
    assert [one.step for one in job.manager.checkpoints()] == [1]


def test_an_older_step_is_only_taken_with_branch(tmp_path: Path) -> None:
    job = build(tmp_path, save=sp.every(updates=2))
    train(job, 4)
    die(job)
    job = build(tmp_path, seed=1)
    before = picture(job)
    with pytest.raises(sp.RequestError, match="branch=True") as caught:
        job.manager.restore(step=2)
    assert (caught.value.expected, caught.value.found) == ("step 4", "step 2")
    assert picture(job) == before
    with pytest.raises(sp.NotFoundError, match="steps 2, 4"):
        job.manager.restore(step=3)
    assert job.manager.restore(step=4).step == 4
    job.manager.close()


def test_closing_twice_is_closing_once_and_nothing_works_afterwards(tmp_path: Path) -> None:
    job = build(tmp_path)
    train(job, 1)
    job.manager.close()
    job.manager.close()
    for call in (job.manager.after_update, job.manager.save, job.manager.restore):
        with pytest.raises(sp.RequestError, match="the manager is closed"):
            call()
    assert not (tmp_path / "incarnations" / "000002.json").exists()
    again = build(tmp_path)
    again.manager.restore()
    again.manager.close()


def test_a_closed_manager_takes_its_hooks_off_every_optimizer(tmp_path: Path) -> None:
    job = Plain(tmp_path)
    job.manager.register("extra", {"n": 1})
    job.manager.save()
    job.manager.close()
    again = Plain(tmp_path)
    again.manager.restore(late=["extra"])
    with pytest.raises(sp.RequestError, match="late"):
        again.step()
    again.manager.close()
    again.step()


def test_two_managers_of_one_run_exclude_each_other_until_the_first_is_closed(tmp_path: Path) -> None:
    """Field reports B133, B138."""
    first = build(tmp_path)
    first.manager.restore()
    train(first, 1)
    second = build(tmp_path)
    with pytest.raises(sp.FencedError):
        second.manager.restore()
    first.manager.save()
    first.manager.close()

    assert second.manager.restore().step == 1
    second.manager.close()


def test_a_takeover_fences_the_first_manager_out(tmp_path: Path) -> None:
    first = build(tmp_path)
    train(first, 1)
    first.manager.save()
    second = build(tmp_path, seed=1, takeover=True)
    assert second.manager.restore().step == 1
    train(first, 2)

    with pytest.raises(sp.FencedError):
        first.manager.save()

    train(second, 2)
    second.manager.save()
    assert [one.step for one in second.manager.checkpoints()] == [2, 1]
    second.manager.close()


def test_an_exception_in_the_training_is_the_one_that_is_seen_and_the_run_is_let_go(tmp_path: Path) -> None:
    job = build(tmp_path, save=sp.every(updates=1), background=True)
    with pytest.raises(Died), job.manager:
        train(job, 2)
        raise Died
    assert [one.step for one in job.manager.checkpoints()] == [2, 1]
    again = build(tmp_path, seed=1)
    with again.manager:
        assert again.manager.restore().step == 2


def test_a_save_asked_for_inside_a_window_that_never_ends_is_told(tmp_path: Path) -> None:
    job = build(tmp_path)
    train(job, 1)
    job.manager.after_microbatch()
    handle = job.manager.save()
    with pytest.raises(sp.AbortedError, match=r"was not made.*update 2"):
        job.manager.close()
    with pytest.raises(sp.AbortedError, match="was not made"):
        handle.wait()


def test_a_save_that_an_error_in_the_training_prevents_ends_its_handle(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    job = build(tmp_path)
    train(job, 1)
    job.manager.after_microbatch()
    handle = job.manager.save()
    die(job)
    assert handle.done and not handle.committed
    assert any("was not made" in one and "update 2" in one for one in caplog.messages)


def test_an_iterator_made_before_a_restore_ends_with_an_error(tmp_path: Path) -> None:
    """Field report B10."""
    job = build(tmp_path, save=sp.every(updates=2))
    train(job, 3)
    die(job)
    job = build(tmp_path, seed=1)
    stale = iter(job.loader)
    job.manager.restore()
    with pytest.raises(sp.RequestError, match="a state was loaded"):
        next(stale)
    job.manager.close()


def test_metrics_are_stored_with_the_checkpoint_of_their_update(tmp_path: Path) -> None:
    job = build(tmp_path, save=sp.every(updates=1))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for step in (1, 2):
            job.manager.after_update(metrics={"loss": torch.tensor(0.5 / step, requires_grad=True), "n": step})
    assert [(one.step, one.metrics) for one in job.manager.checkpoints()] == [
        (2, {"loss": 0.25, "n": 2.0}),
        (1, {"loss": 0.5, "n": 1.0}),
    ]
    job.manager.close()


def test_an_optimizer_that_is_not_registered_counts_for_nothing(tmp_path: Path) -> None:
    job = Plain(tmp_path)
    other = nn.Linear(1, 1)
    foreign = torch.optim.SGD(other.parameters(), lr=0.1)
    job.manager.after_update()
    foreign.step()
    before = bits(dict(job.model.state_dict()))
    assert job.manager.save().committed
    assert bits(dict(job.model.state_dict())) == before
    job.manager.close()


@pytest.mark.parametrize(
    "counts, name",
    [
        ({"samples": -1}, "samples"),
        ({"tokens": 1.5}, "tokens"),
        ({"batches": True}, "batches"),
        ({"metrics": {"loss": "low"}}, "loss"),
        ({"metrics": {"loss": torch.ones(2)}}, "loss"),
    ],
)
def test_a_count_or_metric_that_is_none_is_refused_before_the_update_is_counted(
    tmp_path: Path, counts: dict[str, object], name: str
) -> None:
    job = build(tmp_path)
    job.manager.restore()
    with pytest.raises(sp.RequestError, match=name):
        job.manager.after_update(**counts)
    assert job.manager.progress == sp.Progress()
    job.manager.close()


def test_going_back_where_there_is_nothing_to_go_back_to_is_no_fresh_start(tmp_path: Path) -> None:
    job = build(tmp_path)
    job.manager.restore()
    train(job, 3)
    with pytest.raises(sp.NotFoundError, match="no checkpoint matches"):
        job.manager.restore()
    assert job.manager.progress.step == 3
    train(job, 4)
    job.manager.save()
    assert job.manager.restore().step == 4
    job.manager.close()


def test_an_object_that_could_not_be_registered_leaves_no_trace(tmp_path: Path) -> None:
    job = build(tmp_path)
    job.manager.save()
    job.manager.close()
    job = build(tmp_path, seed=1)
    job.manager.restore()
    cursor = Cursor()
    with pytest.raises(sp.MismatchError):
        job.manager.register("input", cursor)
    cursor.advance(5)

    assert job.manager.save().committed
    assert set(sp.open_run(tmp_path).manifest().items) == {"model", "optimizer", "scheduler", "data", "rng"}
    assert cursor.uncommitted == 5
    job.manager.close()


class Moody:
    """Raises in one of its two methods, when it is told to."""

    def __init__(self, *, tells: bool = True, takes: bool = True) -> None:
        self.tells, self.takes = tells, takes

    def state_dict(self) -> dict[str, int]:
        if not self.tells:
            raise KeyError("no state")
        return {"n": 1}

    def load_state_dict(self, state: dict[str, int]) -> None:
        if not self.takes:
            raise OSError("no file")


def test_what_the_users_own_code_raises_is_named_by_its_item(tmp_path: Path) -> None:
    entry = Moody()
    manager = sp.CheckpointManager(tmp_path, {"moody": entry})
    manager.save()
    entry.tells = False
    with pytest.raises(sp.RequestError, match=r"does not tell its state.*moody.*no state"):
        manager.save()
    manager.close()

    manager = sp.CheckpointManager(tmp_path, {"moody": Moody(takes=False)})
    with pytest.raises(sp.RequestError, match=r"did not take the state.*moody.*OSError: no file.*may hold a mixture"):
        manager.restore()
    manager.close()


@pytest.mark.parametrize("size", [4, 200])
def test_a_write_from_another_thread_while_the_state_is_copied_publishes_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, size: int
) -> None:
    """The other thread is played by a read that writes to the tensor: a real one may miss the moment.

    Small tensors are read many at once, others one by one.
    """
    model = torch.nn.Linear(size, size)
    manager = sp.CheckpointManager(tmp_path, {"model": model})
    manager.save()

    def writing(read: Callable[..., Any]) -> Callable[..., Any]:
        def interrupted(*args: Any) -> Any:
            with torch.no_grad():
                model.weight.add_(1)
            return read(*args)

        return interrupted

    monkeypatch.setattr(TensorSource, "in_place", writing(TensorSource.in_place))
    monkeypatch.setattr(live, "move_all", writing(live.move_all))
    with pytest.raises(sp.TornSnapshotError, match="model: weight"):
        manager.save()
    monkeypatch.undo()
    manager.close()
    assert [one.step for one in sp.open_run(tmp_path).checkpoints()] == [0]


@pytest.mark.parametrize(
    "wrong", [{"samples": 2**63}, {"tokens": None}, {"batches": -1}, {"samples": True}, {"tokens": 1.0}]
)
def test_a_count_that_no_checkpoint_could_hold_is_refused_before_it_is_counted(
    tmp_path: Path, wrong: dict[str, Any]
) -> None:
    with sp.CheckpointManager(tmp_path, {"loop": {"n": 0}}) as manager:
        with pytest.raises(sp.RequestError, match=f"counts whole things.*{next(iter(wrong))}"):
            manager.after_update(**wrong)
        assert manager.progress.step == 0
        manager.after_update(samples=2**40)
        manager.save()
    assert [one.step for one in sp.open_run(tmp_path).checkpoints()] == [1]
