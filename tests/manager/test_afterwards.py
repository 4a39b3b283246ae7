"""What a script does between a save and the next batch: a resumed run does not do it, and that is said."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch.utils.data import DataLoader

import safepoint as sp
from safepoint.data import ResumableLoader
from tests.manager.jobs import Points

UPDATES = 4


def run(url: Path, after: Callable[[torch.nn.Module], object], *, loader: object, contract: sp.Contract) -> str:
    """Train inside one epoch, saving at every second update, and return the promise of a resume from the last save."""
    for is_resumed in (False, True):
        model = torch.nn.Linear(4, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        items = {"model": model, "optimizer": optimizer, "data": loader}
        with sp.CheckpointManager(url, items, save=sp.every(updates=2), contract=contract) as manager:
            report = manager.restore()
            if is_resumed:
                assert report.step == UPDATES
                return str(report.promise.level)
            for values, _ in manager.batches(loader):  # type: ignore[var-annotated, arg-type]
                model(values).sum().backward()
                optimizer.step()
                optimizer.zero_grad()
                manager.after_update()
                if manager.progress.step == UPDATES:
                    break
                after(model)
    raise AssertionError("unreachable")


def own_loader() -> object:
    return ResumableLoader(Points(), 2, seed=0)


def written_to(model: torch.nn.Module) -> None:
    with torch.no_grad():
        next(model.parameters()).clamp_(-1, 1)


@pytest.mark.parametrize(
    ("after", "word"),
    [(lambda model: torch.rand(1), "rng.late"), (written_to, "model.late")],
    ids=["drawn", "written to"],
)
@pytest.mark.parametrize("kind", ["own", "stateful"])
def test_what_moves_after_a_save_inside_an_epoch_lowers_the_promise_of_the_next(
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    after: Callable[[torch.nn.Module], object],
    word: str,
    kind: str,
) -> None:
    stateful = pytest.importorskip("torchdata.stateful_dataloader").StatefulDataLoader
    loader = own_loader() if kind == "own" else stateful(Points(), 2)
    with pytest.raises(sp.ContractError) as caught:
        run(tmp_path, after, loader=loader, contract=sp.Contract())
    assert [one.word for one in caught.value.differences] == [word]
    assert sum("will not be the same" in one for one in caplog.messages) == 1


def test_a_run_that_does_nothing_there_is_exact(tmp_path: Path) -> None:
    assert run(tmp_path, lambda model: None, loader=own_loader(), contract=sp.Contract()) == "exact"


def test_a_draw_after_the_save_can_be_permitted(tmp_path: Path) -> None:
    contract = sp.Contract(permit={"rng.late"})
    assert run(tmp_path, lambda model: torch.rand(1), loader=own_loader(), contract=contract) == "same_data"


def test_a_restore_begins_anew_and_plain_loaders_of_torch_draw_for_themselves(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """What a loader draws while it is asked for a batch belongs to the batch."""
    model = torch.nn.Linear(4, 1)
    loader = DataLoader(Points(), 2, shuffle=True)  # type: ignore[arg-type]
    with sp.CheckpointManager(tmp_path, {"model": model}, save=sp.every(updates=1)) as manager:
        manager.restore()
        for _ in manager.epochs(2):
            for _ in manager.batches(loader):
                manager.after_update()
        torch.rand(1)
        manager.restore()
    assert not any("will not be the same" in one for one in caplog.messages)
