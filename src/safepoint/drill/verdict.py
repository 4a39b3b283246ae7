"""The verdict on a rehearsal."""

from __future__ import annotations

import enum
from dataclasses import dataclass

from safepoint.drill.compare import Comparison, compare
from safepoint.drill.trace import Ending, Rehearsal, Start


class Verdict(enum.Enum):
    """What a drill showed; the later ones are the worse."""

    PASS = "pass"
    LOST_WORK = "lost_work"
    SILENT_DIVERGENCE = "silent_divergence"
    HARD_FAIL = "hard_fail"


MEANINGS = {
    Verdict.PASS: "the run resumed by itself and is the same run",
    Verdict.LOST_WORK: "resumed further back than promised",
    Verdict.SILENT_DIVERGENCE: "resumed, but it is another run",
    Verdict.HARD_FAIL: "could not resume without a person",
}


@dataclass(frozen=True, slots=True)
class Judgement:
    """State the verdict, what led to it, and how much was compared."""

    verdict: Verdict
    findings: tuple[str, ...]
    comparison: Comparison

    @property
    def holds(self) -> bool:
        """Return whether the drill was passed."""
        return self.verdict is Verdict.PASS


def judge_rehearsal(rehearsal: Rehearsal) -> Judgement:
    """Return the worst verdict that the rehearsal gives reason for, with all findings, the worst first."""
    comparison = compare(rehearsal)
    found: list[tuple[Verdict, str]] = []
    found += [(Verdict.HARD_FAIL, text) for text in _failures(rehearsal)]
    if comparison.divergence is not None:
        text = str(comparison.divergence)
        if comparison.divergence.is_before_any_kill:
            text += " (no kill came before: two starts of the command differ by themselves; are all seeds set?)"
        found.append((Verdict.SILENT_DIVERGENCE, text))
    found += [(Verdict.LOST_WORK, text) for text in _losses(rehearsal)]
    verdict = found[0][0] if found else Verdict.PASS
    return Judgement(verdict, tuple(text for _, text in found), comparison)


def _failures(rehearsal: Rehearsal) -> list[str]:
    texts = []
    for number, start in enumerate(rehearsal.starts, 1):
        if start.ending is Ending.FAILED:
            texts.append(f"start {number} ended by itself {start.place}, with exit code {start.exit_code}")
        if start.ending is Ending.SILENT:
            texts.append(f"start {number} went silent {start.place}")
    return texts


def _losses(rehearsal: Rehearsal) -> list[str]:
    texts = []
    for number, (start, newest) in enumerate(zip(rehearsal.starts, rehearsal.newest_committed, strict=True), 1):
        restored = start.restored
        if restored is not None and newest is not None and restored.step < newest:
            because = "".join(f"; refused {text}" for text in restored.refused)
            texts.append(f"start {number} resumed from {_source(start)}; step {newest} had been committed{because}")
    return texts


def _source(start: Start) -> str:
    if start.restored is None or start.restored.is_fresh:
        return "nothing (a fresh start)"
    return f"step {start.restored.step}"
