"""Three small programs whose checkpoints are kept: a training loop, a collection of values, a run that branched.

Each returns its live objects, so that a test can build them again and restore the kept checkpoints into them.
"""

from __future__ import annotations

import datetime
from collections import OrderedDict
from pathlib import PurePosixPath
from typing import Any

import torch

from safepoint.data.loader import ResumableLoader


class Net(torch.nn.Module):
    """Hold tied weights, a buffer, one that is not persistent, and dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = torch.nn.Linear(4, 3, bias=False)
        self.norm = torch.nn.BatchNorm1d(3)
        self.drop = torch.nn.Dropout(0.25)
        self.head = torch.nn.Linear(4, 3, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("mask", torch.ones(3), persistent=False)

    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        return (self.drop(self.norm(self.embed(batch))) * self.mask).sum() + self.head(batch).square().mean()


class Rows:
    """Give ten rows of four numbers."""

    def __len__(self) -> int:
        return 10

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.arange(4.0) + index


def training() -> dict[str, Any]:
    """Return the items of the training loop."""
    torch.manual_seed(7)
    model = Net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    return {
        "model": model,
        "optimizer": optimizer,
        "scheduler": torch.optim.lr_scheduler.StepLR(optimizer, 2, gamma=0.5),
        "noise": torch.Generator().manual_seed(11),
        "data": ResumableLoader(Rows(), batch_size=2, seed=3, name="rows"),
    }


def update(items: dict[str, Any]) -> None:
    """Do one update with the loader's next batch."""
    batch = next(iter(items["data"]))
    batch = batch + torch.rand(batch.shape, generator=items["noise"])
    items["model"](batch).backward()
    items["optimizer"].step()
    items["optimizer"].zero_grad()
    items["scheduler"].step()


def values() -> dict[str, Any]:
    """Return one item: a dict with tensors of many types and plain values of many kinds."""
    shared = torch.arange(6, dtype=torch.float32)
    return {
        "values": {
            "float32": torch.tensor([[1.5, -0.0], [float("inf"), 5e-45]]),
            "bfloat16": torch.tensor([1.0, -2.5, 3.0]).to(torch.bfloat16),
            "float8": torch.tensor([1.0, -2.0]).to(torch.float8_e4m3fn),
            "complex64": torch.tensor([1 + 2j, -3j]),
            "complex128": torch.tensor([[1 + 2j], [complex(0.0, -0.0)]], dtype=torch.complex128),
            "bool": torch.tensor([True, False, True]),
            "int64": torch.tensor([2**63 - 1, -(2**63)]),
            "uint8": torch.arange(5, dtype=torch.uint8),
            "no_rows": torch.empty(0, 3),
            "no_columns": torch.empty(2, 0, dtype=torch.float64),
            "no_axis": torch.tensor(0.1, dtype=torch.float64),
            "transposed": torch.arange(6, dtype=torch.int32).reshape(2, 3).t(),
            "alias": [shared, shared, shared[2:4]],
            "plain": {
                "none": None,
                "numbers": [True, 7, -(2**80), 0.1, -0.0, float("-inf"), complex(1, -2)],
                "texts": ["größe", "\udcff", b"\x00\xff"],
                "containers": [(1, (2,)), {3, 1}, frozenset({"a"}), OrderedDict(b=1, a=2), {1: "one", (2, 3): None}],
                "times": [
                    datetime.datetime(2025, 3, 1, 12, tzinfo=datetime.timezone.utc),
                    datetime.timedelta(days=-1, microseconds=3),
                ],
                "path": PurePosixPath("a/b"),
                "torch": [torch.Size([2, 3]), torch.bfloat16],
            },
        }
    }


def counter() -> dict[str, Any]:
    """Return the items of the run that branched: one number, so that each step is told from every other."""
    return {"state": {"visited": [0], "weight": torch.zeros(2)}}


def count(items: dict[str, Any], number: int) -> None:
    """Do one update: note a number."""
    items["state"]["visited"].append(number)
    items["state"]["weight"] += number
