"""How a loader's worker processes live and die.

Invariants:

1. A worker is in a process group of its own: a signal to the job's group (a scheduler's SIGTERM, Ctrl-C) reaches the
   training process alone, which then finishes its update and saves.
2. A worker ends within about a second of the training process, however that died. torch's own watch is not enough: it
   sleeps in the queue for up to five seconds, and a worker that has more to send than the pipe holds waits for ever.
"""

from __future__ import annotations

import multiprocessing
import os
import threading
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import wait

_LOOK_EVERY_S = 1.0


@dataclass(frozen=True, slots=True)
class WorkerStart:
    """Prepare one worker process, then call the user's own `worker_init_fn`."""

    user: Callable[[int], object] | None = None

    def __call__(self, worker: int) -> None:
        if hasattr(os, "setpgid"):
            os.setpgid(0, 0)
        threading.Thread(target=_end_with_parent, args=(os.getppid(),), name="safepoint-orphan", daemon=True).start()
        if self.user is not None:
            self.user(worker)


def _end_with_parent(parent: int) -> None:
    process = multiprocessing.parent_process()
    sentinels = [] if process is None else [process.sentinel]
    # The sentinel is a pipe that later siblings may hold open too, hence the look at the parent's number beside it.
    while not wait(sentinels, timeout=_LOOK_EVERY_S) and os.getppid() == parent:
        pass
    # sys.exit would end this thread alone, and an orderly exit would wait for the queue that nobody reads.
    os._exit(1)
