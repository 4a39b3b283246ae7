"""The two named pipes between the drill and a watched run.

Both ends are held open here for reading and writing, so that neither side ever waits in `open`, and a run that dies or
never comes leaves nothing hanging. The run notices the drill's death: its own end then breaks.

Of several ranks each has a pair; together they speak as one run does.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
from collections.abc import Callable
from pathlib import Path
from types import TracebackType

from safepoint.ambient import Ambient
from safepoint.drill.events import Began, Committed, Event, Phase, parse_event
from safepoint.drill.ranks import join_events
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

    def next_of_those_there(self) -> Event | None:
        """Return the next event if it was told already."""
        while not self._lines and self._receive(0.0):
            continue
        return parse_event(self._lines.pop(0)) if self._lines else None

    @property
    def paths(self) -> tuple[str, str]:
        """Return the paths of the events and of the answers."""
        return str(self._paths[0]), str(self._paths[1])

    def fileno(self) -> int:
        """Return the end at which events arrive."""
        return -1 if self._ends is None else self._ends[0]

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


class JointPipes:
    """Read what all ranks of a job told together, and answer them together; a context manager as `Pipes` is.

    A restore, an update, a state and the end are told once every rank has told them, and all ranks wait until then. A
    phase is told by each rank that comes to it, a commit by the first.

    Args:
        folder: An empty folder for the pipes.
        ranks: How many ranks there are.
    """

    def __init__(self, folder: Path, ambient: Ambient, ranks: int) -> None:
        self._ambient = ambient
        self._pipes = [Pipes(folder / str(rank), ambient) for rank in range(ranks)]
        self._folder = folder
        self._stack = contextlib.ExitStack()
        self._held: dict[int, Event] = {}
        self._asked: list[int] = []
        self._committed: set[str] = set()
        self._holds = True
        self.processes: dict[int, int] = {}

    @property
    def variable(self) -> str:
        """Return the text that names the pipes to the ranks."""
        return json.dumps([pipes.paths for pipes in self._pipes])

    def __enter__(self) -> JointPipes:
        for rank, pipes in enumerate(self._pipes):
            (self._folder / str(rank)).mkdir()
            self._stack.enter_context(pipes)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._stack.close()

    def next_event(self, *, deadline: float, has_ended: Callable[[], bool]) -> Event | None:
        """Return the next event; None when the job has ended and told everything, or the deadline has passed.

        Args:
            deadline: On the ambient's monotonic clock.
            has_ended: Whether the process that was started is gone.
        """
        while True:
            is_over = has_ended()
            is_told = False
            for rank, pipes in enumerate(self._pipes):
                event = pipes.next_of_those_there()
                if event is None:
                    continue
                is_told = True
                joint = self._take(rank, event)
                if joint is not None:
                    return joint
            wait_s = min(_TICK_S, deadline - self._ambient.monotonic())
            if not is_told and (is_over or wait_s <= 0):
                return None
            if not is_told:
                select.select(self._pipes, [], [], wait_s)

    def answer(self, word: str) -> None:
        """Let those go on whose event was returned last."""
        asked, self._asked = self._asked, []
        for rank in asked:
            self._pipes[rank].answer(word)

    def let_go(self) -> None:
        """Let every rank go on from now on, whatever it tells; only commits are still returned."""
        self._holds = False
        self._asked = sorted({*self._held, *self._asked})
        self._held.clear()
        self.answer("go")

    def _take(self, rank: int, event: Event) -> Event | None:
        """Return the event if it is to be told; else hold the rank, or let it go on."""
        if isinstance(event, Began):
            self.processes[rank] = event.process
        is_news = isinstance(event, Committed) and event.generation not in self._committed
        if isinstance(event, Committed):
            self._committed.add(event.generation)
        if isinstance(event, Began | Committed) or not self._holds:
            self._pipes[rank].answer("go")
            return event if is_news else None
        if isinstance(event, Phase):
            self._asked = [rank]
            return event
        self._held[rank] = event
        if len(self._held) < len(self._pipes):
            return None
        joint, self._asked = join_events(self._held), sorted(self._held)
        self._held.clear()
        return joint
