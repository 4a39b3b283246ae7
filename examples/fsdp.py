"""Train a small network whose parts are divided among ranks (FSDP2); any number of ranks goes on where it was.

torchrun --standalone --nproc-per-node 2 -- examples/fsdp.py --run runs/fsdp --updates 200

No rank ever holds the whole of it, neither while it is saved nor while it is restored.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import random
import sys

import numpy
import torch
import torch.distributed as dist
from sklearn.datasets import load_digits
from torch import nn
from torch.distributed.fsdp import fully_shard

import safepoint as sp
from safepoint.data import ResumableLoader

NOISE = 0.1


class NoisyDigits:
    """Give images [64] from 0 to 1, with noise that depends on the place in the order and not on who loads it."""

    def __init__(self) -> None:
        images, labels = load_digits(return_X_y=True)
        self.images, self.labels = torch.tensor(images / 16).float(), torch.tensor(labels)
        self.fingerprint = hashlib.sha256(images.tobytes() + labels.tobytes()).hexdigest()

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        return self.images[index] + NOISE * torch.randn(64), self.labels[index]


def total(value: float) -> float:
    """Return the sum over all ranks."""
    held = torch.tensor(value, dtype=torch.float64)
    if dist.is_initialized():
        dist.all_reduce(held)
    return held.item()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--run", default="runs/fsdp", help="the run's folder")
    parser.add_argument("--updates", type=int, default=200, help="updates of the whole run")
    parser.add_argument("--global-batch", type=int, default=48, help="images per update, of all ranks together")
    parser.add_argument("--save-every", type=int, default=5, help="updates from one checkpoint to the next")
    parser.add_argument("--background", action="store_true", help="write checkpoints while training goes on")
    args = parser.parse_args()

    torch.set_num_threads(1)  # the fastest for a network this small
    rank, ranks = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    if args.global_batch % ranks:
        parser.error(f"--global-batch must be a multiple of the {ranks} ranks")
    torch.manual_seed(0)  # the same weights everywhere
    model = nn.Sequential(nn.Linear(64, 97), nn.ReLU(), nn.Linear(97, 97), nn.ReLU(), nn.Linear(97, 10))
    if "RANK" in os.environ:
        dist.init_process_group("gloo")
        for part in (model[2], model):  # 97 rows: no number of ranks divides them evenly
            fully_shard(part)
    for seed in (random.seed, numpy.random.seed, torch.manual_seed):
        seed(1 + rank)  # from here on each rank draws its own numbers
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=args.updates)
    loader = ResumableLoader(NoisyDigits(), args.global_batch // ranks, seed=0, rank=rank, world_size=ranks)

    with sp.CheckpointManager(
        args.run,
        {"model": model, "optimizer": optimizer, "scheduler": scheduler, "data": loader},
        # With the global batch kept, another number of ranks makes the same updates, from random streams of its own.
        contract=sp.Contract(permit={"world_size"}, rng="derive"),
        save=sp.every(updates=args.save_every),
        keep=sp.keep(last=4),
        background=args.background,
    ) as manager:
        report = manager.restore()
        if rank == 0:
            print(report)
        while manager.progress.step < args.updates and not manager.should_stop:
            for batch, answers in manager.batches(loader):
                # The mean over all images of the update: an epoch's last batch may leave the ranks unequal shares.
                images = total(len(batch))
                loss = nn.functional.cross_entropy(model(batch), answers, reduction="sum") / images
                optimizer.zero_grad()
                (loss * ranks).backward()  # the sum of gradients over the ranks is divided by their number
                optimizer.step()
                scheduler.step()
                whole_loss = total(loss.item())
                manager.after_update(samples=len(batch), metrics={"loss": whole_loss})
                if rank == 0:
                    print(f"step {manager.progress.step} loss {whole_loss:.6f}")
                if manager.progress.step == args.updates or manager.should_stop:
                    break
            if manager.epoch_end_due and not manager.should_stop:
                manager.end_epoch()
    if dist.is_initialized():
        dist.destroy_process_group()
    sys.exit(manager.exit_code)  # 75 after a save on a signal, for whoever starts it again


if __name__ == "__main__":
    main()
