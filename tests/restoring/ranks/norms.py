"""BatchNorm under DDP, whose buffers differ on the ranks at each boundary: saved on two ranks, restored on any number.

Called by each rank of `reshard_worker`.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import safepoint as sp

UPDATES = 3
MOMENTUM = 0.1
ROWS = 16


def build(*, seed: int, group: Any = None) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(seed)
    layers = torch.nn.Sequential(
        torch.nn.Linear(3, 4), torch.nn.BatchNorm1d(4, momentum=MOMENTUM), torch.nn.Linear(4, 1)
    )
    is_alone = dist.get_world_size(group) == 1
    model = layers if is_alone else DistributedDataParallel(layers, process_group=group)
    return model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def rows_of(step: int, rank: int, world_size: int) -> torch.Tensor:
    """Return a rank's part of the global batch of a step; the parts have other means."""
    noise = torch.randn(ROWS, 3, generator=torch.Generator().manual_seed(step))
    return (noise + torch.arange(ROWS)[:, None] / 4).chunk(world_size)[rank]


def update(model: torch.nn.Module, optimizer: torch.optim.Optimizer, rows: torch.Tensor) -> None:
    optimizer.zero_grad()
    model(rows).square().mean().backward()
    optimizer.step()


def buffers_of(model: torch.nn.Module) -> dict[str, Any]:
    return {name.removeprefix("module."): buffer.tolist() for name, buffer in model.named_buffers()}


def of_ranks(value: Any, group: Any = None) -> list[Any]:
    """Return what every rank has; a collective."""
    values: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(values, value, group=group)
    return values


def save_on_two(folder: Path) -> None:
    """Train and save on the first two ranks of a job; a collective of all."""
    pair = dist.new_group([0, 1])
    rank = dist.get_rank()
    if rank < 2:
        model, optimizer = build(seed=1, group=pair)
        state = {"model": model, "optimizer": optimizer}
        with sp.CheckpointManager(folder / "norms", state, process_group=pair) as manager:
            manager.restore()
            for step in range(UPDATES):
                update(model, optimizer, rows_of(step, rank, 2))
                manager.after_update()
            buffers = of_ranks(buffers_of(model), pair)
            assert buffers[0]["1.running_mean"] != buffers[1]["1.running_mean"], "nothing to tell apart"
            manager.save()
        if rank == 0:
            (folder / "norms.json").write_text(json.dumps(buffers[0]))
    dist.barrier()


def go_on(folder: Path) -> str:
    """See that every rank has the leader's buffers, and that the next updates go on from them."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    model, optimizer = build(seed=2)
    contract = sp.Contract("exact", {"world_size", "rng"})
    saved = json.loads((folder / "norms.json").read_text())
    with sp.CheckpointManager(folder / "norms", {"model": model, "optimizer": optimizer}, contract=contract) as manager:
        step = manager.restore(required=True).step
        assert of_ranks(buffers_of(model)) == [saved] * world_size, "not the leader's buffers"
        layers: Any = getattr(model, "module", model)
        rows = rows_of(step, rank, world_size)
        mean = layers[0](rows).mean(0)
        expected = (1 - MOMENTUM) * torch.tensor(saved["1.running_mean"]) + MOMENTUM * mean
        update(model, optimizer, rows)
        torch.testing.assert_close(layers[1].running_mean, expected)
        assert int(layers[1].num_batches_tracked) == step + 1
        update(model, optimizer, rows_of(step + 1, rank, world_size))
        weights = of_ranks([one.tolist() for one in model.parameters()])
        assert weights == weights[:1] * world_size and all(bool(one.isfinite().all()) for one in model.parameters())
    return f"norms: step {step} on {world_size}"
