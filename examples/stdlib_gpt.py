"""Train a small character model on the source text of Python's standard library, and resume it after any crash.

python examples/stdlib_gpt.py --run runs/gpt --updates 100

Accumulation over two microbatches, warm-up and cosine, clipping, a gradient scaler, weight decay for matrices only, and
a moving average of the weights: everything here that has a state is named in `state`.
"""

from __future__ import annotations

import argparse
import hashlib
import random
import sysconfig
from pathlib import Path

import numpy
import torch
from torch import nn
from torch.optim.lr_scheduler import CosineAnnealingLR, LinearLR, SequentialLR
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import safepoint as sp
from safepoint.data import ResumableLoader

MODULES = ("argparse", "ast", "configparser", "dataclasses", "difflib", "doctest", "enum", "inspect", "typing")
BLOCK, BATCH, ACCUMULATION = 64, 8, 2


class Source:
    """Give blocks of the text of some modules, as ASCII codes [BLOCK + 1]."""

    def __init__(self) -> None:
        library = Path(sysconfig.get_paths()["stdlib"])
        text = "".join((library / f"{module}.py").read_text("utf-8") for module in MODULES).encode("ascii", "replace")
        self.codes = torch.frombuffer(bytearray(text), dtype=torch.uint8).long()
        self.fingerprint = hashlib.sha256(text).hexdigest()  # another Python has another text

    def __len__(self) -> int:
        blocks = (len(self.codes) - 1) // BLOCK
        return blocks - blocks % (BATCH * ACCUMULATION)  # an epoch ends with a whole accumulation window

    def __getitem__(self, index: int) -> torch.Tensor:
        return self.codes[index * BLOCK : (index + 1) * BLOCK + 1]


class GPT(nn.Module):
    """Predict the next character; about half a million parameters, the first and the last matrix are one."""

    def __init__(self, width: int = 96, layers: int = 4) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(width, 4, 4 * width, dropout=0.1, batch_first=True, norm_first=True)
        self.characters, self.places = nn.Embedding(128, width), nn.Embedding(BLOCK, width)
        self.layers = nn.TransformerEncoder(layer, layers, norm=nn.LayerNorm(width), enable_nested_tensor=False)
        self.head = nn.Linear(width, 128, bias=False)
        self.head.weight = self.characters.weight
        self.register_buffer("mask", nn.Transformer.generate_square_subsequent_mask(BLOCK), persistent=False)
        nn.init.normal_(self.characters.weight, std=0.02)

    def forward(self, codes: torch.Tensor) -> torch.Tensor:
        hidden = self.characters(codes) + self.places.weight
        return self.head(self.layers(hidden, mask=self.mask, is_causal=True))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--run", default="runs/gpt", help="the run's folder")
    parser.add_argument("--updates", type=int, default=100, help="updates of the whole run")
    parser.add_argument("--workers", type=int, default=0, help="processes that load data")
    parser.add_argument("--save-every", type=int, default=5, help="updates from one checkpoint to the next")
    parser.add_argument("--background", action="store_true", help="write checkpoints while training goes on")
    args = parser.parse_args()

    for seed in (random.seed, numpy.random.seed, torch.manual_seed):
        seed(0)
    model = GPT()
    ema = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.98))
    matrices = [weight for weight in model.parameters() if weight.dim() > 1]
    others = [weight for weight in model.parameters() if weight.dim() <= 1]
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=1e-3)
    warm_up = LinearLR(optimizer, start_factor=0.1, total_iters=10)
    scheduler = SequentialLR(optimizer, [warm_up, CosineAnnealingLR(optimizer, args.updates)], milestones=[10])
    scaler = torch.amp.GradScaler("cpu", growth_interval=20)
    loader = ResumableLoader(Source(), batch_size=BATCH, seed=0, num_workers=args.workers)
    state = {"model": model, "ema": ema, "optimizer": optimizer, "scheduler": scheduler}
    state |= {"scaler": scaler, "data": loader}

    save, keep = sp.every(updates=args.save_every), sp.keep(last=3)
    with sp.CheckpointManager(args.run, state, save=save, keep=keep, background=args.background) as manager:
        print(manager.restore())
        while manager.progress.step < args.updates:
            losses: list[float] = []
            for codes in manager.batches(loader):
                logits = model(codes[:, :-1])
                loss = nn.functional.cross_entropy(logits.flatten(0, 1), codes[:, 1:].flatten())
                scaler.scale(loss / ACCUMULATION).backward()
                losses.append(loss.item())
                manager.after_microbatch()
                if len(losses) < ACCUMULATION:
                    continue
                scaler.unscale_(optimizer)
                norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0)
                scaler.step(optimizer)
                scaler.update()
                optimizer.zero_grad()
                scheduler.step()
                ema.update_parameters(model)
                mean = sum(losses) / ACCUMULATION
                losses.clear()
                manager.after_update(metrics={"loss": mean, "norm": norm, "scale": scaler.get_scale()})
                print(f"step {manager.progress.step} loss {mean:.6f} rate {scheduler.get_last_lr()[0]:.6f}")
                if manager.progress.step == args.updates:
                    break
            if manager.epoch_end_due:
                manager.end_epoch()


if __name__ == "__main__":
    main()
