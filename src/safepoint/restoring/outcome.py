"""What a restore reports."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from safepoint.contract import Promise, Reason
from safepoint.format.records import Refusal


@dataclass(frozen=True, slots=True)
class RestoreReport:
    """Say what was restored, which promise holds, and everything that was noticed.

    `step` is the number of completed updates that the run goes on from; `generation` is None for a fresh start.
    `replayed` is the number of updates that earlier starts are known to have done after that step and that are done
    again. `left_fresh` names what was not restored, on request. `source` is the other run that the generation is of,
    empty for the own one. Durations are in seconds.
    """

    step: int
    generation: str | None
    promise: Promise
    refused: tuple[Refusal, ...] = ()
    superseded: tuple[str, ...] = ()
    replayed: int = 0
    checks: tuple[str, ...] = ()
    left_fresh: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    durations_s: Mapping[str, float] | None = None
    source: str = ""

    @property
    def is_fresh(self) -> bool:
        """Return whether nothing was restored and the run begins at step 0."""
        return self.generation is None

    @property
    def reasons(self) -> tuple[Reason, ...]:
        """Return everything that differs from the save."""
        return self.promise.reasons

    def facts(self) -> dict[str, object]:
        """Return the report for a program that watches, as values that JSON has."""
        return {
            "step": self.step,
            "generation": self.generation,
            "promise": self.promise.level,
            "replayed": self.replayed,
            "refused": [f"{entry.generation}/{entry.file}: {entry.reason}" for entry in self.refused],
            # Whoever rehearses the run's own resume is shown none by a start from another run.
            "is_fresh": self.is_fresh or bool(self.source),
        }

    def __str__(self) -> str:
        if self.is_fresh:
            lines = ["fresh start: no checkpoint was found, the run begins at step 0"]
        else:
            of = f" of {self.source}" if self.source else ""
            lines = [f"restored step {self.step} ({self.generation}){of}", f"promise: {self.promise.level}"]
        lines += [f"  {reason}" for reason in self.reasons]
        lines += [f"refused {entry.generation}/{entry.file}: {entry.reason}" for entry in self.refused]
        if self.replayed:
            updates = "1 update was" if self.replayed == 1 else f"{self.replayed} updates were"
            lines.append(f"{updates} done after this step and will be done again")
        if self.superseded:
            lines.append(f"superseded: {', '.join(self.superseded)}")
        if self.left_fresh:
            lines.append(f"left fresh: {', '.join(self.left_fresh)}")
        lines += self.notes
        if self.checks:
            lines.append("checked: " + "; ".join(self.checks))
        return "\n".join(lines)
