"""The job of `ranks.py`: each of its ranks runs this under torchrun.

rank_job.py SIZE_BYTES ROUNDS SECONDS FOLDER REPORT
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from harness.files import come_to_rest
from harness.managed import Managed
from harness.rounds import WARM_UPS, RoundClock
from harness.states import LAYERS, Network, Training, size_of, width_of

KINDS = (("one_rank", 1), ("fsdp2_2", 2), ("fsdp2_4", 4), ("ddp_2", 2), ("ddp_4", 4))


class Part:
    """Hold one rank's part of a training that the first so many ranks share, and its manager.

    Args:
        name: One of `KINDS`.
        group: The ranks that share it; this process is one of them.
    """

    def __init__(self, name: str, folder: Path, size_bytes: int, group: dist.ProcessGroup) -> None:
        self.name, self._group = name, group
        torch.manual_seed(0)
        model: torch.nn.Module = Network(width_of(size_bytes, LAYERS), LAYERS)
        if name.startswith("fsdp2"):
            mesh = DeviceMesh.from_group(group, "cpu")
            for block in model.blocks:
                fully_shard(block, mesh=mesh)
            fully_shard(model, mesh=mesh)
        elif name.startswith("ddp"):
            model = DistributedDataParallel(model, process_group=group)
        self._optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5)
        for parameter in model.parameters():
            parameter.grad = torch.ones_like(parameter)
        self._optimizer.step()
        self._managed = Managed(
            folder / name, {"model": model, "optimizer": self._optimizer}, process_group=group, agreement="off"
        )

    def save(self) -> float:
        """Save a boundary on all its ranks together; return the seconds until the last of them has it."""
        self._optimizer.step()
        self._managed.mark()
        dist.barrier(self._group)
        started = time.perf_counter()
        self._managed.save()
        dist.barrier(self._group)
        return time.perf_counter() - started

    def forget(self) -> None:
        """Delete what was saved, on one rank."""
        dist.barrier(self._group)
        if dist.get_rank(self._group) == 0:
            self._managed.forget()
        dist.barrier(self._group)

    def close(self) -> None:
        """Let the run go."""
        self._managed.close()


def take_turn(parts: list[Part]) -> list[float]:
    """Save this rank's parts, of which there is one or none, while ranks without one wait; return the seconds."""
    if dist.get_rank() == 0:
        come_to_rest()
    dist.barrier()
    found = []
    for part in parts:
        found.append(part.save())
        part.forget()
    dist.barrier()
    return found


def agreed(has_time: bool) -> bool:
    """Return what the first rank's clock says, on all ranks."""
    said = [has_time]
    dist.broadcast_object_list(said, src=0)
    return said[0]


def main() -> None:
    """Measure, and let the first rank write the report."""
    size_bytes, rounds, limit_s = int(sys.argv[1]), int(sys.argv[2]), float(sys.argv[3])
    folder, report = Path(sys.argv[4]), Path(sys.argv[5])
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    groups = {count: dist.new_group(list(range(count))) for count in (1, 2, 4)}
    parts = [Part(name, folder, size_bytes, groups[count]) for name, count in KINDS if rank < count]
    seconds: dict[str, list[float]] = {name: [] for name, _ in KINDS}
    clock = RoundClock(limit_s)
    for turn in range(-WARM_UPS, rounds):
        if turn > 0 and not agreed(clock.has_time):
            break
        start = turn % len(KINDS)
        for name, _ in [*KINDS[start:], *KINDS[:start]]:
            spent = take_turn([part for part in parts if part.name == name])
            if turn >= 0:
                seconds[name] += spent
        clock.end_round()
    for part in parts:
        part.close()
    if rank == 0:
        size = size_of(Training(size_bytes).tensors())
        report.write_text(json.dumps({"bytes": size, "seconds": seconds}), encoding="utf-8")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
