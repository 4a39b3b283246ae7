"""Train a tiny model with what makes resuming delicate: windows, validation that draws, a schedule stepped per epoch.

It dies by its own hand at a named place, or leaves out of its state what it is told to forget.
"""

import argparse
import os
import random
import signal

import numpy
import torch

import safepoint as sp
from safepoint.data import ResumableLoader

parser = argparse.ArgumentParser()
parser.add_argument("--epochs", type=int, default=4)
parser.add_argument("--die", default="", help="a place and how often it is passed before, as place:1")
parser.add_argument("--saves-early", action="store_true", help="save at an epoch's last update already")
parser.add_argument("--forget", default="")
parser.add_argument("--reseeds", action="store_true", help="seed after each update of a resumed start")
args = parser.parse_args()

WINDOW = 2
place_to_die, _, spared = args.die.partition(":")
passed = 0


def reach(place: str) -> None:
    global passed
    if place == place_to_die:
        if passed == int(spared or 0):
            os.kill(os.getpid(), signal.SIGKILL)
        passed += 1


class Points:
    def __len__(self) -> int:
        return 32

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.tensor([float(index), 1.0]) + 0.1 * torch.randn(2)


def seed_all() -> None:
    for seed in (random.seed, numpy.random.seed, torch.manual_seed):
        seed(7)


seed_all()
model = torch.nn.Sequential(torch.nn.Linear(2, 4), torch.nn.Dropout(0.3), torch.nn.Linear(4, 1))
optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda epoch: 0.5**epoch)
loader = ResumableLoader(Points(), batch_size=4, seed=3)
state = {"model": model, "optimizer": optimizer, "scheduler": scheduler, "data": loader}
state.pop(args.forget, None)

with sp.CheckpointManager("run", state, save=sp.every(updates=1)) as manager:
    report = manager.restore()
    print(report)
    reach("after the restore")
    for _ in manager.epochs(args.epochs):
        microbatches = 0
        for points in manager.batches(loader):
            loss = (model(points / 32) - 1).square().mean() / WINDOW
            loss.backward()
            manager.after_microbatch()
            microbatches += 1
            if microbatches % WINDOW:
                reach("inside a window")
                continue
            optimizer.step()
            optimizer.zero_grad()
            manager.after_update(metrics={"loss": loss.item()})
            print("step", manager.progress.step, "rate", scheduler.get_last_lr())
            if args.reseeds and not report.is_fresh:
                seed_all()
        if args.saves_early and manager.epoch_end_due:
            manager.save()
        reach("before the validation")
        noise = torch.rand(3), numpy.random.rand(), random.random()
        reach("after the validation")
        scheduler.step()
        reach("after the schedule")
