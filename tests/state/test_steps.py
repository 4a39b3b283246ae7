"""Counting steps: hooks that hold nothing and go."""

from __future__ import annotations

import gc
import weakref
from pathlib import Path

import pytest
import torch
from torch.optim import optimizer as torch_optimizer

from safepoint.errors import RequestError
from safepoint.manager import CheckpointManager
from safepoint.state.steps import StepMonitor


def hook_count() -> int:
    return len(torch_optimizer._global_optimizer_pre_hooks) + len(torch_optimizer._global_optimizer_post_hooks)


def test_steps_of_registered_optimizers_are_counted_and_guarded() -> None:
    ours, other = (torch.optim.SGD([torch.nn.Parameter(torch.ones(1))]) for _ in range(2))
    monitor, guarded = StepMonitor({"ours": ours}), []
    monitor.guard(lambda: guarded.append(1))
    for optimizer in (ours, other, ours):
        optimizer.step()
    assert (monitor.counts(), guarded) == ({"ours": 2}, [1, 1])
    monitor.close()
    monitor.close()
    ours.step()
    assert (monitor.counts(), guarded) == ({"ours": 2}, [1, 1])


def test_a_monitor_that_is_dropped_takes_its_hooks_off() -> None:
    gc.collect()
    before = hook_count()
    monitor = StepMonitor({})
    monitor.guard(monitor.reset)
    assert hook_count() == before + 2
    del monitor
    gc.collect()
    assert hook_count() == before


def test_a_manager_that_is_dropped_without_close_keeps_no_model_alive(tmp_path: Path) -> None:
    gc.collect()
    before = hook_count()
    model = torch.nn.Linear(1, 1)
    manager = CheckpointManager(tmp_path, {"model": model, "optimizer": torch.optim.SGD(model.parameters())})
    seen = weakref.ref(model)
    del model, manager
    gc.collect()
    assert seen() is None and hook_count() == before


def test_a_manager_that_cannot_be_made_keeps_no_model_alive(tmp_path: Path) -> None:
    gc.collect()
    before = hook_count()
    model = torch.nn.Linear(1, 1)
    seen = weakref.ref(model)
    with pytest.raises(RequestError):
        CheckpointManager(tmp_path, {"model": model, "number": 3})
    del model
    gc.collect()
    assert seen() is None and hook_count() == before
