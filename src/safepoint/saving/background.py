"""One save at a time, beside the training if asked, and no failure of it unseen.

1. At most one save is in flight; the next one waits for it.
2. A save in flight completes, however the program ends short of being killed: its thread is not a daemon.
3. A save in flight is that of the process that began it: a child that is forked off meanwhile knows nothing of it.
4. A failure is handed to the next `settle`; if nobody asks before the interpreter ends, the process exits non-zero.
5. What is followed is the work, not its thread: an interrupt may come while a thread is started, and then nobody can
   say whether it runs.
"""

from __future__ import annotations

import atexit
import functools
import logging
import os
import sys
import threading
from collections.abc import Callable
from contextlib import AbstractContextManager

from safepoint.ambient import Ambient
from safepoint.errors import AbortedError, InternalError, SafepointError
from safepoint.saving.context import SaveResult

_log = logging.getLogger(__name__)


class SaveHandle:
    """Follow one save.

    `deferred` says why it is made at a later boundary, empty otherwise; `result` is set once it is committed. A save
    that somebody asked for (`is_explicit`) always raises its failure.
    """

    def __init__(self, *, deferred: str = "", is_explicit: bool = False) -> None:
        self.deferred = deferred
        self.is_explicit = is_explicit
        self.result: SaveResult | None = None
        self.error: BaseException | None = None
        self._is_begun = False
        self._is_orphan: Callable[[], bool] = lambda: False
        self._staged = threading.Event()
        self._done = threading.Event()

    @property
    def staged(self) -> bool:
        """Return whether the copy is complete: live memory is no longer needed."""
        return self._staged.is_set()

    @property
    def committed(self) -> bool:
        """Return whether the checkpoint exists."""
        return self.result is not None

    @property
    def done(self) -> bool:
        """Return whether the save has ended, one way or the other."""
        return self._done.is_set()

    def wait(self, *, deadline_s: float | None = None) -> SaveResult:
        """Return the result once the save is done.

        Raises:
            AbortedError: It was not done within the deadline, or it is made at a later boundary, or this process is a
                child that was forked off while it was in flight.
            SafepointError: It failed.
        """
        if self.deferred and not self._is_begun and not self.done:
            raise AbortedError("the save is made at a later boundary", found=self.deferred)
        if not self.done and self._is_orphan():
            raise AbortedError("the save is that of the process that this one was forked from")
        if not self._done.wait(deadline_s):
            raise AbortedError("the save took longer than the wait allows; it goes on", expected=f"{deadline_s} s")
        if self.error is not None:
            raise self.error
        if self.result is None:
            raise InternalError("a save ended without result or error")
        return self.result

    def mark_staged(self) -> None:
        """Note that the copy is complete."""
        self._staged.set()

    def run(self, work: Callable[[], SaveResult]) -> None:
        """Do the rest of the save and note its outcome; never raises."""
        try:
            self.result = work()
        except BaseException as exc:  # noqa: BLE001 (the top of a thread hands everything on)
            self.error = exc
        finally:
            self._done.set()


class _Errand:
    """Do something once, in whichever thread comes first."""

    def __init__(self, act: Callable[[], None]) -> None:
        self._act = act
        self._first = threading.Lock()
        self.ended = threading.Event()

    def __call__(self) -> None:
        if not self._first.acquire(blocking=False):
            return
        try:
            self._act()
        finally:
            self.ended.set()


class BackgroundSaver:
    """Run the second half of saves in a thread of their own."""

    def __init__(self, ambient: Ambient) -> None:
        self._ambient = ambient
        self._pid = ambient.pid()
        self._handle: SaveHandle | None = None
        self._errand: _Errand | None = None
        self._thread: threading.Thread | None = None
        self._gate = threading.Lock()
        atexit.register(self._report_at_exit)

    def held_back(self) -> AbstractContextManager[object]:
        """Return a block: what is launched within it, and may wait, begins when it ends.

        A thread that has work to do takes the interpreter away from the one that launched it, for 5 ms and more. The
        block is the lock itself: between the lines of a function around it an interrupt would leave it locked.
        """
        self._gate = threading.Lock()
        return self._gate

    def launch(
        self, handle: SaveHandle, work: Callable[[], SaveResult], then: Callable[[], None], *, may_wait: bool = False
    ) -> None:
        """Begin the second half of a save, and what follows it; the one before must have been settled.

        `may_wait` says that nobody waits for it within a block of `held_back`. Where no thread can be started (a limit
        of the system, the end of the interpreter), or an interrupt comes before one runs, it is done before this
        returns.
        """
        self._start(handle, functools.partial(_run, handle, work, then), self._gate if may_wait else None)

    def follow(self, handle: SaveHandle, then: Callable[[], None]) -> None:
        """Begin what follows a save that was made at the boundary."""
        self._start(handle, functools.partial(tidy, handle, then))

    def _start(self, handle: SaveHandle, target: Callable[[], None], gate: threading.Lock | None = None) -> None:
        errand = _Errand(target)
        act = errand if gate is None else functools.partial(_after, gate, errand)
        thread = threading.Thread(target=act, name="safepoint-save", daemon=False)
        pid = self._ambient.pid()
        handle._is_orphan = lambda: self._ambient.pid() != pid
        try:
            self._handle, self._errand, self._thread = handle, errand, thread
            thread.start()
        except RuntimeError as exc:
            _log.warning("a save could not have a thread of its own and is done at the boundary: %s", exc)
            errand()
        except BaseException:
            errand()
            raise

    @property
    def is_busy(self) -> bool:
        """Return whether a save is in flight, or what follows it."""
        self._leave_to_parent()
        return self._errand is not None and not self._errand.ended.is_set()

    def settle(self, *, waits: bool, deadline_s: float | None = None) -> SaveHandle | None:
        """Return the save that has ended since the last call, once; None if there is none.

        Args:
            waits: Whether to wait for a save in flight.
            deadline_s: Longest wait.

        Raises:
            AbortedError: The save in flight took longer than the wait allows; it goes on.
        """
        self._leave_to_parent()
        handle, errand, thread = self._handle, self._errand, self._thread
        if handle is None or not (waits or (handle.done and not handle.committed) or not self.is_busy):
            return None
        if errand is not None and not errand.ended.wait(deadline_s):
            raise AbortedError("the save in flight took longer than the wait allows", expected=f"{deadline_s} s")
        if thread is not None and thread.is_alive():
            thread.join()
        self._handle = self._errand = self._thread = None
        return handle

    def close(self) -> None:
        """Leave the interpreter's exit alone from here on; what is owed must have been settled."""
        atexit.unregister(self._report_at_exit)

    def _leave_to_parent(self) -> None:
        """Forget the save in flight in a child that was forked off: its thread runs in the parent alone."""
        pid = self._ambient.pid()
        if pid == self._pid:
            return
        self._pid = pid
        self._handle = self._errand = self._thread = None

    def _report_at_exit(self) -> None:
        handle = self.settle(waits=True)
        if handle is None or handle.error is None:
            return
        sys.stdout.flush()
        sys.stderr.write(f"safepoint: a background save failed and nobody asked: {handle.error}\n")
        sys.stderr.flush()
        # An exception in an exit function does not change the exit code of the interpreter.
        os._exit(handle.error.exit_code if isinstance(handle.error, SafepointError) else 1)


def mark_begun(handle: SaveHandle) -> None:
    """Note that the boundary has come at which the save is made."""
    handle._is_begun = True


def tidy(handle: SaveHandle, work: Callable[[], None]) -> None:
    """Do what follows a committed save; never raises. What fails is told as a failure of the save."""
    if not handle.committed:
        return
    try:
        work()
    except BaseException as exc:  # noqa: BLE001 (the top of a thread hands everything on)
        handle.error = exc


def _after(gate: threading.Lock, act: Callable[[], None]) -> None:
    with gate:
        pass
    act()


def _run(handle: SaveHandle, work: Callable[[], SaveResult], then: Callable[[], None]) -> None:
    handle.run(work)
    tidy(handle, then)
