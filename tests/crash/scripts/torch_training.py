"""Train a small network for real, save at each update, and print each update's loss as exact text."""

from __future__ import annotations

import argparse
import json

import torch

import safepoint as sp
from safepoint.data import ResumableLoader


class Points(torch.utils.data.Dataset):
    def __len__(self) -> int:
        return 94

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        return torch.randn(4) + index / 94, torch.tensor(index / 94)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("root")
    parser.add_argument("--until", type=int, required=True)
    parser.add_argument("--background", action="store_true")
    options = parser.parse_args()
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(4, 64), torch.nn.Dropout(0.2), torch.nn.Linear(64, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 100)
    loader = ResumableLoader(Points(), 8, seed=3)
    state = {"model": model, "optimizer": optimizer, "scheduler": scheduler, "data": loader}
    manager = sp.CheckpointManager(
        options.root, state, save=sp.every(updates=1), keep=sp.keep(last=2), background=options.background
    )
    report = manager.restore()
    print(json.dumps({"restored": report.step, "promise": report.promise.level}), flush=True)
    while manager.progress.step < options.until:
        for points, values in loader:
            loss = (model(points).squeeze(-1) - values).pow(2).mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            scheduler.step()
            print(json.dumps({"update": manager.progress.step + 1, "loss": loss.item().hex()}), flush=True)
            manager.after_update(samples=len(points), metrics={"loss": loss.detach()})
            if manager.progress.step >= options.until:
                break
    manager.close()


if __name__ == "__main__":
    main()
