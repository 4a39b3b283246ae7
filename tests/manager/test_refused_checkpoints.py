"""Checkpoints of which it is known at the save that the contract refuses them: what is told of them, and what stays."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

import safepoint as sp
from safepoint.cli import main

# Eight batches make an epoch, and each fourth update is saved: every second save lies at an epoch's end, and those in
# between cannot tell where the loader is.
EPOCH = 8
INTERVAL = 4


def manager_of(run: Path, *, interval: int = INTERVAL, **options: Any) -> sp.CheckpointManager:
    torch.manual_seed(0)
    return sp.CheckpointManager(run, {"model": torch.nn.Linear(1, 1)}, save=sp.every(updates=interval), **options)


def train(run: Path, updates: int, **options: Any) -> None:
    """Train with a plain loader that shuffles, up to a step, and leave the epoch open there."""
    with manager_of(run, **options) as manager:
        manager.restore()
        data = torch.utils.data.TensorDataset(torch.arange(float(EPOCH)))
        loader = torch.utils.data.DataLoader(data, batch_size=1, shuffle=True)
        for _ in manager.epochs(100):
            for _ in manager.batches(loader):
                manager.after_update()
                if manager.progress.step == updates:
                    return


def test_ls_show_and_the_repair_plan_name_the_permit_that_a_start_will_need(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    train(run := tmp_path / "run", 3 * INTERVAL)
    told = "'data_position' (4 batches of this epoch came from a loader that is no item: its position is not saved)"
    capsys.readouterr()
    assert main(["ls", str(run)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert "needs permit" in lines[0]
    assert ["data_position" in line for line in lines[1:4]] == [True, False, True]
    assert lines[4:] == [
        f"resumes at step 12 only if the contract permits {told}",
        "step 8 needs no such permit: restore(step=8, branch=True)",
    ]
    assert main(["ls", str(run), "--json"]) == 0
    listing = json.loads(capsys.readouterr().out)
    assert listing["resumes_at"] == 12
    assert [list(entry["needs"]) for entry in listing["generations"]] == [["data_position"], [], ["data_position"]]
    assert main(["show", str(run)]) == 0
    head = capsys.readouterr().out.split("\n\n")[0].splitlines()
    assert head[-1].split(maxsplit=2) == ["needs", "permit", told]
    assert main(["verify", str(run), "--repair-plan", "--no-note"]) == 0
    plan = capsys.readouterr().out
    assert "the next start takes it, if its contract permits 'data_position'" in plan
    assert "older and good; restore(step=8, branch=True)  " in plan
    assert "a start resumes at step 12 only if its contract permits 'data_position'; no update is lost" in plan


def test_a_run_that_asked_for_less_needs_no_permit(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    train(run := tmp_path / "run", 3 * INTERVAL, contract=sp.Contract("approximate"))
    capsys.readouterr()
    assert main(["ls", str(run)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert "permit" not in lines[0] and lines[-1] == "resumes at step 12"


def test_a_refused_start_names_the_older_checkpoint_that_keeps_the_contract_and_how_to_take_it(tmp_path: Path) -> None:
    train(run := tmp_path / "run", 3 * INTERVAL)
    with manager_of(run) as manager, pytest.raises(sp.ContractError) as caught:
        manager.restore()
    assert [one.word for one in caught.value.differences] == ["data_position"]
    assert caught.value.remedy == (
        "Nothing was changed. Accept it with Contract(level='exact', permit={'data_position'}). "
        "Step 8, which is older, keeps it by what its record tells: restore(step=8, branch=True)."
    )
    with manager_of(run) as manager:
        report = manager.restore(step=8, branch=True)
        assert (report.step, report.promise.level) == (8, "exact")


def test_an_older_attempt_at_a_step_is_asked_for_by_its_name(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def manager_with_schedule() -> tuple[sp.CheckpointManager, torch.optim.lr_scheduler.StepLR]:
        model = torch.nn.Linear(1, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1)
        state = {"model": model, "optimizer": optimizer, "schedule": schedule}
        return sp.CheckpointManager(tmp_path / "run", state), schedule

    manager, schedule = manager_with_schedule()
    with manager:
        manager.restore()
        schedule.optimizer.step()
        manager.after_update()
        saved = manager.save().result
        schedule.step()
        manager.save()
    assert saved is not None
    name = saved.generation
    manager, _ = manager_with_schedule()
    with manager, pytest.raises(sp.ContractError, match=r"schedule\.late") as caught:
        manager.restore()
    assert caught.value.remedy.endswith(f"restore(step='{name}', branch=True).")
    capsys.readouterr()
    assert main(["ls", str(tmp_path / "run")]) == 0
    assert f"step 1 needs no such permit: restore(step='{name}', branch=True)" in capsys.readouterr().out
    manager, _ = manager_with_schedule()
    with manager:
        assert manager.restore(step=name, branch=True).promise.level == "exact"


def test_no_older_checkpoint_is_named_that_would_be_refused_as_well(tmp_path: Path) -> None:
    train(first := tmp_path / "first", INTERVAL)
    with manager_of(first) as manager, pytest.raises(sp.ContractError) as caught:
        manager.restore()
    assert "older" not in caught.value.remedy
    train(other := tmp_path / "other", 3 * INTERVAL, config={"width": 1})
    with manager_of(other, config={"width": 2}) as manager, pytest.raises(sp.ContractError) as caught:
        manager.restore()
    assert [one.word for one in caught.value.differences] == ["config", "data_position"]
    assert "older" not in caught.value.remedy


def test_of_another_run_the_older_checkpoint_is_named_as_a_source(tmp_path: Path) -> None:
    train(run := tmp_path / "run", 3 * INTERVAL)
    with manager_of(tmp_path / "next") as manager, pytest.raises(sp.ContractError) as caught:
        manager.restore(source=run)
    assert caught.value.remedy.endswith(f"restore(source='{run}@8').")


def steps(run: Path) -> list[int]:
    return [checkpoint.step for checkpoint in sp.open_run(run).checkpoints()]


@pytest.mark.parametrize("background", [False, True])
def test_what_the_contract_refuses_never_takes_the_place_of_the_newest_one_that_it_does_not(
    tmp_path: Path, background: bool
) -> None:
    """Spec: C12.9"""
    train(run := tmp_path / "run", 14, interval=2, keep=sp.keep(last=2), background=background)
    assert steps(run) == [14, 12, 8], "14 and 12 are the last two, and lie inside the second epoch"
    with manager_of(run) as manager, pytest.raises(sp.ContractError, match=r"restore\(step=8, branch=True\)"):
        manager.restore()
    with manager_of(run) as manager:
        assert manager.restore(step=8, branch=True).promise.level == "exact"
    train(longer := tmp_path / "longer", 18, interval=2, keep=sp.keep(last=2), background=background)
    assert steps(longer) == [18, 16], "the end of the second epoch is a newer one"


def test_retention_goes_by_the_permits_of_the_run_and_prune_by_what_is_recorded(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    contract = sp.Contract(permit={"data_position"})
    train(permitted := tmp_path / "permitted", 14, interval=2, keep=sp.keep(last=2), contract=contract)
    assert steps(permitted) == [14, 12]
    train(run := tmp_path / "run", 14, interval=2)
    capsys.readouterr()
    assert main(["prune", str(run), "--keep-last", "2", "--dry-run", "--json"]) == 0
    decisions = json.loads(capsys.readouterr().out)["decisions"]
    assert [entry["step"] for entry in decisions if entry["is_kept"]] == [14, 12, 8]
    assert decisions[3]["reasons"] == ["the newest that says nothing of itself that the contract refuses"]
