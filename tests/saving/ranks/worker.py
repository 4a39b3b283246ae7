"""One rank of a real job: `python worker.py FOLDER`. Prints a line of JSON for each thing it saw."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import safepoint as sp
from safepoint.errors import SafepointError

WIDTH = 64


def say(what: str, value: object) -> None:
    print(json.dumps([what, value]), flush=True)


def train(model: torch.nn.Module, optimizer: torch.optim.Optimizer, manager: sp.CheckpointManager) -> None:
    loss = model(torch.randn(4, WIDTH)).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    manager.after_update()


def replicated(root: Path) -> None:
    """Save a data-parallel job: on schedule, in the background, and with one bit changed on one rank."""
    rank = dist.get_rank()
    torch.manual_seed(7)
    inner = torch.nn.Sequential(torch.nn.Linear(WIDTH, WIDTH), torch.nn.BatchNorm1d(WIDTH), torch.nn.Linear(WIDTH, 1))
    model = DistributedDataParallel(inner)
    optimizer = torch.optim.AdamW(model.parameters())
    torch.manual_seed(100 + rank)
    own = torch.Generator().manual_seed(rank)
    state = {"model": model, "optimizer": optimizer, "generator": own, "notes": {"run": "a"}}
    schedule = sp.every(updates=2)
    with sp.CheckpointManager(root / "replicated", state, save=schedule, background=True, deadline_s=30.0) as manager:
        say("fresh", manager.restore().step)
        for _ in range(3):
            train(model, optimizer, manager)
        manager.wait()
        result = manager.save().wait(deadline_s=60.0)
        say("result", [result.generation, result.step, result.size_bytes])
        with torch.no_grad():
            inner[0].weight.view(torch.int32)[5, 5] ^= rank
        try:
            manager.save().wait(deadline_s=60.0)
        except SafepointError as exc:
            say("difference", [type(exc).__name__, str(exc)])
        with torch.no_grad():
            inner[0].weight.view(torch.int32)[5, 5] ^= rank
        try:
            manager.wait()
        except SafepointError as exc:
            say("owed", [type(exc).__name__, str(exc)])
        train(model, optimizer, manager)


def sharded(root: Path) -> None:
    """Save a job whose model is divided over the ranks, with a first axis that the ranks do not divide evenly.

    A base that is divided too never changes, and the second save refers to it.
    """
    torch.manual_seed(7)
    model = torch.nn.Sequential(torch.nn.Linear(WIDTH, WIDTH + 1), torch.nn.Linear(WIDTH + 1, 1))
    base = torch.nn.Linear(WIDTH, WIDTH + 1).requires_grad_(False)
    fully_shard(model)
    fully_shard(base)
    optimizer = torch.optim.AdamW(model.parameters())
    state = {"model": model, "optimizer": optimizer, "base": base}
    options = {"deadline_s": 30.0, "process_group": dist.new_group([0, 1]), "incremental": True}
    with sp.CheckpointManager(root / "sharded", state, **options) as manager:
        manager.restore()
        train(model, optimizer, manager)
        manager.save()
        train(model, optimizer, manager)
        result = manager.save().wait()
        say("sharded", [result.step, result.referenced_bytes])
    held = base.weight.to_local().clone()
    base.weight.to_local().zero_()
    with sp.CheckpointManager(root / "sharded", state, **options) as manager:
        say("restored", [manager.restore().step, torch.equal(base.weight.to_local(), held)])


def apart(root: Path) -> None:
    """Start on a folder of each rank's own."""
    manager = sp.CheckpointManager(root / f"apart-{dist.get_rank()}", {"notes": {}}, deadline_s=1.0)
    try:
        manager.restore()
    except SafepointError as exc:
        say("apart", [type(exc).__name__, str(exc)])
    manager.close()


if __name__ == "__main__":
    dist.init_process_group("gloo")
    replicated(Path(sys.argv[1]))
    sharded(Path(sys.argv[1]))
    apart(Path(sys.argv[1]))
    dist.destroy_process_group()
