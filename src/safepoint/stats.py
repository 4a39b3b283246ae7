"""What saving costs: how long each save held the training up, and how long steps take with and without one beside them.

Of this process alone, since its start. The newest saves and steps are kept, so that memory stays bounded.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

from safepoint.ambient import Ambient
from safepoint.errors import InternalError
from safepoint.saving.context import SaveResult
from safepoint.saving.pour import Spent

_KEPT_SAVES = 256
_KEPT_STEPS = 4096


@dataclass(frozen=True, slots=True)
class SaveCost:
    """Tell what one committed save cost.

    `blocked_s` is how long the training stood still for it: in the call, the wait for the save before it and, at the
    boundary, the retention after it included, and before an optimizer's step, until the copy was complete. `total_s` is
    from its beginning until it was committed.
    `phases_s` are the seconds of each phase of the leader. While this rank's file was written, the thread that makes it
    spent `copy_s` until the bytes were there, `digest_s` on digests, and `storage_s` waiting for the storage. The other
    fields are those of `SaveResult`.
    """

    step: int
    generation: str
    blocked_s: float
    total_s: float
    size_bytes: int
    referenced_bytes: int
    phases_s: dict[str, float]
    copy_s: float
    digest_s: float
    storage_s: float
    is_background: bool


@dataclass(frozen=True, slots=True)
class StepTimes:
    """Tell how long steps took, each from the end of one `after_update` to the beginning of the next, in seconds.

    A call of `save` in between is no part of a step, and a save in flight after it is one beside the step.
    `count` are all of them; the other numbers are of the newest 4,096, and 0 where there is none.
    """

    count: int = 0
    median_s: float = 0.0
    p99_s: float = 0.0
    longest_s: float = 0.0

    def __str__(self) -> str:
        if not self.count:
            return "none"
        return f"{self.count}, median {self.median_s:.3g} s, p99 {self.p99_s:.3g} s, longest {self.longest_s:.3g} s"


@dataclass(frozen=True, slots=True)
class Stats:
    """Tell what saving has cost this process so far.

    `saves` are the newest 256 that were committed, oldest first. `steps` had no save in flight when they began,
    `steps_beside_a_save` had one.
    """

    saves: tuple[SaveCost, ...] = ()
    steps: StepTimes = StepTimes()
    steps_beside_a_save: StepTimes = StepTimes()

    def __str__(self) -> str:
        return "\n".join(
            (
                f"saves: {_text(self.saves)}",
                f"steps without a save: {self.steps}",
                f"steps beside a save: {self.steps_beside_a_save}",
            )
        )


@dataclass(slots=True)
class Running:
    """Follow the cost of one save; `blocked_s` is known when the training goes on, the rest once it is committed."""

    began_s: float
    is_background: bool = False
    blocked_s: float | None = None
    total_s: float = 0.0
    result: SaveResult | None = None
    spent: Spent = field(default_factory=Spent)


@dataclass(slots=True)
class _Steps:
    count: int = 0
    newest_s: deque[float] = field(default_factory=lambda: deque(maxlen=_KEPT_STEPS))

    def add(self, seconds: float) -> None:
        self.count += 1
        self.newest_s.append(seconds)

    def times(self) -> StepTimes:
        ordered = sorted(self.newest_s)
        if not ordered:
            return StepTimes()
        return StepTimes(self.count, _rank(ordered, 0.5), _rank(ordered, 0.99), ordered[-1])


class Costs:
    """Keep the costs of one manager's saves and the times of its steps.

    Args:
        ambient: The clock.
        is_saving: Returns whether a save is in flight.
        is_background: Whether the training goes on before a save has ended.
    """

    def __init__(self, ambient: Ambient, is_saving: Callable[[], bool], *, is_background: bool) -> None:
        self._ambient, self._is_saving, self._is_background = ambient, is_saving, is_background
        self._pid = ambient.pid()
        self._saves: deque[Running] = deque(maxlen=_KEPT_SAVES)
        self._untold: deque[Running] = deque()
        self._alone, self._beside = _Steps(), _Steps()
        self._step_began_s: float | None = None
        self._is_beside = False
        self._note: Callable[..., object] = lambda *_, **__: None

    @contextmanager
    def blocked(self, note: Callable[..., object]) -> Iterator[Running]:
        """Count the time of this block as that for which a save holds the training up, and not as part of a step.

        Args:
            note: Given the cost of this save, and of those before it, once it is known: by this call or another one.
        """
        self._note = note
        running = Running(self._ambient.monotonic(), self._is_background)
        try:
            yield running
        finally:
            running.blocked_s = self._ambient.monotonic() - running.began_s
            if self._step_began_s is not None:
                self._step_began_s += running.blocked_s
                self._is_beside = self._is_saving()
            self.tell()

    @contextmanager
    def blocked_once_more(self, running: Running) -> Iterator[None]:
        """Count the time of this block as well as one for which a save holds the training up."""
        began_s = self._ambient.monotonic()
        try:
            yield
        finally:
            running.blocked_s = (running.blocked_s or 0.0) + self._ambient.monotonic() - began_s

    def note(self, running: Running, result: SaveResult, spent: Spent) -> None:
        """Keep a save that was committed; from any thread."""
        running.total_s, running.spent = self._ambient.monotonic() - running.began_s, spent
        running.result = result
        self._saves.append(running)
        self._untold.append(running)

    def end_step(self) -> None:
        """Take the time of the step that ends here, if it was seen to begin."""
        if self._step_began_s is not None:
            (self._beside if self._is_beside else self._alone).add(self._ambient.monotonic() - self._step_began_s)
        self._step_began_s = None

    def begin_step(self, *, is_beside: bool) -> None:
        """Begin a step, with a save in flight or without."""
        self._step_began_s, self._is_beside = self._ambient.monotonic(), is_beside

    def tell(self) -> None:
        """Note in the journal what saves cost that have ended since the last call: `safepoint plan` reads it."""
        if self._ambient.pid() != self._pid:
            # A child that was forked off has the journal of its parent, which goes on with it.
            return
        while self._untold and self._untold[0].blocked_s is not None:
            cost = _cost(self._untold.popleft())
            self._note(
                "saved",
                generation=cost.generation,
                step=cost.step,
                blocked_s=cost.blocked_s,
                total_s=cost.total_s,
                is_background=cost.is_background,
            )

    def stats(self) -> Stats:
        """Return what is known now; a save is told once it is committed and the training has gone on."""
        return Stats(
            tuple(_cost(running) for running in list(self._saves) if running.blocked_s is not None),
            self._alone.times(),
            self._beside.times(),
        )


def _cost(running: Running) -> SaveCost:
    result, blocked_s = running.result, running.blocked_s
    if result is None or blocked_s is None:
        raise InternalError("the cost of a save is told before it is known")
    return SaveCost(
        step=result.step,
        generation=result.generation,
        blocked_s=blocked_s,
        total_s=running.total_s,
        size_bytes=result.size_bytes,
        referenced_bytes=result.referenced_bytes,
        phases_s=dict(result.timings_s),
        copy_s=running.spent.copy_s,
        digest_s=running.spent.digest_s,
        storage_s=running.spent.storage_s,
        is_background=running.is_background,
    )


def _text(saves: Sequence[SaveCost]) -> str:
    if not saves:
        return "none"
    blocked, total = (sorted(times) for times in zip(*((one.blocked_s, one.total_s) for one in saves), strict=True))
    return (
        f"{len(saves)}, the newest of step {saves[-1].step} and {saves[-1].size_bytes / 1e6:.3g} MB; "
        f"training stood still for {_rank(blocked, 0.5):.3g} s (longest {blocked[-1]:.3g} s), "
        f"committed after {_rank(total, 0.5):.3g} s (longest {total[-1]:.3g} s)"
    )


def _rank(ordered: list[float], part: float) -> float:
    """Return the smallest value that at least this part of all values does not exceed."""
    return ordered[math.ceil(part * len(ordered)) - 1]
