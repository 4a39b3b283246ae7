"""Which buffers may differ between ranks: those that a wrapper hands out before each forward pass, and no others."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
from torch import nn

from safepoint.state.modules import ModuleItem


@pytest.fixture
def one_rank() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def leaders(module: nn.Module) -> tuple[set[str], set[str]]:
    """Return which tensors, and which entries, of a module are the leader's."""
    found = ModuleItem("model", module).capture()
    return {one.spec.name for one in found.tensors if one.is_leaders}, set(found.leaders)


def stack() -> nn.Module:
    return nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))


def test_only_buffers_that_ddp_hands_out_are_the_leader_s(one_rank: None) -> None:
    """Spec: C5.4"""
    ddp = nn.parallel.DistributedDataParallel
    spread = {"1.running_mean", "1.running_var"}
    everything = spread | {"1.num_batches_tracked"}
    assert leaders(stack()) == (set(), set())
    assert leaders(ddp(stack())) == (spread, everything)
    assert leaders(torch.compile(ddp(stack()))) == (spread, everything)
    assert leaders(ddp(stack(), broadcast_buffers=False)) == (set(), set())
    ignoring = stack()
    ddp._set_params_and_buffers_to_ignore_for_model(ignoring, ["1.running_mean"])
    assert leaders(ddp(ignoring)) == (spread - {"1.running_mean"}, everything - {"1.running_mean"})
    inside = nn.ModuleDict({"a": ddp(nn.BatchNorm1d(2)), "b": nn.BatchNorm1d(2)})
    assert leaders(inside)[0] == {"a.running_mean", "a.running_var"}
