"""Data whose position nothing tells."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import safepoint as sp


def test_a_plain_loop_over_a_plain_loader_does_not_resume_as_the_same_run(tmp_path: Path) -> None:
    def begin() -> tuple[sp.CheckpointManager, torch.nn.Linear]:
        model = torch.nn.Linear(2, 1)
        return sp.CheckpointManager(tmp_path / "run", {"model": model}, save=sp.every(updates=2)), model

    manager, _ = begin()
    manager.restore()
    loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(torch.arange(8.0)), batch_size=2, shuffle=True)
    for (batch,) in loader:
        manager.after_update(samples=len(batch))
        if manager.progress.step == 3:
            break
    manager.close()
    manager, _ = begin()
    with pytest.raises(sp.ContractError) as caught:
        manager.restore()
    manager.close()
    assert [one.word for one in caught.value.differences] == ["data_position"]


def test_a_run_that_tells_no_position_in_its_data_is_told_so(tmp_path: Path) -> None:
    for is_told in (False, True):
        manager = sp.CheckpointManager(tmp_path / "run", {"counters": {"best": 0}}, save=sp.every(updates=1))
        report = manager.restore()
        assert any("position in the data" in note for note in report.notes) is is_told
        manager.after_update()
        manager.close()
