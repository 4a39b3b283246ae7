"""Train on several ranks under torchrun, and kill ranks on the way: `elastic_training.py ROOT UNTIL [RANK:STEP ...]`.

In the start that torchrun counts as the n-th, from 0, the n-th of the given ranks kills itself before that update. Each
rank prints a line of JSON for what it resumed, for each update and for its end.
"""

from __future__ import annotations

import json
import os
import signal
import sys

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import safepoint as sp
from safepoint.data import ResumableLoader
from safepoint.format.digest import digest_bytes

SAVE_EVERY = 3


class Points:
    """Give noisy points [4] for 94 indices."""

    def __len__(self) -> int:
        return 94

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.randn(4) + index / 94


def say(what: str, step: int, text: str) -> None:
    # One write for a line: the ranks share one pipe.
    line = json.dumps({"rank": dist.get_rank(), "what": what, "step": step, "text": text}) + "\n"
    os.write(sys.stdout.fileno(), line.encode())


def main(root: str, until: int, *kills: str) -> None:
    dist.init_process_group("gloo")
    torch.set_num_threads(1)
    rank, ranks = dist.get_rank(), dist.get_world_size()
    restarts = int(os.environ["TORCHELASTIC_RESTART_COUNT"])
    dies = tuple(map(int, kills[restarts].split(":"))) if restarts < len(kills) else None
    torch.manual_seed(0)
    model = DistributedDataParallel(
        torch.nn.Sequential(torch.nn.Linear(4, 32), torch.nn.Dropout(0.2), torch.nn.Linear(32, 1))
    )
    torch.manual_seed(1 + rank)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    loader = ResumableLoader(Points(), 8, seed=3, rank=rank, world_size=ranks)
    state = {"model": model, "optimizer": optimizer, "data": loader}
    with sp.CheckpointManager(root, state, save=sp.every(updates=SAVE_EVERY)) as manager:
        report = manager.restore()
        say("resumed", report.step, report.promise.level)
        while manager.progress.step < until:
            for points in manager.batches(loader):
                if dies == (rank, manager.progress.step + 1):
                    os.kill(os.getpid(), signal.SIGKILL)
                loss = model(points).square().mean()
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                manager.after_update(samples=len(points))
                say("update", manager.progress.step, loss.item().hex())
                if manager.progress.step == until:
                    break
            if manager.epoch_end_due:
                manager.end_epoch()
        held = b"".join(value.detach().numpy().tobytes() for value in model.state_dict().values())
        say("end", manager.progress.step, digest_bytes(held))
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), *sys.argv[3:])
