"""A run that saves is the run that does not save."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

import safepoint as sp
from tests.manager.jobs import build, picture, streams, train


@pytest.mark.parametrize("background", [False, True])
def test_a_run_that_saves_at_every_update_ends_as_one_that_never_saves(tmp_path: Path, background: bool) -> None:
    """Field reports B26, B35."""
    silent = build(tmp_path / "silent")
    expected = train(silent, 12)
    after = picture(silent)

    saving = build(tmp_path / "saving", save=sp.every(updates=1), background=background)
    found = train(saving, 12)
    now = picture(saving)
    saving.manager.close()

    assert found == expected
    assert now == after
    assert [one.step for one in saving.manager.checkpoints()] == list(range(12, 0, -1))


def test_saving_an_optimizer_that_never_stepped_gives_it_no_state(tmp_path: Path) -> None:
    """Field report B97."""
    model = nn.Linear(3, 2)
    optimizer = torch.optim.Adam(model.parameters())
    manager = sp.CheckpointManager(tmp_path, {"model": model, "optimizer": optimizer})
    before = [one.detach().clone() for one in model.parameters()]

    manager.save()
    manager.close()

    assert optimizer.state_dict()["state"] == {}
    assert all(torch.equal(old, new) for old, new in zip(before, model.parameters(), strict=True))
    assert all(one.grad is None for one in model.parameters())


def test_saving_and_closing_draw_no_random_number(tmp_path: Path) -> None:
    job = build(tmp_path)
    train(job, 2)
    before = streams()

    job.manager.save()
    job.manager.save()
    job.manager.close()

    assert streams() == before


def test_a_probe_moves_no_random_stream(tmp_path: Path) -> None:
    job = build(tmp_path, probe=lambda: torch.rand(()))
    train(job, 2)
    before = streams()

    job.manager.save()

    assert streams() == before
    job.manager.close()
