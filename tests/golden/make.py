"""Write the golden runs of this version into a folder: ``python -m tests.golden.make FOLDER``.

Golden files are added, never rewritten. What a run holds is written beside it, taken from the live objects and not from
the checkpoint: ``expected.json`` with the bytes of each tensor and the text of each plain value.
"""

from __future__ import annotations

import json
import random
import sys
from pathlib import Path
from typing import Any

import numpy
import torch

from safepoint.manager import CheckpointManager
from safepoint.schedule import every
from safepoint.testing.ambient import FakeAmbient, FakeWorld
from tests.golden import programs


def main(folder: Path) -> None:
    """Write all runs; a folder that is there is left alone."""
    torch.set_num_threads(1)
    for write in (write_training, write_values, write_branched):
        root = folder / write.__name__.removeprefix("write_")
        root.mkdir(parents=True)
        random.seed(5)
        numpy.random.seed(5)
        torch.manual_seed(5)
        expected = write(root / "run")
        (root / "expected.json").write_text(json.dumps(expected, indent=1) + "\n", encoding="utf-8")


def write_training(root: Path) -> dict[str, Any]:
    """Train three updates on a loader of five batches, and save twice."""
    items = programs.training()
    with opened(root, items, seed=1) as manager:
        manager.restore()
        for step in (1, 2, 3):
            programs.update(items)
            manager.after_update(metrics={"loss": 1 / step})
            if step > 1:
                manager.save()
    tensors = {f"model/{name}": tensor for name, tensor in items["model"].state_dict().items()}
    moments = [slot for state in items["optimizer"].state.values() for slot in state.values()]
    return {
        "step": 3,
        "tensors": {key: described(tensor) for key, tensor in tensors.items() if tensor.dim()},
        "moments": sorted(described(tensor)[2] for tensor in moments if tensor.dim()),
        "lr": items["optimizer"].param_groups[0]["lr"],
        "next": torch.rand(2, generator=items["noise"]).tolist(),
    }


def write_values(root: Path) -> dict[str, Any]:
    """Save one dict of values at step 0."""
    items = programs.values()
    with opened(root, items, seed=2) as manager:
        manager.restore()
        manager.save()
    tensors = {name: value for name, value in items["values"].items() if isinstance(value, torch.Tensor)}
    whole = {name: value for name, value in tensors.items() if value.dim() and value.is_contiguous()}
    return {"step": 0, "tensors": {f"values/state/{name}": described(tensor) for name, tensor in whole.items()}}


def write_branched(root: Path) -> dict[str, Any]:
    """Reach step 4, begin again from step 2 on purpose, and reach step 5 on the branch."""
    items = programs.counter()
    with opened(root, items, seed=3) as manager:
        manager.restore()
        go_on(manager, items, [1, 2, 3, 4])
    items = programs.counter()
    with opened(root, items, seed=4) as manager:
        manager.restore(step=2, branch=True)
        go_on(manager, items, [30, 40, 50])
    return {"step": 5, "visited": [0, 1, 2, 30, 40, 50], "live": [[5, 2], [4, 2], [2, 1]], "superseded": [[4, 1]]}


def go_on(manager: CheckpointManager, items: dict[str, Any], numbers: list[int]) -> None:
    """Do one update for each number; the schedule saves at even steps, and the last step is saved by hand."""
    for number in numbers:
        programs.count(items, number)
        manager.after_update(samples=1)
    if manager.progress.step % 2:
        manager.save()


def opened(root: Path, items: dict[str, Any], *, seed: int) -> CheckpointManager:
    """Return a manager whose clock, entropy and host are made up, so that the files tell of no machine."""
    schedule = every(updates=2) if "state" in items else None
    return CheckpointManager(root, items, save=schedule, ambient=FakeAmbient(FakeWorld(1_740_830_400.0), pid=seed))


def described(tensor: torch.Tensor) -> tuple[str, list[int], str]:
    """Return a tensor's type, shape and bytes."""
    dense = tensor.detach().contiguous()
    data = dense.reshape(-1).view(torch.uint8).numpy().tobytes() if dense.numel() else b""
    return str(dense.dtype).removeprefix("torch."), list(dense.shape), data.hex()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
