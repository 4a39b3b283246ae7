"""Behind: the copy of the save in flight, which the training waits for before an optimizer steps.

1. It is that of the process that began it: a child that is forked off meanwhile waits for nothing.
2. A failure of the copy is that of its save, and is told where that is.
3. While a thread saves a boundary, a step in another one waits: a fused one would change what is read, and no count
   of writes would show it. It does not wait for good: who saves may wait for a lock of the user's that it holds.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import AbstractContextManager

from safepoint.ambient import Ambient
from safepoint.errors import TornSnapshotError
from safepoint.saving.crossing import Copier
from safepoint.stats import Costs, Running

_PATIENCE_S = 120.0


class Behind:
    """Keep the copy that is under way, and count what the training waits for it."""

    def __init__(self, ambient: Ambient, costs: Costs) -> None:
        self._ambient = ambient
        self._costs = costs
        self._followed: tuple[int, Copier, Running] | None = None
        self._pid, self._boundary = ambient.pid(), threading.RLock()
        self._passed = 0

    def boundary(self) -> AbstractContextManager[object]:
        """Return a block that saves a boundary: steps in other threads are held up meanwhile.

        It is the lock itself: between the lines of a function around it an interrupt would leave it locked.
        """
        return self._boundary

    def pass_boundary(self) -> None:
        """Return when no other thread saves a boundary and the state may change; see `wait`.

        After two minutes it returns all the same, and what is being saved is torn.
        """
        # In a child that was forked off meanwhile nobody would ever leave the boundary.
        if self._ambient.pid() == self._pid:
            if self._boundary.acquire(timeout=_PATIENCE_S):
                self._boundary.release()
            else:
                # Who saves may be waiting in code of the user's for a lock that this thread holds.
                self._passed += 1
        self.wait()

    def witness(self) -> Callable[[], None]:
        """Return what raises `TornSnapshotError` if a step has gone on since although a boundary was being saved."""
        before = self._passed

        def check() -> None:
            if self._passed != before:
                raise TornSnapshotError(
                    "an optimizer in another thread stepped while the state was read",
                    found=f"it had waited for {_PATIENCE_S:g} s",
                    remedy="Save where no other thread steps, or leave the lock that both hold before the step.",
                )

        return check

    def follow(self, copying: Copier, running: Running) -> None:
        """Have steps wait for this copy; the one before must have been left."""
        if copying.is_wanted:
            self._followed = self._ambient.pid(), copying, running

    def wait(self) -> None:
        """Return when the state may change, and help to copy what is left; from any thread."""
        followed = self._own()
        if followed is None:
            return
        _, copying, running = followed
        with self._costs.blocked_once_more(running):
            copying.settle()
        # What comes from an accelerator may still be on its way, and other threads may step.
        if self._followed is followed and not copying.is_wanted:
            self._followed = None

    def leave(self) -> None:
        """Return when no thread uses the image of the copy any more."""
        found = self._own()
        self._followed = None
        if found is not None:
            found[1].leave_image()

    def _own(self) -> tuple[int, Copier, Running] | None:
        followed = self._followed
        return None if followed is None or followed[0] != self._ambient.pid() else followed
