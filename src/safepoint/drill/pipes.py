"""The two named pipes between the drill and a watched run.

Both ends are held open here for reading and writing, so that neither side ever waits in `open`, and a run that dies or
never comes leaves nothing hanging. The run notices the drill's death: its own end then breaks.
"""

from __future__ import annotations

import json
import os
import select
from collections.abc import Callable
from pathlib import Path
from types import TracebackType

from safepoint.ambient import Ambient
from safepoint.drill.events import Event, parse_event
from safepoint.errors import CorruptionError

_READ_BYTES = 1 << 16
_LONGEST_LINE_BYTES = 64 << 20
_TICK_S = 0.02


class Pipes:
    """Read events and write answers; a context manager that makes and removes the pipes.

    Args:
        folder: An empty folder for them.
    """

    def __init__(self, folder: Path, ambient: Ambient) -> None:
        self._ambient = ambient
        self._paths = folder / "events", folder / "answers"
        self._ends: tuple[int, int] | None = None
        self._buffer = bytearray()
        self._lines: list[bytes] = []

    @property
    def variable(self) -> str:
        """Return the text that names the pipes to the run."""
        return json.dumps([str(path) for path in self._paths])

    def __enter__(self) -> Pipes:
        for path in self._paths:
            os.mkfifo(path, 0o600)
        events, answers = (os.open(path, os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC) for path in self._paths)
        self._ends = events, answers
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        for end in self._ends or ():
            os.close(end)
        self._ends = None
        for path in self._paths:
            path.unlink()

    def next_event(self, *, deadline: float, has_ended: Callable[[], bool]) -> Event | None:
        """Return the next event; None when the run has ended and told everything, or the deadline has passed.

        Args:
            deadline: On the ambient's monotonic clock.
            has_ended: Whether the run's process is gone.
        """
        while not self._lines:
            is_over = has_ended()
            wait_s = min(_TICK_S, max(0.0, deadline - self._ambient.monotonic()))
            if self._receive(0.0 if is_over else wait_s):
                continue
            if is_over or self._ambient.monotonic() >= deadline:
                return None
        return parse_event(self._lines.pop(0))

    def answer(self, word: str) -> None:
        """Let the run go on: ``go``, or ``state`` to be told the digests first."""
        if self._ends is not None:
            os.write(self._ends[1], word.encode("ascii") + b"\n")

    def _receive(self, wait_s: float) -> bool:
        if self._ends is None:
            return False
        readable, _, _ = select.select([self._ends[0]], [], [], wait_s)
        if not readable:
            return False
        self._buffer += os.read(self._ends[0], _READ_BYTES)
        *lines, rest = bytes(self._buffer).split(b"\n")
        self._lines += lines
        self._buffer = bytearray(rest)
        if len(rest) > _LONGEST_LINE_BYTES:
            raise CorruptionError("a watched run tells an event without end", where="events pipe")
        return True
