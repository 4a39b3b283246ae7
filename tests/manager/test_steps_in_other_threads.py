"""A step in another thread than the one that saves waits until the boundary is left."""

from __future__ import annotations

import contextlib
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import safepoint as sp
from safepoint import behind
from safepoint.saving import live

LONGEST_WAIT_S = 60


@pytest.mark.parametrize("background", [True, False])
def test_a_step_in_another_thread_waits_while_the_boundary_is_saved(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, background: bool
) -> None:
    """A fused one, of which no count of writes tells."""
    weights = nn.ParameterList([nn.Parameter(torch.zeros(100)) for _ in range(4)])
    optimizer = torch.optim.SGD(weights, lr=1.0, fused=True)
    manager = sp.CheckpointManager(tmp_path, {"weights": weights, "optimizer": optimizer}, background=background)
    manager.restore()
    for one in weights:
        one.grad = -torch.ones(100)
    optimizer.step()
    manager.after_update()
    has_stepped = threading.Event()

    def step() -> None:
        optimizer.step()
        has_stepped.set()

    stepper = threading.Thread(target=step)
    read = live.Live.bring

    def bring(*arguments: Any) -> None:
        if stepper.ident is None:
            stepper.start()
            has_stepped.wait(0.2)
        read(*arguments)

    monkeypatch.setattr(live.Live, "bring", bring)
    manager.save().wait(deadline_s=LONGEST_WAIT_S)
    stepper.join(LONGEST_WAIT_S)
    assert has_stepped.is_set() and {float(one.detach()[0]) for one in weights} == {2.0}
    manager.close()

    copy = nn.ParameterList([nn.Parameter(torch.empty(100)) for _ in range(4)])
    sp.open_run(str(tmp_path)).load({"weights": copy})
    assert torch.cat(list(copy)).unique().tolist() == [1.0]


class Guarded:
    """Tell a state under a lock that the thread which trains holds as well."""

    def __init__(self) -> None:
        self.lock, self.is_asked = threading.Lock(), threading.Event()

    def state_dict(self) -> dict[str, int]:
        self.is_asked.set()
        with self.lock:
            return {"value": 1}

    def load_state_dict(self, state: dict[str, int]) -> None:
        pass


@pytest.mark.parametrize("background", [True, False])
def test_a_step_that_holds_a_lock_which_the_save_needs_goes_on_and_the_save_is_torn(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, background: bool
) -> None:
    monkeypatch.setattr(behind, "_PATIENCE_S", 0.1)
    weights = nn.ParameterList([nn.Parameter(torch.zeros(100))])
    optimizer, guarded = torch.optim.SGD(weights, lr=1.0, fused=True), Guarded()
    state = {"weights": weights, "optimizer": optimizer, "guarded": guarded}
    manager = sp.CheckpointManager(tmp_path, state, background=background)
    manager.restore()
    weights[0].grad = -torch.ones(100)
    optimizer.step()
    manager.after_update()
    guarded.is_asked.clear()

    def step() -> None:
        with guarded.lock:
            holds.set()
            assert guarded.is_asked.wait(LONGEST_WAIT_S)
            optimizer.step()

    holds, stepper = threading.Event(), threading.Thread(target=step)
    stepper.start()
    assert holds.wait(LONGEST_WAIT_S)
    with pytest.raises(sp.TornSnapshotError, match="another thread stepped"):
        manager.save().wait(deadline_s=LONGEST_WAIT_S)
    stepper.join(LONGEST_WAIT_S)
    with pytest.raises(sp.TornSnapshotError) if background else contextlib.nullcontext():
        manager.close()
    assert not list(tmp_path.glob("generations/*/manifest.json"))
