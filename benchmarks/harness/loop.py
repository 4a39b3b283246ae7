"""A training loop with one save in it, measured step by step."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from harness.background import NAMES, Background, BarrierClock, Landing, make
from harness.rounds import timed
from harness.states import Training


@dataclass(slots=True)
class Lap:
    """Hold what one lap took, in seconds: each step, the call that saves, the waits before updates, the whole save."""

    steps: list[float] = field(default_factory=list)
    call: float = 0.0
    barrier: float = 0.0
    complete: float = 0.0

    def quantities(self) -> dict[str, float]:
        """Return what is compared: of a lap without a save its steps, of a save without further steps no steps."""
        found = {"steps_total": sum(self.steps)} if self.steps else {}
        if not self.complete:
            return found
        return {**found, "call": self.call, "blocked": self.call + self.barrier, "complete": self.complete}


def drive(training: Training, clock: BarrierClock, background: Background | None, *, steps: int) -> Lap:
    """Make an update, save behind it, and make so many further updates; then wait until the save has ended.

    A step begins with the forward pass and ends with the update; the call that saves belongs to the first one.
    """
    lap, landing = Lap(), None
    training.compute()
    training.optimizer.step()
    clock.take()
    for number in range(steps):
        started = time.perf_counter()
        if number == 0 and background is not None:
            wait = background.begin()
            lap.call = time.perf_counter() - started
            landing = Landing().follow(wait)
        training.compute()
        if background is not None:
            lap.barrier += timed(background.before_update)["seconds"]
        training.optimizer.step()
        lap.barrier += clock.take()
        lap.steps.append(time.perf_counter() - started)
        if number == 0:
            begun = started
    if landing is not None:
        lap.complete = landing.wait() - begun
    return lap


def meet_update(training: Training, clock: BarrierClock, background: Background) -> Lap:
    """Save, and make the next update at once: there is nothing to hide a copy behind."""
    lap = Lap()
    training.optimizer.step()
    clock.take()
    started = time.perf_counter()
    wait = background.begin()
    lap.call = time.perf_counter() - started
    lap.barrier = timed(background.before_update)["seconds"]
    landing = Landing().follow(wait)
    training.optimizer.step()
    lap.barrier += clock.take()
    lap.complete = landing.wait() - started
    return lap


def open_all(folder: Path, training: Training) -> tuple[list[Background], dict[str, str]]:
    """Return every way to save in the background that can be had, and why the others cannot."""
    found, absent = [], {}
    tensors = training.tensors()
    for name in NAMES:
        try:
            found.append(make(name, folder, training.items, tensors))
        except ImportError as exc:
            absent[name] = f"cannot be imported: {exc}"
    return found, absent


def lengthen(training: Training, *, least_s: float) -> float:
    """Give the training so many tokens that a forward and backward pass lasts so long; return how long it lasts."""
    training.compute()
    while True:
        found = statistics.median(_seconds(training.compute) for _ in range(3))
        if found >= least_s:
            return found
        training.tokens *= 2


def _seconds(action: Callable[[], object]) -> float:
    return timed(action)["seconds"]
