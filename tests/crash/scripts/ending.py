"""Save in the background, and end the program while the save is still in flight.

The save's first object is created only after the main thread has come to its end, so no timing decides.
"""

from __future__ import annotations

import argparse
import errno
import os
import sys
import threading
from typing import Any

from safepoint.ambient import SystemAmbient
from safepoint.faults.script import Effect, Fault, FaultScript
from safepoint.faults.storage import FaultyStorage
from safepoint.storage.local import LocalStorage
from safepoint.testing.ambient import FakeWorld
from tests.crash.job import Job

FULL = Fault(Effect.FAIL, verb="create", path="generations/*", errno=errno.ENOSPC, lasts=True)


class Late:
    """Let the objects of a save wait for the end of the main thread."""

    def __init__(self, inner: Any) -> None:
        self._inner = inner

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def create(self, path: str, **hints: Any) -> Any:
        threading.main_thread().join()
        return self._inner.create(path, **hints)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("root")
    parser.add_argument("ending", choices=["fall", "exit", "exit 3", "raise"])
    parser.add_argument("--fails", action="store_true")
    options = parser.parse_args()
    storage = LocalStorage(options.root)
    job = Job(storage, FakeWorld(), pid=os.getpid(), ambient=SystemAmbient(), is_background=True)
    job.start()
    job.train_to(1)
    job.save().wait()
    inner = FaultyStorage(storage, FaultScript((FULL,))) if options.fails else storage
    job.saver._storage = Late(inner)
    job.train_to(2)
    job.save(is_scheduled=True)
    # What is trained after the boundary must not slip into the save in flight.
    for entry in job.weights:
        entry.go_to(3)
    if options.ending == "raise":
        raise ArithmeticError("the loss is not a number")
    if options.ending.startswith("exit"):
        sys.exit(3 if options.ending == "exit 3" else 0)


if __name__ == "__main__":
    main()
