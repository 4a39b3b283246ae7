"""Two real ranks whose leader's storage takes longer than their process group waits: `slow_storage_worker.py FOLDER`.

Prints a line of JSON for each rank that came to its end. The ranks are forked off this process.
"""

from __future__ import annotations

import json
import os
import sys
import time
import traceback
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import safepoint as sp
from safepoint.storage.local import LocalStorage

RANKS, TIMEOUT_S, PUBLISH_S = 2, 5.0, 12.0


class SlowStorage:
    """Be a storage that publishes a manifest slowly."""

    def __init__(self, folder: Path) -> None:
        self._inner = LocalStorage(folder)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def publish(self, path: str, data: bytes) -> None:
        ends = time.monotonic() + PUBLISH_S
        while path.endswith("manifest.json") and time.monotonic() < ends:
            time.sleep(0.1)
        self._inner.publish(path, data)


def live(rank: int, folder: Path, *, background: bool) -> dict[str, Any]:
    """Train and save; the gradients of every update are summed by a collective."""
    storage: Any = SlowStorage(folder)
    manager = sp.CheckpointManager(folder, {"m": torch.nn.Linear(2, 2)}, storage=storage, background=background)
    manager.restore()
    seconds, sums = [], []
    for step in range(1, 4):
        manager.after_update()
        if step == 1:
            began = time.monotonic()
            handle = manager.save()
            seconds.append(time.monotonic() - began)
        total = torch.tensor(float(rank + step))
        dist.all_reduce(total)
        sums.append(total.item())
    handle.wait(deadline_s=60.0)
    dist.all_reduce(total)
    manager.close()
    return {"rank": rank, "background": background, "saving_s": seconds[0], "sums": sums, "step": handle.result.step}


def main(folder: Path) -> None:
    processes = []
    for rank in range(RANKS):
        pid = os.fork()
        if not pid:
            try:
                dist.init_process_group(
                    "gloo",
                    init_method=f"file://{folder}/meet",
                    rank=rank,
                    world_size=RANKS,
                    timeout=timedelta(seconds=TIMEOUT_S),
                )
                for background in (False, True):
                    said = live(rank, folder / f"run-{background}", background=background)
                    os.write(1, (json.dumps(said) + "\n").encode())
            except BaseException:  # noqa: BLE001 (the top of a process, which shows it)
                traceback.print_exc()
            finally:
                os._exit(0)
        processes.append(pid)
    for pid in processes:
        os.waitpid(pid, 0)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
