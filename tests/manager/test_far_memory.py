"""A whole training on a device that is played: what comes from it goes by its streams, and old values only.

The tensors lie in host memory, but what is asked for on the stream beside the training is done when somebody waits.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import safepoint as sp
from safepoint.state.tensors import TensorSource
from tests.manager.test_copy_behind import KINDS, LONGEST_WAIT_S, Loop, assert_same
from tests.saving.devices import Device, far_type

WORDS = ("addresses", "copy_into", "far", "hold", "in_place")


@pytest.fixture(autouse=True)
def device(monkeypatch: pytest.MonkeyPatch) -> Device:
    made = Device("training")
    kind = far_type(made)
    for word in WORDS:
        monkeypatch.setattr(TensorSource, word, kind.__dict__[word])
    return made


@pytest.mark.parametrize("kind", ["fused", "sgd", "by hand"])
def test_a_step_while_the_copy_is_under_way_does_not_get_into_the_checkpoint(kind: str, tmp_path: Path) -> None:
    loop = Loop(tmp_path, KINDS[kind])
    loop.settle()
    handle, expected = loop.begin_save()
    assert not handle.staged
    loop.step()
    assert_same(loop.finish(handle), expected)


def test_the_next_save_uses_the_memory_of_the_one_before(tmp_path: Path) -> None:
    loop = Loop(tmp_path, KINDS["fused"])
    loop.settle()
    for _ in range(3):
        handle, expected = loop.begin_save()
        loop.step()
        loop.step()
        loop.storage.gate.set()
        handle.wait(deadline_s=LONGEST_WAIT_S)
        loop.manager.after_update()
    assert_same(loop.finish(handle), expected)


def test_a_save_that_the_loop_waits_for_is_what_the_device_held(tmp_path: Path) -> None:
    state = {"large": torch.rand(40_000), "small": torch.rand(7), "number": torch.tensor(5.0)}
    manager = sp.CheckpointManager(tmp_path, {"state": state})
    manager.restore()
    manager.after_update()
    manager.save()
    manager.close()
    expected = {name: one.clone() for name, one in state.items()}
    for one in state.values():
        one.zero_()
    again = sp.CheckpointManager(tmp_path, {"state": state})
    again.restore(required=True)
    again.close()
    assert_same(state, expected)
