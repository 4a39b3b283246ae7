"""What the phases of a save hand to each other."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from safepoint.ambient import Ambient
from safepoint.format.records import LineageLink
from safepoint.group.base import Group
from safepoint.joining.claim import Claim
from safepoint.saving.capture import Snapshot
from safepoint.saving.copying import Habits
from safepoint.saving.crossing import Copier
from safepoint.saving.describe import Place
from safepoint.saving.divide import Division
from safepoint.saving.form import FileForm, Forms
from safepoint.saving.increment import Increment, Increments
from safepoint.saving.pieces import ReplicaSums
from safepoint.saving.plan import Plan, Planner
from safepoint.saving.pour import Origin, Spent
from safepoint.saving.ring import Ring
from safepoint.saving.stage import StagingBuffer
from safepoint.storage.base import Durability, Storage


class Attempts:
    """Remember the highest step at which the newest incarnation attempted a save."""

    def __init__(self) -> None:
        self._incarnation, self._highest = 0, -1

    def begin(self, incarnation: int, step: int) -> bool:
        """Note an attempt, and return whether it is at a step beyond all that this incarnation attempted before."""
        is_beyond = incarnation > self._incarnation or (incarnation == self._incarnation and step > self._highest)
        if is_beyond:
            self._incarnation, self._highest = incarnation, step
        return is_beyond


@dataclass(frozen=True, slots=True)
class Workspace:
    """Keep what saves use one after the other: memory, what the last one's file looked like, and what it stored.

    An image of more than `most_bytes` is not made: its file goes through the ring.
    """

    most_bytes: float = math.inf
    forms: Forms = field(default_factory=Forms)
    ring: Ring = field(default_factory=Ring)
    buffer: StagingBuffer = field(default_factory=StagingBuffer)
    habits: Habits = field(default_factory=Habits)
    increments: Increments = field(default_factory=Increments)
    attempts: Attempts = field(default_factory=Attempts)
    # By which accelerators are read, by accelerator.
    streams: dict[Any, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Staging:
    """Say which memory saves beside the training may use.

    `most_bytes` bounds the copy of the state; None for one of all of it. `copies_behind` tells whether what only an
    optimizer's step changes may be copied after the boundary.
    """

    most_bytes: int | None = None
    copies_behind: bool = True

    def workspace(self, increments: Increments) -> Workspace:
        """Return the workspace of the saves of one manager."""
        if self.most_bytes is None:
            return Workspace(increments=increments)
        return Workspace(self.most_bytes, ring=Ring(size_bytes=self.most_bytes), increments=increments)


@dataclass(frozen=True, slots=True)
class SaveContext:
    """Hold what all saves of one incarnation share.

    `refuses_difference` says whether replicas that differ abort the save, or are noted. `on_phase` is told the name of
    each phase as it begins, from whichever thread runs it; `on_agreed` the snapshot with what all ranks agreed on.
    `check_boundary` raises `TornSnapshotError` once all was read, if something is known to have changed meanwhile.
    """

    storage: Storage
    group: Group
    ambient: Ambient
    claim: Claim
    chain: tuple[LineageLink, ...]
    deadline_s: float
    planner: Planner
    refuses_difference: bool = True
    workspace: Workspace = field(default_factory=Workspace)
    on_phase: Callable[[str], None] = lambda phase: None
    on_agreed: Callable[[Snapshot], None] = lambda snapshot: None
    check_boundary: Callable[[], None] = lambda: None


@dataclass(frozen=True, slots=True)
class StagedSave:
    """Hold a save of a boundary that all ranks have agreed on: what this rank writes, and where its bytes come from.

    `form` is that of the file that is written; `increment` says what lies in ancestors' files. `copying` is what live
    memory is still needed for, beside the training. `division` is there on the leader only; `noted` is the first entry
    of the plain trees that ranks hold differently; `spent` is what writing goes to.
    """

    plan: Plan
    snapshot: Snapshot
    place: Place
    form: FileForm
    increment: Increment
    origin: Origin
    copying: Copier | None
    division: Division | None
    sums: tuple[ReplicaSums, ...]
    noted: str
    timings_s: dict[str, float]
    spent: Spent = field(default_factory=Spent)

    @property
    def generation(self) -> str:
        """Return the name of the generation that this becomes."""
        return self.plan.generation


@dataclass(frozen=True, slots=True)
class SaveResult:
    """Report a committed save: every sync was seen to succeed and the manifest was read back.

    `size_bytes` are those of what all ranks wrote, `referenced_bytes` of what they left where it lay. `timings_s` are
    the seconds of the leader's phases. `durability` says what it survives: ``process`` death, ``power`` loss, or loss
    of a disk (``replicated``).
    """

    generation: str
    step: int
    size_bytes: int
    referenced_bytes: int
    durability: Durability
    timings_s: dict[str, float]


class PhaseClock:
    """Time the phases, in seconds, and announce them."""

    def __init__(self, context: SaveContext, timings_s: dict[str, float]) -> None:
        self.timings_s = dict(timings_s)
        self._context = context
        self._phase = ""
        self._since = 0.0

    def enter(self, phase: str) -> None:
        """End the phase before, and begin this one."""
        self.leave()
        self._phase, self._since = phase, self._context.ambient.monotonic()
        self._context.on_phase(phase)

    def leave(self) -> None:
        """End the phase at work, if there is one."""
        if self._phase:
            self.timings_s[self._phase] = self._context.ambient.monotonic() - self._since
            self._phase = ""
