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
    Verdict.PASS: "the run resumed by itself, and nothing of what was compared differs",
    Verdict.LOST_WORK: "resumed further back than promised",
    Verdict.SILENT_DIVERGENCE: "resumed, but it is another run",
    Verdict.HARD_FAIL: "did not resume by itself",
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
    """Return the worst verdict that the rehearsal gives reason for, with all findings, the worst first.

    A drill in which no start ever resumed shows nothing of a resume, and is failed. A start that is fresh because it
    follows a kill before the first checkpoint is as it should be where another start resumed.
    """
    comparison = compare(rehearsal)
    found: list[tuple[Verdict, str]] = []
    found += [(Verdict.HARD_FAIL, text) for text in _failures(rehearsal)]
    if comparison.divergence is not None:
        text = str(comparison.divergence)
        if comparison.divergence.is_before_any_kill:
            text += " (no kill came before: two starts of the command differ by themselves; are all seeds set?)"
        found.append((Verdict.SILENT_DIVERGENCE, text))
    found += [(Verdict.LOST_WORK, text) for text in _losses(rehearsal)]
    # A failed start, or one that started over, says itself why there was no resume.
    if all(verdict is Verdict.SILENT_DIVERGENCE for verdict, _ in found) and not rehearsal.has_resumed:
        found.insert(0, (Verdict.HARD_FAIL, _unshown(rehearsal)))
    verdict = found[0][0] if found else Verdict.PASS
    return Judgement(verdict, tuple(text for _, text in found), comparison)


def _failures(rehearsal: Rehearsal) -> list[str]:
    texts = []
    for number, start in enumerate(rehearsal.starts, 1):
        if start.ending is Ending.FAILED:
            code = f", with exit code {start.exit_code}" if start.exit_code is not None else ""
            texts.append(f"start {number} ended by itself {start.place}{code}")
        if start.ending is Ending.SILENT:
            texts.append(f"start {number} went silent {start.place}")
    return texts


def _unshown(rehearsal: Rehearsal) -> str:
    first = min(rehearsal.baseline.committed, default=None)
    if first is None:
        saves = "the uninterrupted run committed none either; is save= given?"
    else:
        saves = f"the uninterrupted run committed its first at step {first}"
    return (
        "no start resumed from a checkpoint, so nothing was shown of a resume: no checkpoint was committed before a"
        f" kill ({saves}); save more often, or kill later"
    )


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
