"""A step in another thread than the one that saves waits until the boundary is left."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import safepoint as sp
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
