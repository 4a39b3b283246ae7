"""Saves beside a training: what the loop waits for, and when the checkpoint is complete and durable.

A loop is blocked while it calls the save, and while it has to wait before the next update because the copy is not
complete. safepoint waits inside the optimizer's own hook, so that wait is measured between two hooks of ours, one on
either side. DCP with a stager that copies in a thread leaves the wait to the loop, which makes it just before the
update.
"""

from __future__ import annotations

import logging
import os
import threading
import time
import warnings
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions
from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType
from torch.optim.optimizer import register_optimizer_step_pre_hook

from harness.files import remove, sync_tree
from harness.managed import Managed
from harness.peers import Tensors, dcp_writer


class Background(Protocol):
    """Save beside a training."""

    name: str

    def begin(self) -> Callable[[], object]:
        """Save this boundary; return what waits until the checkpoint is complete and durable."""

    def before_update(self) -> None:
        """Wait until the state may change, where that is left to the loop."""

    def forget(self) -> None:
        """Delete what was saved."""

    def close(self) -> None:
        """Let go of everything."""


class SafepointBackground:
    """safepoint with `background=True`."""

    name = "safepoint"

    def __init__(self, folder: Path, items: dict[str, object]) -> None:
        self._managed = Managed(folder / "run", items, background=True)
        self.forget, self.close = self._managed.forget, self._managed.close

    def begin(self) -> Callable[[], object]:
        """Mark the boundary and save it."""
        self._managed.mark()
        return self._managed.save().wait

    def before_update(self) -> None:
        """Leave the wait to the optimizer's hook."""


class DcpBackground:
    """`async_save` with two writing threads and a stager that is kept, so that its memory is used again.

    Args:
        name: What it is called.
        folder: Where to save.
        tensors: The live tensors.
        in_process: Whether a process of its own writes, which then shares the copy's memory.
        copies_behind: Whether the copy is made in a thread.
    """

    def __init__(self, name: str, folder: Path, tensors: Tensors, *, in_process: bool, copies_behind: bool) -> None:
        self.name = name
        self._path, self._tensors = folder / name, tensors
        self._kind = AsyncCheckpointerType.PROCESS if in_process else AsyncCheckpointerType.THREAD
        self._stager = DefaultStager(
            StagingOptions(
                use_pinned_memory=False,
                use_shared_memory=in_process,
                use_async_staging=copies_behind,
                use_non_blocking_copy=False,
            )
        )
        self._staged: Any = None
        if in_process:
            _open_group()

    def begin(self) -> Callable[[], object]:
        """Call `async_save`."""
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            found = dcp.async_save(
                self._tensors,
                storage_writer=dcp_writer(self._path),
                async_stager=self._stager,
                async_checkpointer_type=self._kind,
                no_dist=True,
            )
        self._staged = getattr(found, "staging_completion", None)
        upload = getattr(found, "upload_completion", found)
        return lambda: (upload.result(), sync_tree(self._path))

    def before_update(self) -> None:
        """Wait for the copy."""
        if self._staged is not None:
            self._staged.result()

    def forget(self) -> None:
        """Delete the folder."""
        remove(self._path)

    def close(self) -> None:
        """Give the copy's memory back."""
        self._stager.close()


class TorchsnapshotBackground:
    """`Snapshot.async_take`; its files are synced when it says that it is complete."""

    name = "torchsnapshot_async"

    def __init__(self, folder: Path, tensors: Tensors) -> None:
        import torchsnapshot

        self._library, self._path = torchsnapshot, folder / self.name
        self._state = {"state": torchsnapshot.StateDict(**tensors)}

    def begin(self) -> Callable[[], object]:
        """Call `async_take`."""
        pending = self._library.Snapshot.async_take(str(self._path), self._state)
        return lambda: (pending.wait(), sync_tree(self._path))

    def before_update(self) -> None:
        """Have nothing to wait for: the call copies."""

    def forget(self) -> None:
        """Delete the folder."""
        remove(self._path)

    def close(self) -> None:
        """Have nothing to let go of."""


NAMES = ("safepoint", "dcp_async_thread", "dcp_async_process", "dcp_async_behind", "torchsnapshot_async")


def make(name: str, folder: Path, items: dict[str, object], tensors: Tensors) -> Background:
    """Return one of `NAMES`.

    Raises:
        ImportError: The library is not installed.
    """
    if name == "safepoint":
        return SafepointBackground(folder, items)
    if name == "torchsnapshot_async":
        return TorchsnapshotBackground(folder, tensors)
    return DcpBackground(
        name, folder, tensors, in_process=name == "dcp_async_process", copies_behind=name == "dcp_async_behind"
    )


@dataclass(slots=True)
class Landing:
    """Follow a save in a thread of its own, and note when it was complete and durable, in seconds of `perf_counter`."""

    ended: float = 0.0
    failure: BaseException | None = None
    _thread: threading.Thread | None = None

    def follow(self, wait: Callable[[], object]) -> Landing:
        """Begin to wait."""

        def watch() -> None:
            try:
                wait()
            except BaseException as exc:  # noqa: BLE001 (the top of a thread hands everything on)
                self.failure = exc
            self.ended = time.perf_counter()

        self._thread = threading.Thread(target=watch)
        self._thread.start()
        return self

    def wait(self) -> float:
        """Return the moment; raise what the save raised."""
        self._thread.join()
        if self.failure is not None:
            raise self.failure
        return self.ended


class BarrierClock(AbstractContextManager["BarrierClock"]):
    """Measure how long the hooks that others put before an optimizer's step take.

    To be made before any manager: torch calls global hooks in the order in which they were registered, those of one
    optimizer last.
    """

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.spent = self._entered = 0.0
        self._hooks = [
            register_optimizer_step_pre_hook(self._enter),
            optimizer.register_step_pre_hook(self._leave),
        ]

    def take(self) -> float:
        """Return the seconds since the last call of this."""
        spent, self.spent = self.spent, 0.0
        return spent

    def __exit__(self, *failure: object) -> None:
        for hook in self._hooks:
            hook.remove()

    def _enter(self, *ignored: object) -> None:
        self._entered = time.perf_counter()

    def _leave(self, *ignored: object) -> None:
        self.spent += time.perf_counter() - self._entered


def _open_group() -> None:
    """Make a process group of one rank: DCP's process asks for one, and for an address."""
    os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
    logging.getLogger().setLevel(logging.WARNING)
    if not dist.is_initialized():
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
