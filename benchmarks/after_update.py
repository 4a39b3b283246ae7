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


def microseconds(call: Callable[[], object], before: Callable[[], object] = nothing) -> float:
    """Return the median over rounds of the time of one call; `before` each call is not counted."""
    rounds = []
    for _ in range(ROUNDS):
        spent = 0.0
        for _ in range(CALLS):
            before()
            started = time.perf_counter()
            call()
            spent += time.perf_counter() - started
        rounds.append(spent / CALLS * 1e6)
    return statistics.median(rounds)


Made = tuple[sp.CheckpointManager, Callable[[], object], Callable[[], object]]


def bare(url: str) -> Made:
    """Return a manager of one dict, its boundary, and what comes before it."""
    manager = sp.CheckpointManager(url, {"loop": {"n": 0}})
    return manager, manager.after_update, nothing


def usual(url: str) -> Made:
    """Return a manager of what a training has, its boundary with a metric, and the next batch, which comes before."""
    model = torch.nn.Linear(64, 64)
    optimizer = torch.optim.AdamW(model.parameters())
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 1000)
    loader = ResumableLoader(range(1 << 20), 32, seed=0, sample_streams=False)
    items = {"model": model, "optimizer": optimizer, "scheduler": schedule, "data": loader}
    manager = sp.CheckpointManager(url, items, save=sp.every(updates=1 << 40, minutes=1 << 20))
    loss = torch.tensor(0.5)
    batches = manager.batches(loader)
    return manager, lambda: manager.after_update(metrics={"loss": loss}), lambda: next(batches)


def main() -> None:
    """Measure and print."""
    torch.set_num_threads(1)
    empty = microseconds(nothing)
    found: dict[str, object] = {"empty_call_us": round(empty, 3)}
    for name, make in (("bare", bare), ("usual", usual)):
        with tempfile.TemporaryDirectory() as folder:
            manager, call, before = make(folder)
            taken = microseconds(call, before)
            manager.close()
        found[name] = {"us": round(taken, 2), "ratio_to_empty_call": round(taken / empty, 1)}
    machine = {"processor": platform.machine(), "processors": os.cpu_count(), "system": platform.platform()}
    versions = {"python": platform.python_version(), "torch": str(torch.__version__), "safepoint": sp.__version__}
    print(json.dumps({"question": __doc__.splitlines()[0], **found, "machine": {**machine, **versions}}, indent=2))


if __name__ == "__main__":
    main()
