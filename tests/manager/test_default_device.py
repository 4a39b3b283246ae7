"""Programs that set a default device: what is read into is in host memory all the same."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import nn

import safepoint as sp


def items() -> dict[str, object]:
    model = nn.Sequential(nn.Conv2d(2, 3, 3), nn.BatchNorm2d(3)).to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    return {
        "model": model,
        "optimizer": torch.optim.Adam(model.parameters()),
        "more": {"list": [torch.ones(3)], "number": torch.tensor(2.5)},
    }


def test_a_state_is_restored_whatever_device_is_the_default(tmp_path: Path) -> None:
    """The one that has no memory at all shows it."""
    saved = items()
    with sp.CheckpointManager(tmp_path, saved) as manager:
        manager.restore()
        saved["model"](torch.rand(2, 2, 5, 5)).sum().backward()  # type: ignore[operator]
        saved["optimizer"].step()  # type: ignore[attr-defined]
        manager.after_update()
        manager.save()
    found = items()
    found["more"] = {}
    with torch.device("meta"), sp.CheckpointManager(tmp_path, found) as manager:
        manager.restore(required=True)
    for name in ("model", "optimizer"):
        one, other = (each[name].state_dict() for each in (saved, found))  # type: ignore[attr-defined]
        assert str(one) == str(other)
    assert str(found["more"]) == str(saved["more"])
