"""Where the starts of a command die: a pure function of a seed and the number of updates."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from safepoint.drill.events import Event, Phase, Restored, Update
from safepoint.errors import RequestError
from safepoint.faults.chance import Chance

AIMS = ("one", "leader", "all")
PHASES = ("stage", "plan", "write", "vote", "check", "publish")

# Half of the random kills aim at a save, which is a small part of the time and the delicate one.
_AIMS = (None,) * len(PHASES) + PHASES
_DELAY_STEPS = 1000
_LONGEST_DELAY = 2.0


@dataclass(frozen=True, slots=True)
class Kill:
    """Say where a start dies.

    Args:
        update: Not before this update is complete, or restored.
        phase: The next time this phase of a save begins after that; None for the update itself.
        delay: How much longer it lives then, as a multiple of the time that one update takes; 0 dies on the spot.
        rank: The only rank that is killed; None for all of them, with the process that started them.
    """

    update: int
    phase: str | None = None
    delay: float = 0.0
    rank: int | None = None

    def __str__(self) -> str:
        place = f"after update {self.update}" if self.update else "after the restore"
        if self.phase is not None:
            place = f"in phase {self.phase!r} of the first save from update {self.update} on"
        return place + (f" and {self.delay:g} updates' time" if self.delay else "")


def plan_kills(count: int, *, seed: int, updates: int, resumable_from: int = 0) -> tuple[Kill, ...]:
    """Return kills at random places, in the order of the updates; the same seed gives the same ones.

    Args:
        count: How many.
        updates: How many updates the uninterrupted run has.
        resumable_from: The last kill is not before this update, so that one start at least has a checkpoint to go on
            from.
    """
    chance = Chance("drill", seed)
    drawn = [
        Kill(
            chance.below(updates + 1),
            _AIMS[chance.below(len(_AIMS))],
            round(chance.below(_DELAY_STEPS) * _LONGEST_DELAY / _DELAY_STEPS, 3),
        )
        for _ in range(count)
    ]
    kills = sorted(drawn, key=lambda kill: kill.update)
    if kills and kills[-1].update < resumable_from:
        kills[-1] = replace(kills[-1], update=min(resumable_from, updates))
    return tuple(kills)


def aim_kills(kills: tuple[Kill, ...], *, at: str, sizes: Sequence[int], seed: int) -> tuple[Kill, ...]:
    """Return the kills with the rank that each of them hits.

    Args:
        at: ``all`` ranks, the ``leader``, or any ``one``, drawn from the seed.
        sizes: How many ranks each start has.

    Raises:
        RequestError: `at` is none of these.
    """
    check_aim(at)
    if at == "all":
        return kills
    chance = Chance("drill rank", seed)
    ranks = [chance.below(size) if at == "one" else 0 for size in sizes[: len(kills)]]
    return tuple(replace(kill, rank=rank) for kill, rank in zip(kills, ranks, strict=True))


def check_aim(at: str) -> None:
    """Raise `RequestError` unless kills can be aimed so."""
    if at not in AIMS:
        raise RequestError("no ranks are named so", where="kill", expected=", ".join(AIMS), found=at)


def check_phases(kills: tuple[Kill, ...]) -> None:
    """Raise `RequestError` for a phase that no save has; this can be known before anything has run."""
    for kill in kills:
        if kill.phase is not None and kill.phase not in PHASES:
            raise RequestError("a save has no such phase", where="kill", expected=", ".join(PHASES), found=kill.phase)


def check_kills(kills: tuple[Kill, ...], *, updates: int) -> None:
    """Raise `RequestError` for a kill that the run never reaches."""
    check_phases(kills)
    for kill in kills:
        if not 0 <= kill.update <= updates:
            raise RequestError(
                "a kill is out of the run's reach",
                where="kill",
                expected=f"an update from 0 to {updates}, the run's last",
                found=str(kill.update),
            )


class Trigger:
    """Follow the events of one start up to the place of its kill."""

    def __init__(self, kill: Kill) -> None:
        self._kill = kill
        self._is_reached = False

    def meets(self, event: Event) -> bool:
        """Return whether this event is the place; the delay begins here."""
        kill = self._kill
        if isinstance(event, Update | Restored) and event.step >= kill.update:
            self._is_reached = True
            return kill.phase is None
        return self._is_reached and isinstance(event, Phase) and event.phase == kill.phase
