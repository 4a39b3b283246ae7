"""Counting the steps of registered optimizers, and a guard in front of each.

Hooks on the optimizers' own step are the only reliable sign that parameters change: fused kernels do not advance a
tensor's version. torch keeps these hooks for the whole process, so they refer to their monitor weakly: a monitor that
is dropped without `close` keeps no object alive, and the next monitor takes its hooks off.

A registered optimizer may wrap another one, which then steps in its place: they share their list of groups.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from safepoint.errors import RequestError
from safepoint.state.item import Owned
from safepoint.state.memory import ranges_of
from safepoint.state.shards import local_of, memories_of
from safepoint.state.tensors import is_distributed

# Hooks whose monitor was dropped. Its finalizer may run wherever the garbage collector does, also while torch iterates
# over its hooks, so it must not take them off itself.
_ABANDONED: list[Any] = []


class StepMonitor:
    """Count how often each registered optimizer has stepped since the last `reset`.

    Args:
        optimizers: The live optimizers by name. The mapping itself is kept: what is added to it later is counted too.
    """

    def __init__(self, optimizers: Mapping[str, torch.optim.Optimizer]) -> None:
        self._optimizers = optimizers
        self._counts: dict[str, int] = {}
        self._stepped: dict[str, torch.optim.Optimizer] = {}
        self._guards: list[Callable[[], object]] = []
        self._barriers: list[Callable[[], object]] = []
        _remove_all(_ABANDONED)
        self._hooks = _install(weakref.ref(self))
        self._abandon = weakref.finalize(self, _ABANDONED.extend, self._hooks)

    def counts(self) -> dict[str, int]:
        """Return the number of steps of each registered optimizer since the last `reset`, zeros included."""
        return {name: self._counts.get(name, 0) for name in self._optimizers}

    def check_not_moved(self, step: int) -> None:
        """Raise `RequestError` when an optimizer has stepped since the boundary of a step."""
        moved = {name: count for name, count in self.counts().items() if count}
        if moved:
            raise RequestError(
                "an optimizer has stepped since the last boundary, so the state is of no boundary",
                where=", ".join(moved),
                expected=f"the state after update {step}",
                found=", ".join(f"{count} more steps of {name!r}" for name, count in moved.items()),
                remedy="Call after_update() after each optimizer step and before saving.",
            )

    def reset(self) -> None:
        """Begin to count anew, at a boundary."""
        self._stepped = {name: one for name, one in self._optimizers.items() if self._counts.get(name)}
        self._counts.clear()

    def owned(self) -> Owned:
        """Return what belongs to the optimizers that were seen to step in the update that ended with the last `reset`.

        Not to others: what changes their parameters was not seen, such as the replay of a graph.
        """
        parameters = [
            one for optimizer in self._stepped.values() for group in optimizer.param_groups for one in group["params"]
        ]
        ranges = sorted(set(ranges_of(memories_of(parameters))))
        return Owned(frozenset(self._stepped), tuple(begin for begin, _ in ranges), tuple(end for _, end in ranges))

    def owned_bytes(self, *, world_size: int) -> int:
        """Return about how much this rank writes of what registered optimizers own: its parts, a share of the rest."""
        tensors = [one for optimizer in self._optimizers.values() for one in _tensors_of(optimizer)]
        return sum(
            local_of(one).nbytes if is_distributed(one) else one.nbytes // world_size
            for one in tensors
            if one.layout == torch.strided
        )

    def guard(self, callback: Callable[[], object], *, barrier: Callable[[], object] = lambda: None) -> None:
        """Call `callback` before each step of a registered optimizer; an exception from it prevents the step.

        `barrier` is called before that, and before each step of any other optimizer of this process, in its thread.
        """
        self._barriers.append(barrier)
        self._guards.append(callback)

    def close(self) -> None:
        """Take all hooks off. Idempotent."""
        self._abandon.detach()
        _remove_all(self._hooks)

    def before_step(self, optimizer: torch.optim.Optimizer) -> None:
        """Call the barriers and, if the optimizer is registered, the guards."""
        for callback in self._barriers:
            callback()
        if self._name_of(optimizer) is not None:
            for callback in self._guards:
                callback()

    def after_step(self, optimizer: torch.optim.Optimizer) -> None:
        """Count a step, if the optimizer is registered."""
        name = self._name_of(optimizer)
        if name is not None:
            self._counts[name] = self._counts.get(name, 0) + 1

    def _name_of(self, optimizer: torch.optim.Optimizer) -> str | None:
        """Return the name of a registered optimizer, or of one that has its groups; None for another one."""
        for name, one in self._optimizers.items():
            if one is optimizer or one.param_groups is optimizer.param_groups:
                return name
        return None


def _tensors_of(optimizer: torch.optim.Optimizer) -> Iterator[torch.Tensor]:
    for group in optimizer.param_groups:
        yield from group["params"]
    for state in optimizer.state.values():
        yield from (one for one in (state.values() if isinstance(state, dict) else ()) if isinstance(one, torch.Tensor))


def _install(monitor: weakref.ref[StepMonitor]) -> list[Any]:
    def before(optimizer: torch.optim.Optimizer, args: object, kwargs: object) -> None:
        alive = monitor()
        if alive is not None:
            alive.before_step(optimizer)

    def after(optimizer: torch.optim.Optimizer, args: object, kwargs: object) -> None:
        alive = monitor()
        if alive is not None:
            alive.after_step(optimizer)

    return [register_optimizer_step_pre_hook(before), register_optimizer_step_post_hook(after)]


def _remove_all(handles: list[Any]) -> None:
    while handles:
        handles.pop().remove()
