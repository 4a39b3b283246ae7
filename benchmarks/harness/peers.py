"""The other libraries, each set up well, and made durable: files and their folder are synced before the clock stops.

None of them checks what it reads. Loads fill the live tensors in place, so that every byte is really read; where a
library gives tensors of its own that hold their bytes, taking them over would do, and then they are not copied.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import safetensors.torch
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner

from harness.files import sync_tree

Tensors = dict[str, torch.Tensor]


@dataclass(frozen=True, slots=True)
class Peer:
    """Name a way to save tensors to a new path, and to load them from there again."""

    name: str
    save: Callable[[Tensors, Path], object]
    load: Callable[[Tensors, Path], object]


def peers() -> tuple[list[Peer], dict[str, str]]:
    """Return the peers that can be had, and why the others cannot, by name."""
    found = [
        Peer("torch_save", save_torch, load_torch),
        Peer("safetensors", save_safetensors, load_safetensors),
        Peer("dcp", lambda tensors, path: save_dcp(tensors, path, threads=1), load_dcp),
        Peer("dcp_2_threads", lambda tensors, path: save_dcp(tensors, path, threads=2), load_dcp),
    ]
    try:
        import torchsnapshot  # noqa: F401 (an optional peer)
    except ImportError as exc:
        return found, {"torchsnapshot": f"cannot be imported: {exc}"}
    return [*found, Peer("torchsnapshot", save_torchsnapshot, load_torchsnapshot)], {}


def save_torch(tensors: Tensors, path: Path) -> None:
    """Save with `torch.save`."""
    torch.save(tensors, path)
    sync_tree(path)


def load_torch(tensors: Tensors, path: Path) -> None:
    """Load with `torch.load`, whose own tensors are taken over as they are."""
    found = torch.load(path, map_location="cpu", weights_only=True)
    if found.keys() != tensors.keys():
        raise ValueError("other tensors were loaded than were saved")


def load_torch_mapped(tensors: Tensors, path: Path) -> None:
    """Load with `torch.load` of a mapped file, and copy, which is what reads it."""
    _copy(torch.load(path, map_location="cpu", weights_only=True, mmap=True), tensors)


def save_safetensors(tensors: Tensors, path: Path) -> None:
    """Save with safetensors."""
    safetensors.torch.save_file(tensors, path)
    sync_tree(path)


def load_safetensors(tensors: Tensors, path: Path) -> None:
    """Copy each tensor out of the mapped file, which is what reads it."""
    with safetensors.safe_open(path, framework="pt") as file:
        for name, tensor in tensors.items():
            tensor.copy_(file.get_tensor(name))


def save_dcp(tensors: Tensors, path: Path, *, threads: int) -> None:
    """Save with torch.distributed.checkpoint, which syncs its files itself."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        if threads == 1:
            dcp.save(tensors, checkpoint_id=path, no_dist=True)
        else:
            dcp.save(
                tensors, storage_writer=dcp_writer(path, threads=threads), planner=DefaultSavePlanner(), no_dist=True
            )
    sync_tree(path)


def dcp_writer(path: Path, *, threads: int = 2) -> FileSystemWriter:
    """Return a writer that syncs what it writes."""
    return FileSystemWriter(path, thread_count=threads, sync_files=True)


def load_dcp(tensors: Tensors, path: Path) -> None:
    """Load with torch.distributed.checkpoint, in place."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.load(dict(tensors), storage_reader=FileSystemReader(path), no_dist=True)


def save_torchsnapshot(tensors: Tensors, path: Path) -> None:
    """Save with torchsnapshot, which syncs nothing: that is done here."""
    import torchsnapshot

    torchsnapshot.Snapshot.take(str(path), {"state": torchsnapshot.StateDict(**tensors)})
    sync_tree(path)


def load_torchsnapshot(tensors: Tensors, path: Path) -> None:
    """Load with torchsnapshot, in place."""
    import torchsnapshot

    torchsnapshot.Snapshot(str(path)).restore({"state": torchsnapshot.StateDict(**tensors)})


def _copy(found: Tensors, tensors: Tensors) -> None:
    for name, tensor in tensors.items():
        tensor.copy_(found[name])
