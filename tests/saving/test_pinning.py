"""Memory of ours is pinned once, only where something comes from an accelerator, and unpinned before it goes."""

from __future__ import annotations

import pytest
import torch

from safepoint.saving.stage import StagingBuffer
from safepoint.state.far import far_among
from safepoint.state.tensors import TensorSource
from tests.saving.devices import Device, far_type

SIZE = 5000


@pytest.fixture
def device() -> Device:
    return Device("training")


def test_memory_is_pinned_once_and_until_it_is_given_back(device: Device) -> None:
    far = far_among([far_type(device).of(torch.zeros(1), "")], {})
    assert far is not None
    buffer = StagingBuffer()
    for _ in range(2):
        buffer.view(SIZE, far.carrier)
    assert device.pinned == [f"pin {SIZE}"]
    buffer.view(2 * SIZE, far.carrier)
    assert device.pinned == [f"pin {SIZE}", f"unpin {SIZE}", f"pin {2 * SIZE}"]
    del buffer
    assert device.pinned[-1] == f"unpin {2 * SIZE}"


def test_memory_is_not_pinned_where_nothing_comes_from_an_accelerator(device: Device) -> None:
    assert far_among([TensorSource.of(torch.zeros(1), "")], {}) is None
    StagingBuffer().view(100)
    assert device.pinned == []
