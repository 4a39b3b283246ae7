"""How a loader's worker processes live and die, those of a foreign loader too where they are prepared.

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
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing.connection import wait
from typing import Any

_LOOK_EVERY_S = 1.0


@dataclass(frozen=True, slots=True)
class WorkerStart:
    """Prepare one worker process, then call the user's own `worker_init_fn`.

    Itself a `worker_init_fn` for torch's `DataLoader`: a signal to the job's process group leaves such workers alone.
    """

    user: Callable[[int], object] | None = None

    def __call__(self, worker: int) -> None:
        if hasattr(os, "setpgid"):
            os.setpgid(0, 0)
        threading.Thread(target=_end_with_parent, args=(os.getppid(),), name="safepoint-orphan", daemon=True).start()
        if self.user is not None:
            self.user(worker)


@contextmanager
def prepared_workers(loader: object) -> Iterator[None]:
    """Let the workers that a torch loader starts within the block be prepared like those of safepoint's own."""
    held: Any = loader  # torch's loader, or whatever has its attributes
    user = getattr(held, "worker_init_fn", None)
    if not getattr(held, "num_workers", 0) or not hasattr(held, "worker_init_fn") or isinstance(user, WorkerStart):
        yield
        return
    held.worker_init_fn = WorkerStart(user)
    try:
        yield
    finally:
        held.worker_init_fn = user


def _end_with_parent(parent: int) -> None:
    process = multiprocessing.parent_process()
    sentinels = [] if process is None else [process.sentinel]
    # The sentinel is a pipe that later siblings may hold open too, hence the look at the parent's number beside it.
    while not wait(sentinels, timeout=_LOOK_EVERY_S) and os.getppid() == parent:
        pass
    # sys.exit would end this thread alone, and an orderly exit would wait for the queue that nobody reads.
    os._exit(1)
