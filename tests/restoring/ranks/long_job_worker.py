"""A rank of `test_long_job`: trains, and saves; called with a folder, the last update, and from save to save how many.

A data-parallel model, a loader, a generator of each rank's own. Prints a line of JSON about where it began and ended.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import safepoint as sp
from safepoint.data import ResumableLoader
from safepoint.format.digest import digest_bytes


class Points:
    """Give a point [2] for each of 94 indices, without chance."""

    def __len__(self) -> int:
        return 94

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.tensor([index / 94, 1.0])


def own(noise: torch.Generator, loader: ResumableLoader) -> list[Any]:
    """Return what a rank has of its own: its generator and the samples that come next."""
    return [digest_bytes(bytes(noise.get_state().numpy())), loader.epoch, loader.position]


def weights(model: torch.nn.Module) -> str:
    held = b"".join(bytes(value.detach().numpy().tobytes()) for value in model.state_dict().values())
    return digest_bytes(held)


def main(folder: Path, last: int, save_every: int) -> None:
    dist.init_process_group("gloo")
    torch.set_num_threads(1)
    rank, ranks = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(3)
    model = DistributedDataParallel(torch.nn.Linear(2, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    noise = torch.Generator().manual_seed(100 + rank)
    loader = ResumableLoader(Points(), 2, seed=5, rank=rank, world_size=ranks)
    state = {"model": model, "optimizer": optimizer, "data": loader, "noise": noise}
    said: dict[str, Any] = {"rank": rank, "at": {}, "ids": []}
    manager = sp.CheckpointManager(folder, state, save=sp.every(updates=save_every))
    report = manager.restore()
    said.update(step=report.step, replayed=report.replayed, report=str(report))
    said["at"][report.step] = [weights(model), *own(noise, loader)]
    while manager.progress.step < last:
        for points in manager.batches(loader):
            factor = 1 + 0.1 * torch.rand((), generator=noise)
            (model(points) * factor - 1).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            said["ids"] = loader.last_ids()
            manager.after_update()
            step = manager.progress.step
            if step % save_every == 0 or step == last:
                said["at"][step] = [weights(model), *own(noise, loader)]
            if step == last:
                break
        if manager.epoch_end_due:
            manager.end_epoch()
    print(json.dumps(said), flush=True)
    dist.barrier()
    # The job dies here: nothing is closed.
    os._exit(0)


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))
