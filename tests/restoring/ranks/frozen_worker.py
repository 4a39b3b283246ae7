"""Three real ranks, one slow or stopped while it restores: `python frozen_worker.py FOLDER RANK slow|frozen`.

Prints a line of JSON for each rank that ended by itself. The ranks are forked off this process.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from collections.abc import Mapping
from pathlib import Path

import torch.distributed as dist

import safepoint as sp
import safepoint.manager
from safepoint.errors import SafepointError

RANKS, SILENCE_S = 3, 3.0


class Late:
    """Take long, or for ever, over being given a state back."""

    def __init__(self, how: str) -> None:
        self.how = how

    def state_dict(self) -> dict[str, int]:
        return {"value": 1}

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        ends = time.monotonic() + 3 * SILENCE_S
        while self.how == "slow" and time.monotonic() < ends:
            time.sleep(0.1)
        if self.how == "frozen":
            os.kill(os.getpid(), signal.SIGSTOP)


def live(rank: int, folder: Path, how: str, start: str) -> None:
    """Restore, or save where there is nothing to restore, and say how that ended."""
    dist.init_process_group("gloo", init_method=f"file://{folder}/{start}", rank=rank, world_size=RANKS)
    safepoint.manager.SHORTEST_SILENCE_S = SILENCE_S
    manager = sp.CheckpointManager(folder / "run", {"late": Late(how)}, deadline_s=SILENCE_S)
    try:
        step, text = manager.restore().step, ""
        if not step:
            manager.after_update()
            manager.save().wait()
    except SafepointError as exc:
        step, text = -1, f"{type(exc).__name__}: {exc}"
    os.write(1, (json.dumps({"rank": rank, "step": step, "text": text}) + "\n").encode())
    # The leader waits here until the others have heard its last word.
    manager.close()


def fork(folder: Path, start: str, how: Mapping[int, str]) -> list[int]:
    """Fork the ranks off, and return their processes."""
    processes = []
    for rank in range(RANKS):
        pid = os.fork()
        if not pid:
            try:
                live(rank, folder, how.get(rank, ""), start)
            finally:
                os._exit(0)
        processes.append(pid)
    return processes


def main(folder: Path, rank: int, how: str) -> None:
    for pid in fork(folder, "first", {}):
        os.waitpid(pid, 0)
    ranks = fork(folder, "second", {rank: how})
    for pid in ranks:
        if how != "frozen" or pid != ranks[rank]:
            os.waitpid(pid, 0)
    if how == "frozen":
        os.kill(ranks[rank], signal.SIGKILL)
        os.waitpid(ranks[rank], 0)


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3])
