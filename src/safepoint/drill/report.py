"""What is told of a drill: rows for people, plain values for programs."""

from __future__ import annotations

from typing import Any

from safepoint.drill.compare import Apart
from safepoint.drill.ranks import without_rank
from safepoint.drill.trace import Ending, Rehearsal, Start
from safepoint.drill.verdict import MEANINGS, Judgement

UNSEEN = "not seen by this drill: objects that are neither registered nor shown in metrics"
COLUMNS = ("start", "resumed from", "promise", "updates", "committed", "ended")


def columns(rehearsal: Rehearsal) -> tuple[str, ...]:
    """Return the heads of the columns; with that of the ranks where there are some."""
    return (COLUMNS[0], "ranks", *COLUMNS[1:]) if rehearsal.baseline.ranks else COLUMNS


def row(label: str, start: Start) -> list[str]:
    """Return the cells of one start, in the order of `columns`."""
    restored = start.restored
    updates = f"{start.updates[0].step}-{start.updates[-1].step}" if start.updates else "none"
    ending = f"{start.ending.value} {start.place}"
    if start.ending is Ending.FAILED and start.exit_code is not None:
        ending += f", exit code {start.exit_code}"
    return [
        label,
        *([str(start.ranks)] if start.ranks else []),
        "" if restored is None else "fresh" if restored.is_fresh else f"step {restored.step}",
        "" if restored is None or restored.is_fresh else restored.promise,
        updates,
        f"step {start.committed[-1]}" if start.committed else "none",
        ending,
    ]


def rows(rehearsal: Rehearsal) -> list[list[str]]:
    """Return the cells of all starts."""
    starts = [row(str(number), start) for number, start in enumerate(rehearsal.starts, 1)]
    return [row("uninterrupted", rehearsal.baseline), *starts]


def compared(judgement: Judgement) -> str:
    """Say in one sentence how much was compared."""
    comparison, apart = judgement.comparison, judgement.comparison.apart
    what = {
        "exact": f"every {_joined(_kinds(judgement))}, bit for bit",
        "same_data": "the sample ids only, which is what the restores promised",
        "approximate": "nothing of their contents, because the restores promised no more",
    }[comparison.level]
    again = f", {comparison.repeated} of them made more than once" if comparison.repeated else ""
    items = dict.fromkeys(without_rank(name) for name in comparison.items)
    end = f"; the final state of {', '.join(items)}" if items else ""
    if len(items) < len(comparison.items):
        end += " on every rank"
    first = f" the first {comparison.updates - apart.updates}:" if apart is not None else ""
    text = f"compared {comparison.updates} updates{again}:{first} {what}{end}"
    if apart is not None:
        text += f"; {_told_apart(apart)}"
    if not comparison.has_seeded_streams:
        text += (
            "; not every random stream (python, numpy, torch) is seeded by the command: the streams were compared from"
            " kill to kill, not with the uninterrupted run"
        )
    return text


def _told_apart(apart: Apart) -> str:
    place = f" ({apart.place})" if apart.place else ""
    return (
        f"{apart.updates} updates from the first start with another number of ranks on: the step and the samples of all"
        f" ranks together exactly, the mean of each metric over the ranks within {apart.tolerance:g}; largest relative"
        f" difference {apart.largest:.2g}{place}; random streams and the final state were not compared"
    )


def warnings(rehearsal: Rehearsal, judgement: Judgement) -> list[str]:
    """Return what makes the drill or its comparison weaker than it could be."""
    return [*_missed(rehearsal), *_uncompared(judgement)]


def _missed(rehearsal: Rehearsal) -> list[str]:
    """Name the kills that were chosen by hand, and whose places their starts did not come to before they ended."""
    return [
        f"start {number} was to die {start.kill}, and never came there: it was killed {start.place}"
        for number, start in enumerate(rehearsal.starts, 1)
        if rehearsal.seed is None and start.kill is not None and start.is_early
    ]


def _uncompared(judgement: Judgement) -> list[str]:
    comparison = judgement.comparison
    if comparison.has_metrics or comparison.level != "exact":
        return []
    kinds = [f"{kind}s" for kind in _kinds(judgement)] + (["the final state"] if comparison.items else [])
    return [f"no metrics were given to after_update: only {_joined(kinds)} were compared"]


def _kinds(judgement: Judgement) -> list[str]:
    comparison = judgement.comparison
    return ["metric"] * comparison.has_metrics + ["sample id"] * comparison.has_ids + ["random stream"]


def _joined(words: list[str]) -> str:
    return " and ".join(filter(None, [", ".join(words[:-1]), words[-1]]))


def as_plain(rehearsal: Rehearsal, judgement: Judgement) -> dict[str, Any]:
    """Return everything as plain values, for JSON."""
    divergence = judgement.comparison.divergence
    return {
        "verdict": judgement.verdict.value,
        "meaning": MEANINGS[judgement.verdict],
        "findings": list(judgement.findings),
        "warnings": warnings(rehearsal, judgement),
        "unseen": UNSEEN,
        "command": list(rehearsal.command),
        "seed": rehearsal.seed,
        "kills": rehearsal.kills,
        "compared": {
            "level": judgement.comparison.level,
            "updates": judgement.comparison.updates,
            "repeated": judgement.comparison.repeated,
            "items": list(judgement.comparison.items),
            "has_metrics": judgement.comparison.has_metrics,
            "has_ids": judgement.comparison.has_ids,
            "has_seeded_streams": judgement.comparison.has_seeded_streams,
            **_plain_apart(judgement.comparison.apart),
        },
        "first_divergence": None
        if divergence is None
        else {
            "start": divergence.start,
            "step": divergence.step,
            "values": [
                {"subject": value.subject, "expected": value.expected, "found": value.found}
                for value in divergence.values
            ],
        },
        "uninterrupted": _plain_start(rehearsal.baseline),
        "starts": [_plain_start(start) for start in rehearsal.starts],
    }


def _plain_apart(apart: Apart | None) -> dict[str, Any]:
    if apart is None:
        return {}
    return {
        "other_ranks": {
            "updates": apart.updates,
            "tolerance": apart.tolerance,
            "largest_difference": apart.largest,
            "place": apart.place,
        }
    }


def _plain_start(start: Start) -> dict[str, Any]:
    restored = start.restored
    return {
        **({"ranks": start.ranks} if start.ranks else {}),
        "ending": start.ending.value,
        "place": start.place,
        "exit_code": start.exit_code,
        "kill": None
        if start.kill is None
        else {
            "update": start.kill.update,
            "phase": start.kill.phase,
            "delay": start.kill.delay,
            **({} if start.kill.rank is None else {"rank": start.kill.rank}),
        },
        "restored": None
        if restored is None
        else {
            "step": restored.step,
            "generation": restored.generation,
            "promise": restored.promise,
            "replayed": restored.replayed,
            "refused": list(restored.refused),
            "is_fresh": restored.is_fresh,
        },
        "first_update": start.updates[0].step if start.updates else None,
        "last_update": start.updates[-1].step if start.updates else None,
        "committed": list(start.committed),
        "state": None if start.state is None else dict(start.state),
        "seconds": round(start.seconds, 3),
    }
