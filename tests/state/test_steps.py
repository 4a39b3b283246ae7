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


class Wrapper(torch.optim.Optimizer):
    """An optimizer that leaves all to another one, as Accelerate makes them: it has no step of its own to hook."""

    def __init__(self, inner: torch.optim.Optimizer) -> None:
        self.inner = inner

    @property
    def param_groups(self) -> list[dict[str, object]]:
        return self.inner.param_groups

    def step(self, closure: None = None) -> None:
        self.inner.step(closure)


def test_steps_of_an_optimizer_in_a_registered_wrapper_are_those_of_the_wrapper() -> None:
    parameter = torch.nn.Parameter(torch.ones(1))
    wrapped, other = Wrapper(torch.optim.SGD([parameter])), Wrapper(torch.optim.SGD([parameter]))
    monitor, guarded = StepMonitor({"wrapped": wrapped}), []
    monitor.guard(lambda: guarded.append(1))
    wrapped.step()
    other.step()
    assert (monitor.counts(), guarded) == ({"wrapped": 1}, [1])
    monitor.reset()
    assert monitor.owned().optimizers == frozenset({"wrapped"})
    monitor.close()


def hooks_without_abandoned() -> int:
    """The next monitor takes off what dropped ones left."""
    gc.collect()
    StepMonitor({}).close()
    return hook_count()


def test_a_monitor_that_is_dropped_has_its_hooks_taken_off_by_the_next() -> None:
    before = hooks_without_abandoned()
    monitor = StepMonitor({})
    monitor.guard(monitor.reset)
    assert hook_count() == before + 2
    del monitor
    assert hooks_without_abandoned() == before


def test_a_monitor_that_is_collected_in_the_middle_of_a_step_does_not_disturb_it() -> None:
    before = hooks_without_abandoned()
    monitors = [StepMonitor({})]
    monitors[0].guard(monitors[0].reset)

    def collect(*_: object) -> None:
        monitors.clear()
        gc.collect()

    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(1))])
    handles = [torch_optimizer.register_optimizer_step_post_hook(one) for one in (collect, collect)]
    optimizer.step()
    for handle in handles:
        handle.remove()
    assert not monitors and hooks_without_abandoned() == before


def test_a_manager_that_is_dropped_without_close_keeps_no_model_alive(tmp_path: Path) -> None:
    before = hooks_without_abandoned()
    model = torch.nn.Linear(1, 1)
    manager = CheckpointManager(tmp_path, {"model": model, "optimizer": torch.optim.SGD(model.parameters())})
    seen = weakref.ref(model)
    del model, manager
    assert hooks_without_abandoned() == before
    assert seen() is None


def test_a_manager_that_cannot_be_made_keeps_no_model_alive(tmp_path: Path) -> None:
    before = hooks_without_abandoned()
    model = torch.nn.Linear(1, 1)
    seen = weakref.ref(model)
    with pytest.raises(RequestError):
        CheckpointManager(tmp_path, {"model": model, "number": 3})
    del model
    assert hooks_without_abandoned() == before
    assert seen() is None
