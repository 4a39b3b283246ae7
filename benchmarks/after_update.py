"""What does a boundary cost at which nothing is to be saved?

Prints JSON: microseconds per `after_update`, for a bare manager and with loader, optimizer, schedule and a metric, and
the ratio to an empty Python call in the same loop. Each number is the median of five rounds.

    python benchmarks/after_update.py
"""

from __future__ import annotations

import json
import os
import platform
import statistics
import tempfile
import time
from collections.abc import Callable

import torch

import safepoint as sp
from safepoint.data import ResumableLoader

ROUNDS = 5
CALLS = 2000


def nothing() -> None:
    """Stand for the loop itself."""


def microseconds(call: Callable[[], object]) -> float:
    """Return the median over rounds of the time of one call."""
    rounds = []
    for _ in range(ROUNDS):
        started = time.perf_counter()
        for _ in range(CALLS):
            call()
        rounds.append((time.perf_counter() - started) / CALLS * 1e6)
    return statistics.median(rounds)


def bare(url: str) -> tuple[sp.CheckpointManager, Callable[[], object]]:
    """Return a manager of one dict, and its boundary."""
    manager = sp.CheckpointManager(url, {"loop": {"n": 0}})
    return manager, manager.after_update


def usual(url: str) -> tuple[sp.CheckpointManager, Callable[[], object]]:
    """Return a manager of what a training has, and its boundary with a metric."""
    model = torch.nn.Linear(64, 64)
    optimizer = torch.optim.AdamW(model.parameters())
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 1000)
    loader = ResumableLoader(range(1 << 20), 32, seed=0)
    items = {"model": model, "optimizer": optimizer, "scheduler": schedule, "data": loader}
    manager = sp.CheckpointManager(url, items, save=sp.every(updates=1 << 40, minutes=1 << 20))
    loss = torch.tensor(0.5)
    return manager, lambda: manager.after_update(samples=32, metrics={"loss": loss})


def main() -> None:
    """Measure and print."""
    torch.set_num_threads(1)
    empty = microseconds(nothing)
    found: dict[str, object] = {"empty_call_us": round(empty, 3)}
    for name, make in (("bare", bare), ("usual", usual)):
        with tempfile.TemporaryDirectory() as folder:
            manager, call = make(folder)
            taken = microseconds(call)
            manager.close()
        found[name] = {"us": round(taken, 2), "ratio_to_empty_call": round(taken / empty, 1)}
    machine = {"processor": platform.machine(), "processors": os.cpu_count(), "system": platform.platform()}
    versions = {"python": platform.python_version(), "torch": str(torch.__version__), "safepoint": sp.__version__}
    print(json.dumps({"question": __doc__.splitlines()[0], **found, "machine": {**machine, **versions}}, indent=2))


if __name__ == "__main__":
    main()
