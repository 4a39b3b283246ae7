"""A capture of distributed tensors that remembers gives to the byte what a first one gives, whatever has changed.

One rank of a job whose collectives do nothing: what is compared is what this rank would store.
"""

from __future__ import annotations

import contextlib
import random
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.placement_types import _StridedShard

from safepoint.state.modules import ModuleItem
from safepoint.state.optimizers import OptimizerItem
from safepoint.state.registry import Registry
from tests.state.test_boxes import rank_of
from tests.state.test_memo import fresh, remembered

RANKS = 4


@pytest.fixture(autouse=True)
def _one_rank() -> Iterator[None]:
    with rank_of(1, RANKS):
        yield


class Run:
    """Hold a model of distributed parameters and buffers, and an optimizer that has stepped."""

    def __init__(self) -> None:
        torch.manual_seed(3)
        self.meshes = {
            "line": DeviceMesh("cpu", torch.arange(RANKS)),
            "named": DeviceMesh("cpu", torch.arange(RANKS), mesh_dim_names=("data",)),
            "turned": DeviceMesh("cpu", torch.arange(RANKS).flip(0)),
            "square": DeviceMesh("cpu", torch.arange(RANKS).reshape(2, 2)),
            "without": DeviceMesh("cpu", torch.tensor([0, 2, 3])),
        }
        self.net = nn.Module()
        self.net.register_parameter("rows", nn.Parameter(self.divided(torch.randn(8, 3), Shard(0))))
        self.net.register_parameter("columns", nn.Parameter(self.divided(torch.randn(3, 8), Shard(1))))
        self.net.register_parameter("kept", nn.Parameter(torch.randn(5)))
        self.net.register_buffer("count", self.divided(torch.tensor(2.0), Replicate()))
        self.net.register_buffer("mean", self.divided(torch.randn(8), Shard(0)))
        self.optimizer = torch.optim.AdamW(self.net.parameters(), lr=0.1, foreach=False)
        self.step()

    def divided(self, whole: torch.Tensor, *placements: Any, mesh: str = "line") -> DTensor:
        return distribute_tensor(whole, self.meshes[mesh], placements)

    def put(
        self, *placements: Any, mesh: str = "line", shape: tuple[int, ...], part: torch.Tensor | None = None
    ) -> None:
        """Let `rows`, the same object, be divided in another way; its local memory stays, unless a part is given."""
        part = _local(self.net.rows) if part is None else part
        stride = torch.empty(shape, device="meta").stride()
        made = DTensor.from_local(
            part, self.meshes[mesh], placements, run_check=False, shape=torch.Size(shape), stride=stride
        )
        self.net.rows.grad = None
        torch.utils.swap_tensors(self.net.rows, nn.Parameter(made))

    def step(self) -> None:
        for parameter in self.net.parameters():
            parameter.grad = torch.ones_like(parameter)
        self.optimizer.step()

    def moments(self) -> dict[str, Any]:
        return self.optimizer.state[self.net.columns]

    def registry(self) -> Registry:
        registry = Registry()
        registry.add_all({"net": self.net, "optimizer": self.optimizer})
        return registry


def _local(tensor: Any) -> torch.Tensor:
    return tensor._local_tensor.detach()


def _are_distributed(*tensors: Any) -> bool:
    return all(isinstance(one, DTensor) for one in tensors)


def _update(run: Run) -> None:
    """Train on, unless what was changed before makes that impossible."""
    with contextlib.suppress(RuntimeError):
        run.step()


def _set(name: str, make: Callable[[Run], Any]) -> Callable[[Run], None]:
    def act(run: Run) -> None:
        run.moments()[name] = make(run)

    return act


def _swap_moments(run: Run) -> None:
    moments = run.moments()
    moments["exp_avg"], moments["exp_avg_sq"] = moments["exp_avg_sq"], moments["exp_avg"]


def _swap_locals(run: Run) -> None:
    one, other = run.moments()["exp_avg"], run.moments()["exp_avg_sq"]
    if _are_distributed(one, other):
        one._local_tensor, other._local_tensor = other._local_tensor, one._local_tensor


def _move_local(run: Run) -> None:
    """Give a tensor other memory in place, as `fully_shard` does."""
    run.net.mean._local_tensor = _local(run.net.mean).clone() + 1


def _contradict(run: Run) -> None:
    """Let a tensor be of another dtype than its part."""
    moments = run.moments()
    if _are_distributed(moments["exp_avg"]):
        part = _local(moments["exp_avg"])
        made: Any = DTensor.from_local(part.view(torch.int32), run.meshes["line"], [Shard(1)], run_check=False)
        made._local_tensor = part
        moments["exp_avg"] = made


def _share_memory(run: Run) -> None:
    one, other = run.moments()["exp_avg"], run.moments()["exp_avg_sq"]
    if _are_distributed(one, other):
        one._local_tensor = other._local_tensor


def _tie(run: Run) -> None:
    run.net.register_parameter("again", run.net.columns)


# The part of rank 1 has two rows of eight, and two of seven: only the whole's shape tells them apart.
CHANGES: dict[str, Callable[[Run], None]] = {
    "nothing": lambda run: None,
    "a step": _update,
    "a write to local memory": lambda run: _local(run.net.rows).add_(1),
    "other memory": _move_local,
    "locals swapped": _swap_locals,
    "moments swapped": _swap_moments,
    "memory shared": _share_memory,
    "tied": _tie,
    "frozen": lambda run: run.net.columns.requires_grad_(False),
    "another whole": lambda run: run.put(Shard(0), shape=(7, 3)),
    "the same whole": lambda run: run.put(Shard(0), shape=(8, 3)),
    "strided": lambda run: run.put(_StridedShard(0, split_factor=2), shape=(8, 3)),
    "another mesh": lambda run: run.put(Shard(0), Shard(0), mesh="square", shape=(8, 3)),
    "a mesh of other names": lambda run: run.put(Shard(0), mesh="named", shape=(8, 3)),
    "another place on the mesh": lambda run: run.put(Shard(0), mesh="turned", shape=(8, 3)),
    "a mesh without this rank": lambda run: run.put(Shard(0), mesh="without", shape=(8, 3), part=torch.ones(0)),
    "replicated": lambda run: run.put(Replicate(), shape=(2, 3)),
    "held by all, which the part contradicts": lambda run: run.put(Replicate(), shape=(8, 3)),
    "to be added up": lambda run: run.put(Partial(), shape=(2, 3)),
    "a part of a wrong shape": lambda run: run.put(Shard(0), shape=(8, 3), part=torch.ones(3, 3)),
    "another dtype": lambda run: run.put(Shard(0), shape=(8, 3), part=torch.ones(2, 3, dtype=torch.float64)),
    "a dtype that the part contradicts": _contradict,
    "a plain moment": _set("exp_avg", lambda run: torch.ones(3, 8)),
    "a moment held by all": _set("exp_avg", lambda run: run.divided(torch.ones(3, 8), Replicate())),
    "a number on the mesh": _set("step", lambda run: run.divided(torch.tensor(7.0), Replicate())),
    "a moment in another order": _set("exp_avg", lambda run: run.divided(torch.randn(8, 3).t(), Shard(1))),
    "a buffer of another number": lambda run: _local(run.net.count).add_(1),
}


@pytest.mark.parametrize("name", list(CHANGES))
def test_a_change_shows_in_the_next_capture(name: str) -> None:
    run = Run()
    registry = run.registry()
    remembered(registry)

    CHANGES[name](run)

    assert remembered(registry) == fresh(run)


@pytest.mark.parametrize("seed", [*range(3), *(pytest.param(seed, marks=pytest.mark.soak) for seed in range(3, 100))])
def test_captures_among_changes_of_any_order_are_those_of_a_first_capture(seed: int) -> None:
    rng = random.Random(seed)
    run = Run()
    registry = run.registry()
    done = []
    for _ in range(8):
        done.append(rng.choice(list(CHANGES)))
        CHANGES[done[-1]](run)
        assert remembered(registry) == fresh(run), f"seed {seed}: {done}"


def test_a_state_of_equal_facts_is_not_drafted_again(monkeypatch: pytest.MonkeyPatch) -> None:
    run = Run()
    registry = run.registry()
    first = remembered(registry)

    def fail(*ignored: object) -> None:
        raise AssertionError("drafted again")

    monkeypatch.setattr(ModuleItem, "_draft", fail)
    monkeypatch.setattr(OptimizerItem, "_draft", fail)
    assert remembered(registry) == first
    run.step()
    assert remembered(registry) != first


def test_a_write_through_the_distributed_tensor_counts_from_the_boundary_that_was_seen_again() -> None:
    run = Run()
    item = run.registry().items["net"]
    item.capture()
    captured = {one.spec.name: one.source for one in item.capture().tensors}
    before = bytearray(captured["rows"].nbytes)
    captured["rows"].copy_into(memoryview(before))
    with torch.no_grad():
        run.net.rows.add_(1)
    with pytest.raises(Exception, match="written to while it was saved"):
        captured["rows"].check()
