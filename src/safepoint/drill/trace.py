"""What was seen of the starts of a command."""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass

from safepoint.drill.events import Restored, Update
from safepoint.drill.plan import Kill

# Sums over another number of ranks are made in another order, and a training lets the difference grow.
TOLERANCE = 1e-3


class Ending(enum.Enum):
    """How a start ended.

    ``KILLED`` where the plan wanted it; ``STOPPED`` by the drill at the last update to look at; ``FINISHED`` by itself,
    in good order; ``FAILED`` by itself, in another way; ``SILENT``: nothing was heard for too long.
    """

    KILLED = "killed"
    STOPPED = "stopped"
    FINISHED = "finished"
    FAILED = "failed"
    SILENT = "silent"


@dataclass(frozen=True, slots=True)
class Start:
    """Hold what was seen of one start.

    `state` is the digest of each item at the end, where the start came to it. `place` says in words where it ended.
    `committed` are the steps whose checkpoints were seen to exist. `log` is the path of the command's output. `ranks`
    is how many ranks it had; 0 where the command was started by itself. `is_early`: it was killed at its end,
    for it never came to the place of its kill.
    """

    ending: Ending
    place: str
    updates: tuple[Update, ...] = ()
    restored: Restored | None = None
    committed: tuple[int, ...] = ()
    state: Mapping[str, str] | None = None
    exit_code: int | None = None
    kill: Kill | None = None
    log: str = ""
    is_connected: bool = True
    seconds: float = 0.0
    update_seconds: float = 0.0
    ranks: int = 0
    is_early: bool = False

    @property
    def last_step(self) -> int:
        """Return the step of the last update seen, or of the restore, or 0."""
        if self.updates:
            return self.updates[-1].step
        return self.restored.step if self.restored is not None else 0

    @property
    def is_complete(self) -> bool:
        """Return whether the start came to the end that the drill looks at."""
        return self.ending in (Ending.STOPPED, Ending.FINISHED)


@dataclass(frozen=True, slots=True)
class Rehearsal:
    """Hold the uninterrupted start and the chain of killed and resumed ones.

    `seed` is that of the kills, None if they were chosen by hand. `tolerance` is the relative difference that metrics
    may have where the number of ranks changed.
    """

    command: tuple[str, ...]
    baseline: Start
    starts: tuple[Start, ...]
    seed: int | None = None
    tolerance: float = TOLERANCE

    @property
    def kills(self) -> int:
        """Return how many starts were killed."""
        return sum(start.ending is Ending.KILLED for start in self.starts)

    @property
    def has_resumed(self) -> bool:
        """Return whether any start went on from a checkpoint."""
        return any(start.restored is not None and not start.restored.is_fresh for start in self.starts)

    @property
    def newest_committed(self) -> tuple[int | None, ...]:
        """Return, for each start, the newest step that any start before it was seen to commit."""
        newest: list[int | None] = []
        steps: list[int] = []
        for start in self.starts:
            newest.append(max(steps, default=None))
            steps += start.committed
        return tuple(newest)
