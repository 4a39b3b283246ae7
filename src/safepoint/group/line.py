"""A line: one client of a server, used by a thread of its own, so that no caller waits longer than it wants to."""

from __future__ import annotations

import queue
import threading
import weakref
from collections.abc import Callable
from typing import Any, Generic, TypeVar

_Client = TypeVar("_Client")


class Call(Generic[_Client]):
    """Hold one call on its way to the thread that makes it, and what came of it."""

    def __init__(self, act: Callable[[_Client], Any]) -> None:
        self.act = act
        self.done = threading.Event()
        # Any: a line carries calls of every result.
        self.result: Any = None
        self.error: Exception | None = None


class Farewell:
    """Wait at the end of the interpreter for calls that are at work, for so many seconds each, until one takes longer.

    A thread that comes back from native code while the interpreter ends takes the process down with it, and the exit
    code of the process is lost. What another process does at that moment (it ends as well) brings it back.
    """

    def __init__(self, most_s: float) -> None:
        self._most_s = most_s

    def follow(self, call: Call[Any]) -> None:
        """Wait for this call, should the interpreter end while it is at work."""
        # Also called once the call is let go of, which is after it was made.
        weakref.finalize(call, self._see_off, call.done)

    def _see_off(self, done: threading.Event) -> None:
        if not done.wait(self._most_s):
            self._most_s = 0.0


class Line(Generic[_Client]):
    """Be one client, and the thread that uses it.

    Args:
        connect: Makes the client, at the first call.
    """

    def __init__(self, connect: Callable[[], _Client]) -> None:
        self._calls: queue.SimpleQueue[Call[_Client] | None] = queue.SimpleQueue()
        self.end = weakref.finalize(self, self._calls.put, None)
        # A daemon: one that is stuck must not keep the process alive.
        threading.Thread(target=_work, args=(connect, self._calls), name="safepoint-store", daemon=True).start()

    def call(self, act: Callable[[_Client], Any]) -> Call[_Client]:
        """Hand a call over; its `done` is set when it was made."""
        call = Call(act)
        self._calls.put(call)
        return call


def _work(connect: Callable[[], _Client], calls: queue.SimpleQueue[Call[_Client] | None]) -> None:
    client: _Client | None = None
    while (call := calls.get()) is not None:
        try:
            client = client if client is not None else connect()
            call.result = call.act(client)
        except Exception as exc:  # noqa: BLE001 (the top of a thread: handed to the caller)
            call.error = exc
        call.done.set()
