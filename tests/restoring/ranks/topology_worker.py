"""A rank of `test_topology`: saves state that is divided in one way and restores it in another, on the same ranks.

Called with a folder for runs. Prints one line of each case: what the restore promised, or which words refused it.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

import safepoint as sp


def of_one_row(value: float) -> DTensor:
    """Return a tensor that the first rank holds whole, and the others not at all."""
    return distribute_tensor(torch.full((1,), value), init_device_mesh("cpu", (2,)), [Shard(0)])


def of_first_rank(value: float, placement: Any) -> DTensor:
    """Return a tensor of a mesh to which only the first rank belongs."""
    mesh = DeviceMesh("cpu", [0])
    local = torch.full((3,), value) if dist.get_rank() == 0 else torch.empty(0)
    return DTensor.from_local(local, mesh, [placement], run_check=False, shape=torch.Size((3,)), stride=(1,))


def model(way: str) -> torch.nn.Module:
    torch.manual_seed(0)
    net = torch.nn.Linear(4, 4)
    if way == "replicated":
        return DistributedDataParallel(net)
    if way == "sharded":
        return fully_shard(net, mesh=init_device_mesh("cpu", (2,)))  # type: ignore[no-any-return, call-overload]
    return parallelize_module(net, init_device_mesh("cpu", (2,), mesh_dim_names=("model",)), ColwiseParallel())


def with_optimizer(way: str, *, updates: int) -> dict[str, Any]:
    net = model(way)
    optimizer = torch.optim.Adam(net.parameters())
    for _ in range(updates):
        net(torch.ones(2, 4)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    return {"model": net, "optimizer": optimizer}


def change(folder: Path, name: str, saved: dict[str, Any], live: dict[str, Any], *permit: str) -> None:
    with sp.CheckpointManager(folder / name, saved) as manager:
        manager.after_update()
        manager.save()
    with sp.CheckpointManager(folder / name, live, contract=sp.Contract("exact", permit)) as manager:
        try:
            told = manager.restore().promise.level
        except sp.ContractError as error:
            told = "refused " + " ".join(f"{one.word} {one.subject}" for one in error.differences)
    if dist.get_rank() == 0:
        print(f"{name}: {told}", flush=True)


def main(folder: Path) -> None:
    dist.init_process_group("gloo")
    torch.set_num_threads(1)
    tensors = {
        "one row": of_one_row,
        "sub-mesh": lambda value: of_first_rank(value, Shard(0)),
        "replica of a sub-mesh": lambda value: of_first_rank(value, Replicate()),
    }
    for name, make in tensors.items():
        live = {"scale": make(0.0)}
        change(folder, name, {"x": {"scale": make(3.0)}}, {"x": live})
        assert isinstance(live["scale"], DTensor) and bool((live["scale"].to_local() == 3).all()), name
    for name, saved, now in (("same", "sharded", "sharded"), ("cut", "replicated", "sharded")):
        change(folder, name, with_optimizer(saved, updates=1), with_optimizer(now, updates=0))
    change(folder, "cut otherwise", {"model": model("sharded")}, {"model": model("columns")})
    change(folder, "put together", {"model": model("sharded")}, {"model": model("replicated")})
    change(folder, "permitted", {"model": model("replicated")}, {"model": model("sharded")}, "topology")
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
