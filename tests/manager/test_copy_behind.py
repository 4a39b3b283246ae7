"""The copy behind the loop: whatever steps while it is under way, a checkpoint holds the values of its boundary."""

from __future__ import annotations

import ctypes
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import safepoint as sp
from safepoint.saving import copying
from safepoint.storage.local import LocalStorage

LONGEST_WAIT_S = 60
# Of several parts, so that a copy can be under way.
ROWS = 700


class Gated:
    """A storage that makes no folder of a generation until its gate is opened: nothing is copied behind the loop."""

    def __init__(self, url: Path) -> None:
        self._inner = LocalStorage(str(url))
        self.gate = threading.Event()
        self.gate.set()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def make_folder(self, path: str) -> None:
        assert self.gate.wait(LONGEST_WAIT_S)
        self._inner.make_folder(path)


class ByHand(torch.optim.Optimizer):
    """An optimizer as users write them: it edits `.data`, which no count of writes shows."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {"lr": 0.1})

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> None:
        for group in self.param_groups:
            for one in group["params"]:
                state = self.state[one]
                state.setdefault("mean", torch.zeros_like(one))
                state["mean"].data.lerp_(one.grad, 0.5)
                one.data.sub_(group["lr"] * state["mean"])


class Loop:
    """A training, its manager, and the storage that can hold a copy up."""

    def __init__(self, folder: Path, make: Callable[[Any], torch.optim.Optimizer], **options: Any) -> None:
        torch.manual_seed(0)
        self.model = nn.Sequential(nn.Linear(500, ROWS), nn.BatchNorm1d(ROWS), nn.Linear(ROWS, 3))
        self.optimizer = make(self.model.parameters())
        self.storage, self.folder = Gated(folder), folder
        items = {"model": self.model, "optimizer": self.optimizer}
        self.manager = sp.CheckpointManager(folder, items, background=True, storage=self.storage, **options)
        self.manager.restore()

    def loss(self) -> torch.Tensor:
        self.optimizer.zero_grad()
        found = self.model(torch.randn(8, 500)).square().sum()
        found.backward()
        return found

    def step(self) -> None:
        self.loss()
        self.optimizer.step(self.loss if isinstance(self.optimizer, torch.optim.LBFGS) else None)

    def update(self) -> None:
        self.step()
        self.manager.after_update()

    def settle(self) -> None:
        """Save at the boundary, and step: from here on the loop's habits are known."""
        self.update()
        self.manager.save().wait(deadline_s=LONGEST_WAIT_S)

    def begin_save(self) -> tuple[sp.SaveHandle, dict[str, torch.Tensor]]:
        """Save, nothing copied behind the loop yet, and return what must be in the checkpoint."""
        self.update()
        self.storage.gate.clear()
        return self.manager.save(), self.picture()

    def picture(self) -> dict[str, torch.Tensor]:
        found = {f"model.{name}": one.clone() for name, one in self.model.state_dict().items()}
        for number, state in enumerate(self.optimizer.state.values()):
            found.update(
                {f"{number}.{key}": one.clone() for key, one in state.items() if isinstance(one, torch.Tensor)}
            )
        return found

    def finish(self, handle: sp.SaveHandle) -> dict[str, torch.Tensor]:
        """Let the save end, and return what its checkpoint gives back."""
        self.storage.gate.set()
        handle.wait(deadline_s=LONGEST_WAIT_S)
        self.manager.close()
        manager = sp.CheckpointManager(
            self.folder, {"model": self.model, "optimizer": self.optimizer}, storage=self.storage
        )
        manager.restore(required=True)
        manager.close()
        return self.picture()


KINDS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "fused": lambda parameters: torch.optim.AdamW(parameters, fused=True),
    "foreach": lambda parameters: torch.optim.AdamW(parameters, foreach=True, amsgrad=True),
    "capturable": lambda parameters: torch.optim.NAdam(parameters, capturable=True),
    "sgd": lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9),
    "lbfgs": lambda parameters: torch.optim.LBFGS(parameters, lr=0.1, max_iter=2, history_size=2),
    "by hand": ByHand,
}


@pytest.fixture(autouse=True)
def every_device_can_be_captured(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a CPU alone there is none, and what a capturable optimizer computes is the same there."""
    module = sys.modules["torch.optim.nadam"]
    monkeypatch.setattr(module, "_get_capturable_supported_devices", lambda **ignored: ["cpu"])


@pytest.fixture(params=list(KINDS))
def loop(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Loop]:
    made = Loop(tmp_path, KINDS[request.param])
    yield made
    made.storage.gate.set()


def assert_same(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert found.keys() == expected.keys()
    assert [name for name, one in expected.items() if not torch.equal(found[name], one)] == []


def in_thread(work: Callable[[], object]) -> None:
    failures: list[BaseException] = []

    def run() -> None:
        try:
            work()
        except BaseException as exc:  # noqa: BLE001 (handed on below)
            failures.append(exc)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join(LONGEST_WAIT_S)
    assert not thread.is_alive() and not failures, failures


def test_an_optimizer_that_steps_while_the_copy_is_under_way_leaves_the_old_values_in_the_checkpoint(
    loop: Loop,
) -> None:
    loop.settle()
    handle, expected = loop.begin_save()
    assert not handle.staged, "nothing was left to be copied behind the loop"
    loop.step()
    assert handle.staged
    loop.step()
    assert_same(loop.finish(handle), expected)


def test_a_step_in_another_thread_waits_as_well(tmp_path: Path) -> None:
    loop = Loop(tmp_path, KINDS["fused"])
    loop.settle()
    handle, expected = loop.begin_save()
    in_thread(loop.step)
    assert_same(loop.finish(handle), expected)


def test_a_step_of_an_optimizer_that_is_not_registered_waits_as_well(tmp_path: Path) -> None:
    """It may have the same parameters."""
    loop = Loop(tmp_path, KINDS["sgd"])
    other = torch.optim.SGD(loop.model.parameters(), lr=0.5)
    loop.settle()
    handle, expected = loop.begin_save()
    loop.loss()
    other.step()
    assert handle.staged
    assert_same(loop.finish(handle), expected)


def test_what_no_optimizer_owns_is_copied_at_the_boundary(tmp_path: Path) -> None:
    loop = Loop(tmp_path, KINDS["fused"])
    loop.settle()
    handle, expected = loop.begin_save()
    loop.loss()  # moves the statistics of BatchNorm
    assert not handle.staged
    assert not torch.equal(loop.model[1].running_mean, expected["model.1.running_mean"])
    assert_same(loop.finish(handle), expected)


def test_the_first_save_copies_all_at_the_boundary(tmp_path: Path) -> None:
    loop = Loop(tmp_path, KINDS["fused"])
    handle, expected = loop.begin_save()
    assert handle.staged
    loop.model[0].weight.data.fill_(7.0)
    assert_same(loop.finish(handle), expected)


def test_an_update_whose_step_was_not_seen_copies_all_at_the_boundary(tmp_path: Path) -> None:
    """As that of a graph that is replayed, or one that a gradient scaler skipped."""
    loop = Loop(tmp_path, KINDS["fused"])
    loop.settle()
    loop.step()
    loop.manager.after_update()
    loop.manager.after_update()
    loop.storage.gate.clear()
    handle, expected = loop.manager.save(), loop.picture()
    assert handle.staged
    assert_same(loop.finish(handle), expected)


def test_what_the_loop_changes_between_two_steps_is_copied_at_the_boundary(tmp_path: Path) -> None:
    """One element of many, which no sample is likely to meet, in a way that no count shows."""
    loop = Loop(tmp_path, KINDS["fused"])
    weight = loop.model[0].weight

    def clip() -> None:
        weight.data[3, 5] = 9.0

    loop.settle()
    clip()
    handle, expected = loop.begin_save()
    clip()
    assert weight[3, 5] == 9.0 != expected["model.0.weight"][3, 5]
    assert not handle.staged, "the others lie still"
    assert_same(loop.finish(handle), expected)


def test_a_tensor_that_is_given_other_memory_is_saved_as_it_was(tmp_path: Path) -> None:
    loop = Loop(tmp_path, KINDS["fused"])
    loop.settle()
    handle, expected = loop.begin_save()
    loop.model[0].weight.data = torch.ones(ROWS, 500)
    assert_same(loop.finish(handle), expected)


def write_through(weight: torch.Tensor) -> None:
    with torch.no_grad():
        weight[1, 1] = 5.0


def write_past(weight: torch.Tensor) -> None:
    weight.data.mul_(1.5)


@pytest.mark.parametrize("change", [write_through, write_past])
def test_a_change_that_comes_once_before_its_copy_is_torn_and_never_published(
    tmp_path: Path, change: Callable[[torch.Tensor], None]
) -> None:
    """By the count of writes, or by the sample. The next save copies that tensor at the boundary."""
    loop = Loop(tmp_path, KINDS["fused"])
    loop.settle()
    handle, _ = loop.begin_save()
    change(loop.model[0].weight)
    loop.storage.gate.set()
    with pytest.raises(sp.TornSnapshotError, match=r"0\.weight"):
        loop.manager.wait()
    assert [one.step for one in loop.manager.checkpoints()] == [1]
    assert not handle.committed
    loop.update()
    handle, expected = loop.manager.save(), loop.picture()
    assert_same(loop.finish(handle), expected)


def test_a_load_of_weights_before_the_copy_is_torn(tmp_path: Path) -> None:
    loop = Loop(tmp_path, KINDS["fused"])
    loop.settle()
    loop.begin_save()
    loop.model.load_state_dict({name: one + 1 for name, one in loop.model.state_dict().items()})
    loop.storage.gate.set()
    with pytest.raises(sp.TornSnapshotError):
        loop.manager.wait()


def test_a_failure_of_the_copy_in_a_step_is_that_of_the_save(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    loop = Loop(tmp_path, KINDS["fused"])
    loop.settle()
    handle, _ = loop.begin_save()

    def fail(*ignored: object) -> None:
        raise MemoryError("no")

    with monkeypatch.context() as patch:
        patch.setattr(copying, "move", fail)
        loop.step()
    loop.storage.gate.set()
    with pytest.raises(MemoryError):
        handle.wait(deadline_s=LONGEST_WAIT_S)
    with pytest.raises(MemoryError):
        loop.manager.wait()


def test_an_interrupt_while_a_step_waits_is_raised_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    loop = Loop(tmp_path, KINDS["fused"])
    loop.settle()
    handle, _ = loop.begin_save()

    def interrupt(*ignored: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(copying, "move", interrupt)
        loop.step()
    loop.storage.gate.set()
    with pytest.raises(KeyboardInterrupt):
        handle.wait(deadline_s=LONGEST_WAIT_S)
    with pytest.raises(KeyboardInterrupt):
        loop.manager.wait()


def test_two_threads_share_the_copy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """While one step copies, the thread that writes copies as well."""
    loop = Loop(tmp_path, KINDS["fused"])
    loop.settle()
    handle, expected = loop.begin_save()
    meeting, by_thread = threading.Barrier(2), {}

    def move(target: int, source: int, size: int) -> None:
        name = threading.current_thread().name
        if name not in by_thread:
            by_thread[name] = 0
            meeting.wait(LONGEST_WAIT_S)
        by_thread[name] += size
        ctypes.memmove(target, source, size)

    monkeypatch.setattr(copying, "move", move)
    loop.storage.gate.set()
    loop.step()
    assert_same(loop.finish(handle), expected)
    large = loop.model[0].weight.nbytes * 3
    assert sum(by_thread.values()) >= large
    assert sorted(by_thread) == ["MainThread", "safepoint-save"]


def test_the_wait_before_a_step_counts_as_blocked(tmp_path: Path) -> None:
    loop = Loop(tmp_path, KINDS["fused"])
    loop.settle()
    handle, _ = loop.begin_save()
    before = loop.manager._saver.behind._followed[2].blocked_s
    loop.step()
    loop.finish(handle)
    assert loop.manager.stats.saves[-1].blocked_s > before


def test_no_hook_is_left_on_what_is_saved(tmp_path: Path) -> None:
    loop = Loop(tmp_path, KINDS["fused"])
    loop.settle()
    handle, _ = loop.begin_save()
    hooks = [value for key, value in vars(loop.model).items() if "hooks" in key]
    hooks += [value for key, value in vars(loop.optimizer).items() if "hooks" in key]
    assert len(hooks) > 10 and not any(hooks)
    loop.finish(handle)


def test_a_bound_that_holds_the_state_lets_it_be_copied_behind_the_loop(tmp_path: Path) -> None:
    loop = Loop(tmp_path, KINDS["fused"], staging_memory=64 << 20)
    loop.settle()
    handle, expected = loop.begin_save()
    assert not handle.staged
    assert_same(loop.finish(handle), expected)


def test_nothing_is_copied_behind_a_loop_that_does_not_want_it(tmp_path: Path) -> None:
    loop = Loop(tmp_path, KINDS["fused"], copy_behind=False)
    loop.settle()
    handle, expected = loop.begin_save()
    assert handle.staged
    loop.model[0].weight.data.fill_(7.0)
    assert_same(loop.finish(handle), expected)
