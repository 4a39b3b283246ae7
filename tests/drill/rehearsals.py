"""Make rehearsals by hand, without a process."""

from __future__ import annotations

from collections.abc import Mapping

from safepoint.drill.events import Restored, Update
from safepoint.drill.trace import Ending, Rehearsal, Start

STATE = {"model": "aa", "streams": "bb"}


def update(step: int, *, loss: float | None = None, ids: tuple[int, ...] | None = None, streams: str = "s") -> Update:
    """Return the evidence of an update; what is left out is a function of the step."""
    value = 1.0 / step if loss is None else loss
    return Update(step, {"loss": value.hex()}, {"data": ids or (step, step + 1)}, f"{streams}{step}")


def whole(last: int = 6, state: Mapping[str, str] | None = None) -> Start:
    """Return an uninterrupted start."""
    restored = Restored(0, is_fresh=True)
    updates = tuple(update(step) for step in range(1, last + 1))
    return Start(
        Ending.FINISHED, f"at its end after update {last}", updates, restored, state=state or STATE, exit_code=0
    )


def killed(last: int, *, committed: tuple[int, ...] = (), updates: tuple[Update, ...] = ()) -> Start:
    """Return a first start that was killed after an update."""
    updates = updates or tuple(update(step) for step in range(1, last + 1))
    return Start(Ending.KILLED, f"after update {last}", updates, Restored(0, is_fresh=True), committed)


def resumed(
    step: int,
    *updates: Update,
    state: Mapping[str, str] | None = None,
    promise: str = "exact",
    ending: Ending = Ending.FINISHED,
    exit_code: int = 0,
) -> Start:
    """Return a start that went on from a step."""
    restored = Restored(step, f"step-{step}", promise)
    place = f"after update {updates[-1].step}" if updates else f"after restoring step {step}"
    return Start(ending, place, updates, restored, state=state or STATE, exit_code=exit_code)


def rehearsal(*starts: Start, baseline: Start | None = None) -> Rehearsal:
    """Return a rehearsal of these starts."""
    return Rehearsal(("python", "train.py"), baseline or whole(), starts)
