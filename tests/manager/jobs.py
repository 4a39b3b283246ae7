"""A small training job whose every number depends on all of its state, and exact pictures of that state."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import safepoint as sp
from safepoint.data import ResumableLoader

SAMPLES = 22
BATCH = 4


class Died(Exception):
    """Stands for whatever ends a training before its time."""


class Points:
    """Sample i lies near i, with noise of its own drawn from the global stream."""

    def __init__(self, length: int = SAMPLES) -> None:
        self.length = length

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int, /) -> tuple[torch.Tensor, int]:
        return torch.full((4,), index / 10.0) + 0.1 * torch.randn(4), index


class Net(nn.Module):
    """Has dropout, which draws, and batch statistics, which are buffers."""

    def __init__(self, width: int = 8, *, dropout: float = 0.2) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(4, width), nn.BatchNorm1d(width), nn.Dropout(dropout))
        self.head = nn.Linear(width, 1)

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        return self.head(torch.tanh(self.body(values))).squeeze(-1)


@dataclass
class Job:
    """The live objects of one start."""

    model: nn.Module
    optimizer: torch.optim.Optimizer
    scheduler: Any
    loader: Any
    manager: sp.CheckpointManager
    trace: list[tuple[Any, ...]] = field(default_factory=list)


def seed_all(seed: int) -> None:
    torch.manual_seed(seed)
    random.seed(seed)
    np.random.seed(seed)


def build(
    url: Path | str,
    *,
    seed: int = 0,
    workers: int = 0,
    drop_last: bool = False,
    scheduler: Callable[[torch.optim.Optimizer], Any] | None = None,
    items: dict[str, object] | None = None,
    model: nn.Module | None = None,
    **options: Any,
) -> Job:
    """Make the objects of one start. Starts of one run are given unequal seeds, so that nothing is right by luck."""
    seed_all(seed)
    model = model if model is not None else Net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    made = scheduler(optimizer) if scheduler else torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 40)
    loader = ResumableLoader(Points(), BATCH, seed=5, num_workers=workers, drop_last=drop_last)
    state = {"model": model, "optimizer": optimizer, "scheduler": made, "data": loader, **(items or {})}
    return Job(model, optimizer, made, loader, sp.CheckpointManager(url, state, **options))


def step(job: Job, batch: Any, *, steps_scheduler: bool = True) -> float:
    """Make one update of one batch, without its boundary, and note what it used and gave."""
    loss = microbatch(job, batch)
    close_window(job, steps_scheduler=steps_scheduler)
    return loss


def microbatch(job: Job, batch: Any) -> float:
    values, ids = batch
    scale = 1 + random.random() + float(np.random.rand())
    loss = (job.model(values * scale) - ids.float() / 10).square().mean()
    loss.backward()
    job.trace.append((ids.tolist(), loss.item().hex(), job.optimizer.param_groups[0]["lr"]))
    return loss.item()


def close_window(job: Job, *, steps_scheduler: bool = True) -> None:
    job.optimizer.step()
    if steps_scheduler:
        job.scheduler.step()
    job.optimizer.zero_grad()


def train(job: Job, until: int, *, accumulation: int = 1) -> list[tuple[Any, ...]]:
    """Train to a step, and return what each microbatch of this call used and gave."""
    begin, window = len(job.trace), 0
    while job.manager.progress.step < until:
        for batch in job.loader:
            microbatch(job, batch)
            job.manager.after_microbatch()
            window += 1
            if window == accumulation:
                window = 0
                close_window(job)
                job.manager.after_update(metrics={"loss": 1.0})
            if job.manager.progress.step >= until:
                break
    return job.trace[begin:]


def die(job: Job) -> None:
    """End a start as an exception in the training ends it."""
    job.manager.__exit__(Died, Died(), None)


def refused(job: Job) -> sp.ContractError:
    """Return the refusal of a restore, which must leave every bit as it was."""
    before = picture(job)
    with pytest.raises(sp.ContractError) as caught:
        job.manager.restore()
    assert picture(job) == before
    return caught.value


def picture(job: Job) -> dict[str, Any]:
    """Return everything that steers the job, bit for bit, taken without safepoint."""
    return {
        "model": bits(dict(job.model.state_dict())),
        "optimizer": bits(job.optimizer.state_dict()),
        "scheduler": bits(job.scheduler.state_dict()),
        "progress": job.manager.progress,
        "streams": streams(),
    }


def bits(value: Any) -> Any:
    """Return nested state in a form in which equal means equal bits, types and order."""
    if isinstance(value, torch.Tensor):
        raw = value.detach().cpu().contiguous().flatten().view(torch.uint8) if value.dim() else value.detach().cpu()
        return str(value.dtype), tuple(value.shape), bytes(raw.reshape(-1).view(torch.uint8).numpy())
    if isinstance(value, dict):
        return [(key, bits(one)) for key, one in value.items()]
    if isinstance(value, list | tuple):
        return type(value).__name__, [bits(one) for one in value]
    if isinstance(value, np.ndarray):
        return str(value.dtype), value.shape, value.tobytes()
    return type(value).__name__, value.hex() if isinstance(value, float) else value


def streams() -> list[object]:
    name, keys, *rest = np.random.get_state()
    return [random.getstate(), name, keys.tolist(), rest, torch.get_rng_state().tolist()]
