"""Train a small network on handwritten digits; start it again after any crash, and it goes on where it was.

python examples/digits.py --run runs/digits --updates 200
"""

from __future__ import annotations

import argparse
import hashlib
import random
import sys

import numpy
import torch
from sklearn.datasets import load_digits
from torch import nn

import safepoint as sp
from safepoint.data import ResumableLoader

NOISE = 0.1
HELD_OUT = 297  # images for validation, of 1797


class NoisyDigits:
    """Give images [1, 8, 8] from 0 to 1, each time with other noise, drawn in whichever worker loads the image."""

    def __init__(self, images: torch.Tensor, labels: torch.Tensor) -> None:
        self.images, self.labels = images, labels
        self.fingerprint = hashlib.sha256(images.numpy().tobytes() + labels.numpy().tobytes()).hexdigest()

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        return self.images[index] + NOISE * torch.randn(1, 8, 8), self.labels[index]


def network() -> nn.Module:
    """Return a convolutional network of about 20,000 parameters."""
    return nn.Sequential(
        nn.Conv2d(1, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU(), nn.MaxPool2d(2),
        nn.Conv2d(16, 32, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2),
        nn.Flatten(), nn.Dropout(0.2), nn.Linear(128, 96), nn.ReLU(), nn.Linear(96, 10),
    )  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--run", default="runs/digits", help="the run's folder")
    parser.add_argument("--updates", type=int, default=200, help="updates of the whole run")
    parser.add_argument("--batch-size", type=int, default=32, help="images per update")
    parser.add_argument("--workers", type=int, default=0, help="processes that load data")
    parser.add_argument("--save-every", type=int, default=5, help="updates from one checkpoint to the next")
    parser.add_argument("--background", action="store_true", help="write checkpoints while training goes on")
    args = parser.parse_args()

    for seed in (random.seed, numpy.random.seed, torch.manual_seed):
        seed(0)
    torch.set_num_threads(1)  # the fastest for a network this small
    images, labels = load_digits(return_X_y=True)
    inputs, targets = torch.tensor(images / 16).float().view(-1, 1, 8, 8), torch.tensor(labels)
    digits = NoisyDigits(inputs[HELD_OUT:], targets[HELD_OUT:])

    model = network()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=args.updates)
    loader = ResumableLoader(digits, batch_size=args.batch_size, seed=0, num_workers=args.workers)

    with sp.CheckpointManager(
        args.run,
        {"model": model, "optimizer": optimizer, "scheduler": scheduler, "data": loader},
        save=sp.every(updates=args.save_every),
        keep=sp.keep(last=4, best=("loss", "min")),
        background=args.background,
    ) as manager:
        print(manager.restore())
        while manager.progress.step < args.updates and not manager.should_stop:
            for batch, answers in manager.batches(loader):
                loss = nn.functional.cross_entropy(model(batch), answers)
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                scheduler.step()
                manager.after_update(samples=len(batch), metrics={"loss": loss.item()})
                print(f"step {manager.progress.step} loss {loss.item():.6f}")
                if manager.progress.step == args.updates or manager.should_stop:
                    break
            if manager.epoch_end_due and not manager.should_stop:
                model.eval()
                with torch.no_grad():
                    accuracy = (model(inputs[:HELD_OUT]).argmax(1) == targets[:HELD_OUT]).float().mean()
                model.train()
                print(f"epoch {manager.progress.epoch} accuracy {accuracy:.3f}")
                manager.end_epoch()
    sys.exit(manager.exit_code)  # 75 after a save on a signal, for whoever starts it again


if __name__ == "__main__":
    main()
