"""A rank of `test_processes`: restores what another number of ranks saved, compares it, trains on, and saves again.

Called with a folder for runs and notes, and the chains. Each is a run whose model is divided in its own way at each
start.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import safepoint as sp
from safepoint.format.digest import digest_bytes
from tests.restoring.ranks import norms
from tests.state.divided import Built, build, everything, train

UPDATES = 2
CHAINS: dict[str, dict[int, str]] = {
    "fsdp": dict.fromkeys((1, 2, 3, 4), "fsdp"),
    "ddp": dict.fromkeys((1, 2, 3, 4), "ddp"),
    "mixed": {4: "fsdp_tp", 2: "ddp", 3: "fsdp", 1: "plain"},
}
PERMITTED = frozenset({"world_size", "rng"})
OWN = "noise.per_rank"


def digests(built: Built) -> dict[str, str]:
    """Return the digest of every whole tensor: parameters, buffers, moments and step counters; a collective."""
    whole = {name: value.contiguous().reshape(-1).view(torch.uint8) for name, value in everything(built).items()}
    return {name: digest_bytes(memoryview(value.numpy())) for name, value in whole.items()}


def of_each_rank(value: str) -> list[str]:
    """Return what every rank has; a collective."""
    values: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


def go_on(chain: str, folder: Path) -> str:
    """Go on from what the last start of a chain left, and return what the report says."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    notes = folder / f"{chain}.json"
    before = json.loads(notes.read_text()) if notes.exists() else None
    dist.barrier()
    way = CHAINS[chain][world_size]
    is_same = before is not None and (before["way"], before["world_size"]) == (way, world_size)
    built = build(way, seed=1 if before is None else 7)
    noise = torch.Generator().manual_seed(100 + rank)
    state = {"model": built[0], "optimizer": built[1], "noise": noise}
    if before is not None and not is_same and before["world_size"] > 1:
        refuse(folder / chain, state)
    manager = sp.CheckpointManager(folder / chain, state, contract=sp.Contract("exact", PERMITTED | {OWN}))
    with manager:
        report = manager.restore(required=before is not None)
        if before is not None:
            compare(built, noise, before, step=report.step, is_same=is_same)
        for step in range(report.step, report.step + UPDATES):
            torch.rand(1 + rank, generator=noise)
            train(built, step, step + 1)
            manager.after_update()
        manager.save()
        step = manager.progress.step
        left = {"way": way, "world_size": world_size, "step": step, "digests": digests(built)}
        left["noise"] = of_each_rank(digest_bytes(bytes(noise.get_state().numpy())))
        if is_same:
            assert before is not None and left["digests"] == before["beyond"], "went on otherwise"
        train(built, step, step + UPDATES)
        left["beyond"] = digests(built)
        manager.restore()
        assert digests(built) == left["digests"], "did not go back"
    if rank == 0:
        notes.write_text(json.dumps(left))
    return f"{chain}: {way} on {world_size}, {' '.join(sorted({one.word for one in report.reasons})) or 'exact'}"


def refuse(url: Path, state: Mapping[str, object]) -> None:
    """See that another number of ranks is refused by the name of what each rank had of its own."""
    manager = sp.CheckpointManager(url, state, contract=sp.Contract("exact", PERMITTED))
    try:
        manager.restore()
    except sp.ContractError as error:
        assert [one.word for one in error.differences] == [OWN], error
    else:
        raise AssertionError("not refused")
    finally:
        manager.close()


def compare(built: Built, noise: torch.Generator, before: Mapping[str, Any], *, step: int, is_same: bool) -> None:
    """Compare what is restored with what the last start left."""
    found = digests(built)
    assert step == before["step"] and sorted(found) == sorted(before["digests"])
    assert [name for name, digest in found.items() if before["digests"][name] != digest] == []
    if is_same:
        assert of_each_rank(digest_bytes(bytes(noise.get_state().numpy()))) == before["noise"]


def main(folder: Path, chains: list[str]) -> None:
    dist.init_process_group("gloo")
    for chain in chains:
        told = go_on(chain, folder)
        if dist.get_rank() == 0:
            print(told, flush=True)
    if not (folder / "norms.json").exists():
        norms.save_on_two(folder)
    told = norms.go_on(folder)
    if dist.get_rank() == 0:
        print(told, flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
