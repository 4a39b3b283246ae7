"""The counters of a run."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Progress:
    """Count what a run has done up to its last boundary.

    `step` is the number of completed updates; `skipped` counts those among them in which no registered optimizer
    stepped (a gradient scaler skipped it). `samples` and `tokens` are totals over all ranks. `epoch` is the number of
    completed epochs. `epoch_end_due` is true from an epoch's last update until the epoch is closed.
    """

    step: int = 0
    microbatches: int = 0
    samples: int = 0
    tokens: int = 0
    epoch: int = 0
    skipped: int = 0
    epoch_end_due: bool = False
