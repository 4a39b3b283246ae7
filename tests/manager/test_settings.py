"""Settings of optimizers and schedules: a change is refused, and either side wins on request."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import safepoint as sp
from tests.manager.jobs import build, die, refused, train


class Tuned:
    """A start whose optimizer is configured otherwise than that of the save."""

    def __init__(self, url: Path, *, schedule: bool, contract: sp.Contract | None = None, **settings: Any) -> None:
        torch.manual_seed(1)
        self.model = nn.Linear(2, 1)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), **{"lr": 0.1, "weight_decay": 0.01, **settings})
        items: dict[str, object] = {"model": self.model, "optimizer": self.optimizer}
        if schedule:
            self.schedule = torch.optim.lr_scheduler.CosineAnnealingLR(self.optimizer, 20)
            items["scheduler"] = self.schedule
        self.has_schedule = schedule
        self.manager = sp.CheckpointManager(url, items, contract=contract)

    def train(self, until: int) -> float:
        while self.manager.progress.step < until:
            self.optimizer.zero_grad()
            self.model(torch.ones(1, 2)).sum().backward()
            self.optimizer.step()
            if self.has_schedule:
                self.schedule.step()
            self.manager.after_update()
        return float(self.optimizer.param_groups[0]["lr"])


@pytest.mark.parametrize("schedule", [False, True])
def test_a_changed_rate_is_refused_and_either_side_wins_on_request(tmp_path: Path, schedule: bool) -> None:
    """Field reports B81, B82."""
    whole = Tuned(tmp_path / "whole", schedule=schedule)
    rates = [whole.train(step) for step in range(1, 9)]
    other = Tuned(tmp_path / "other", schedule=schedule, lr=0.2)
    others = [other.train(step) for step in range(1, 9)]
    job = Tuned(tmp_path / "run", schedule=schedule)
    job.train(4)
    job.manager.save()
    job.manager.close()

    job = Tuned(tmp_path / "run", schedule=schedule, lr=0.2)
    with pytest.raises(sp.ContractError) as caught:
        job.manager.restore()
    assert "optimizer.lr" in {one.word for one in caught.value.differences}
    assert job.optimizer.param_groups[0]["lr"] == 0.2 and not job.optimizer.state
    words = {one.word for one in caught.value.differences}

    permit = [sp.permit(word, keep="saved") for word in words]
    job = Tuned(tmp_path / "run", schedule=schedule, lr=0.2, contract=sp.Contract(permit=permit))
    report = job.manager.restore()
    assert report.promise.level == "same_data"
    assert ("0.1", "0.2") in {(one.saved, one.current) for one in report.reasons}
    assert [job.optimizer.param_groups[0]["lr"], *(job.train(step) for step in range(5, 9))] == rates[3:]
    job.manager.close()

    permit = [sp.permit(word, keep="current") for word in words]
    job = Tuned(tmp_path / "run", schedule=schedule, lr=0.2, contract=sp.Contract(permit=permit))
    job.manager.restore()
    found = [job.optimizer.param_groups[0]["lr"], *(job.train(step) for step in range(5, 9))]
    assert found == pytest.approx(others[3:], rel=1e-12)
    job.manager.close()


def test_a_bare_word_for_a_hyper_parameter_keeps_the_current_value(tmp_path: Path) -> None:
    """Field report B81."""
    job = Tuned(tmp_path, schedule=False)
    job.train(2)
    job.manager.save()
    job.manager.close()
    job = Tuned(tmp_path, schedule=False, weight_decay=0.5, contract=sp.Contract(permit={"optimizer.weight_decay"}))
    report = job.manager.restore()
    assert job.optimizer.param_groups[0]["weight_decay"] == 0.5
    assert [(one.word, one.saved, one.current) for one in report.reasons] == [("optimizer.weight_decay", "0.01", "0.5")]
    job.manager.close()


def test_a_schedule_at_work_is_no_change_of_the_rate(tmp_path: Path) -> None:
    job = Tuned(tmp_path, schedule=True)
    assert job.train(5) < 0.1
    job.manager.save()
    job.manager.close()
    job = Tuned(tmp_path, schedule=True)
    assert job.manager.restore().reasons == ()
    job.manager.close()


def horizon(url: Path, length: int, **options: Any) -> Any:
    return build(url, seed=2, scheduler=lambda one: torch.optim.lr_scheduler.CosineAnnealingLR(one, length), **options)


def test_a_changed_horizon_is_refused_and_either_side_wins_on_request(tmp_path: Path) -> None:
    """Field report B82."""
    job = horizon(tmp_path, 10)
    train(job, 5)
    saved_rate = job.optimizer.param_groups[0]["lr"]
    job.manager.save()
    die(job)
    longer = horizon(tmp_path / "longer", 40)
    train(longer, 5)

    error = refused(horizon(tmp_path, 40))
    assert [(one.word, one.saved, one.current) for one in error.differences] == [("scheduler", "10", "40")]

    job = horizon(tmp_path, 40, contract=sp.Contract(permit=[sp.permit("scheduler", keep="saved")]))
    assert job.manager.restore().promise.level == "same_data"
    assert job.scheduler.T_max == 10 and job.optimizer.param_groups[0]["lr"] == saved_rate
    die(job)

    job = horizon(tmp_path, 40, contract=sp.Contract(permit=[sp.permit("scheduler", keep="current")]))
    report = job.manager.restore()
    assert job.scheduler.T_max == 40 and job.scheduler.last_epoch == 5
    assert job.optimizer.param_groups[0]["lr"] == pytest.approx(longer.optimizer.param_groups[0]["lr"], rel=1e-12)
    assert any("T_max" in text for text in report.left_fresh)
    die(job)


def test_a_schedule_that_is_added_on_resume_keeps_what_it_wrote_into_the_optimizer(tmp_path: Path) -> None:
    """It writes the first rate into each group when it is made, which the checkpoint of the optimizer does not know."""
    job = Tuned(tmp_path, schedule=False)
    job.train(2)
    job.manager.save()
    job.manager.close()
    contract = sp.Contract(level="approximate", permit={"scheduler.added"})
    job = Tuned(tmp_path, schedule=True, contract=contract)
    assert job.manager.restore().step == 2
    assert job.optimizer.param_groups[0]["initial_lr"] == 0.1
    assert all(value["step"] == 2 for value in job.optimizer.state.values())
    job.train(4)
    job.manager.save()
    job.manager.close()
    job = Tuned(tmp_path, schedule=True)
    assert job.manager.restore().promise.level == "exact"
    job.manager.close()
