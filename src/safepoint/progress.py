"""The counters of a run."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from safepoint.errors import RequestError

# So that no total of a run leaves the 63 bits that a checkpoint has for it.
MOST_PER_UPDATE = 1 << 40


@dataclass(frozen=True, slots=True)
class Progress:
    """Count what a run has done up to its last boundary.

    `step` is the number of completed updates; `skipped` counts those among them in which no registered optimizer
    stepped (a gradient scaler skipped it). `samples` and `tokens` are totals over all ranks; between two saves
    of several ranks they count what is known without asking: a loader's plan, else this rank's own. `epoch` is the
    number of completed epochs. `epoch_end_due` is true from an epoch's last update until the epoch is closed.
    """

    step: int = 0
    microbatches: int = 0
    samples: int = 0
    tokens: int = 0
    epoch: int = 0
    skipped: int = 0
    epoch_end_due: bool = False


@dataclass(frozen=True, slots=True)
class Consumed:
    """Count what one rank consumed since its run was restored, for the totals over all ranks.

    `samples_before` and `tokens_before` are the totals that it went on from. `planned` counts the samples that a
    loader's plan gave all ranks meanwhile; it holds while `is_planned`: each update counted just what the loader gave
    this rank.
    """

    samples_before: int = 0
    tokens_before: int = 0
    samples: int = 0
    tokens: int = 0
    planned: int = 0
    is_planned: bool = True

    def add(self, *, samples: int, tokens: int, planned: int, is_planned: bool) -> Consumed:
        """Return the counts with those of one more update."""
        return replace(
            self,
            samples=self.samples + samples,
            tokens=self.tokens + tokens,
            planned=self.planned + planned,
            is_planned=self.is_planned and is_planned,
        )


def check_whole(**numbers: object) -> None:
    """Raise `RequestError` for what an update cannot count."""
    for name, number in numbers.items():
        if type(number) is not int or not 0 <= number <= MOST_PER_UPDATE:
            expected = f"an int from 0 to {MOST_PER_UPDATE}"
            raise RequestError("an update counts whole things", where=name, expected=expected, found=repr(number))


def totals_of(parts: Sequence[Consumed]) -> tuple[int, int]:
    """Return samples and tokens over all ranks: the loaders' plan where it holds on all of them, else the sums."""
    is_planned = all(part.is_planned for part in parts)
    samples = max(part.planned for part in parts) if is_planned else sum(part.samples for part in parts)
    before = max(part.samples_before for part in parts), max(part.tokens_before for part in parts)
    return before[0] + samples, before[1] + sum(part.tokens for part in parts)
