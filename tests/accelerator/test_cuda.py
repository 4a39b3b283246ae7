"""Saves and restores of a state on a CUDA device. Skipped where there is none: see docs/explanation/limits.md."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import safepoint as sp
from safepoint.storage.local import LocalStorage

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")

LONGEST_WAIT_S = 120
# Matrices of some megabytes, so that a copy takes a while.
WIDTH = 3000


class Gated:
    """A storage that makes no folder of a generation until its gate is opened."""

    def __init__(self, url: Path) -> None:
        self._inner = LocalStorage(str(url))
        self.gate = threading.Event()
        self.gate.set()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def make_folder(self, path: str) -> None:
        assert self.gate.wait(LONGEST_WAIT_S)
        self._inner.make_folder(path)


class Net(nn.Module):
    """Parameters large and small, in other orders of memory, in host memory, and buffers."""

    def __init__(self, device: str) -> None:
        super().__init__()
        self.convolution = nn.Conv2d(8, 16, 3).to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        self.norm = nn.BatchNorm1d(WIDTH)
        self.large = nn.Linear(WIDTH, WIDTH)
        self.half = nn.Parameter(torch.randn(1001).bfloat16())
        self.smalls = nn.ParameterList(nn.Parameter(torch.randn(n)) for n in range(1, 60))
        self.to(device)
        self.register_buffer("near", torch.arange(2000.0))
        self.register_buffer("turned", torch.randn(300, 200, device=device).t())

    def forward(self, features: torch.Tensor) -> torch.Tensor:
        found = self.large(self.norm(features)).square().mean()
        image = self.convolution(features[:, :800].reshape(-1, 8, 10, 10)).square().mean()
        return found + image + self.half.square().sum() + torch.stack([one.sum() for one in self.smalls]).square().sum()


class Loop:
    """A training on a device, and its manager."""

    def __init__(self, folder: Path, *, device: str = "cuda", kind: str = "fused", **options: Any) -> None:
        torch.manual_seed(0)
        self.device, self.folder = device, folder
        self.model = Net(device)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.01, **{kind: True})
        self.storage = Gated(folder)
        self.manager = sp.CheckpointManager(folder, self.items, storage=self.storage, **options)
        self.manager.restore()

    @property
    def items(self) -> dict[str, Any]:
        return {"model": self.model, "optimizer": self.optimizer}

    def step(self) -> None:
        self.optimizer.zero_grad()
        self.model(torch.randn(64, WIDTH, device=self.device)).backward()
        self.optimizer.step()

    def update(self) -> None:
        self.step()
        self.manager.after_update()

    def picture(self) -> dict[str, torch.Tensor]:
        found = {f"model.{name}": one.clone().cpu() for name, one in self.model.state_dict().items()}
        for number, state in enumerate(self.optimizer.state.values()):
            found.update({f"{number}.{key}": one.clone().cpu() for key, one in state.items()})
        return found

    def habits(self) -> None:
        """Save at the boundary, and step: from here on what an optimizer owns is copied behind the loop."""
        self.update()
        self.manager.save().wait(deadline_s=LONGEST_WAIT_S)
        self.update()
        self.manager.save().wait(deadline_s=LONGEST_WAIT_S)

    def restored(self) -> dict[str, torch.Tensor]:
        """Return what the newest checkpoint gives another loop."""
        self.manager.close()
        torch.manual_seed(1)
        self.model = Net(self.device)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.01, fused=True)
        manager = sp.CheckpointManager(self.folder, self.items, storage=self.storage)
        manager.restore(required=True)
        manager.close()
        return self.picture()


@pytest.fixture
def stream(request: pytest.FixtureRequest) -> Iterator[None]:
    """Train in the default stream, or in one beside it that waits for nothing."""
    with torch.cuda.stream(torch.cuda.Stream()) if request.param == "own" else nullcontext():
        yield


def assert_same(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert found.keys() == expected.keys()
    assert [name for name, one in expected.items() if not torch.equal(found[name], one)] == []


@pytest.mark.parametrize("stream", ["default", "own"], indirect=True)
@pytest.mark.parametrize("background", [False, True])
def test_what_is_restored_is_what_the_device_held(tmp_path: Path, background: bool, stream: None) -> None:
    loop = Loop(tmp_path, background=background)
    for _ in range(3):
        loop.update()
        handle = loop.manager.save()
        expected = loop.picture()
        handle.wait(deadline_s=LONGEST_WAIT_S)
    assert_same(loop.restored(), expected)


@pytest.mark.parametrize("kind", ["fused", "foreach", "capturable"])
@pytest.mark.parametrize("stream", ["default", "own"], indirect=True)
def test_a_checkpoint_is_that_of_its_boundary_however_the_training_goes_on(
    tmp_path: Path, kind: str, stream: None
) -> None:
    loop = Loop(tmp_path, kind=kind, background=True)
    loop.habits()
    for _ in range(3):
        loop.update()
        expected = loop.picture()
        # Before the copy is asked for, so that the update is still under way.
        torch.cuda._sleep(50_000_000)
        loop.storage.gate.clear()
        handle = loop.manager.save()
        assert not handle.staged
        for _ in range(3):
            loop.step()
        loop.storage.gate.set()
        handle.wait(deadline_s=LONGEST_WAIT_S)
        loop.manager.after_update()
    assert_same(loop.restored(), expected)


def test_memory_that_the_training_lets_go_is_not_given_to_it_before_it_was_read(tmp_path: Path) -> None:
    loop = Loop(tmp_path, background=True)
    loop.habits()
    loop.update()
    expected = loop.picture()
    loop.storage.gate.clear()
    handle = loop.manager.save()
    weight = loop.model.large.weight
    weight.data = weight.data.clone()
    taken = [torch.full_like(weight, float("nan")) for _ in range(4)]
    loop.storage.gate.set()
    handle.wait(deadline_s=LONGEST_WAIT_S)
    assert len(taken) == 4
    assert_same(loop.restored(), expected)


def test_an_edit_between_a_boundary_and_the_next_step_is_torn(tmp_path: Path) -> None:
    loop = Loop(tmp_path, background=True)
    loop.habits()
    loop.update()
    handle = loop.manager.save()
    with torch.no_grad():
        loop.model.large.weight.add_(1.0)
    loop.optimizer.step()
    with pytest.raises(sp.TornSnapshotError, match=r"large\.weight"):
        handle.wait(deadline_s=LONGEST_WAIT_S)


def test_a_weight_that_is_edited_at_each_update_is_copied_at_the_boundary(tmp_path: Path) -> None:
    loop = Loop(tmp_path, background=True)
    for _ in range(4):
        loop.update()
        handle = loop.manager.save()
        expected = loop.picture()
        loop.model.large.weight.data[:1].mul_(0.5)
        loop.step()
        handle.wait(deadline_s=LONGEST_WAIT_S)
        loop.manager.after_update()
    assert_same(loop.restored(), expected)


def test_the_image_is_pinned_and_what_is_saved_does_not_depend_on_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from safepoint.saving.stage import StagingBuffer
    from safepoint.state.streams import DeviceSide

    side, buffer = DeviceSide(torch.device("cuda", torch.cuda.current_device())), StagingBuffer()
    memory = buffer.view(1 << 20)
    assert not torch.frombuffer(memory, dtype=torch.uint8).is_pinned()
    end = side.pin(memory)
    assert torch.frombuffer(memory, dtype=torch.uint8).is_pinned()
    # A second time is refused, and the next kernel is not told of it.
    side.pin(memory)
    torch.zeros(10, device="cuda").add_(1)
    end()
    assert not torch.frombuffer(memory, dtype=torch.uint8).is_pinned()
    monkeypatch.setattr(DeviceSide, "pin", lambda self, memory: lambda: None)
    loop = Loop(tmp_path, background=True)
    loop.habits()
    expected = loop.picture()
    assert_same(loop.restored(), expected)


def test_a_tensor_may_move_between_saves(tmp_path: Path) -> None:
    state = {"w": torch.randn(500, 300, device="cuda"), "v": torch.randn(400, 300)}
    manager = sp.CheckpointManager(tmp_path, {"state": state}, background=True)
    manager.restore()
    for _ in range(4):
        manager.after_update()
        manager.save().wait(deadline_s=LONGEST_WAIT_S)
        expected = {name: one.cpu().clone() for name, one in state.items()}
        for name, one in state.items():
            state[name] = (one.cpu() if one.is_cuda else one.cuda()) + 1
    manager.close()
    again = sp.CheckpointManager(tmp_path, {"state": (found := {name: one + 1 for name, one in state.items()})})
    again.restore(required=True)
    again.close()
    assert_same({name: one.cpu() for name, one in found.items()}, expected)


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="one CUDA device")
def test_two_devices_of_one_process_and_no_other_one_is_used(tmp_path: Path) -> None:
    state = {str(n): torch.randn(1000, 500, device=f"cuda:{1 - n % 2}") for n in range(8)}
    expected = {name: one.cpu() for name, one in state.items()}
    manager = sp.CheckpointManager(tmp_path, {"state": state}, background=True)
    manager.restore()
    manager.after_update()
    manager.save().wait(deadline_s=LONGEST_WAIT_S)
    manager.close()
    again = sp.CheckpointManager(tmp_path, {"state": (found := {n: torch.zeros_like(one) for n, one in state.items()})})
    again.restore(required=True)
    again.close()
    assert_same({name: one.cpu() for name, one in found.items()}, expected)
