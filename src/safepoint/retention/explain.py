"""What retention would do with each generation of a run, and why. Only reads.

Spec: C12.
"""

from __future__ import annotations

from dataclasses import dataclass

from safepoint.catalog import Generation, GenerationState, Lineage, examine_all
from safepoint.notes import read_pin
from safepoint.retention.policy import Decision, Keep
from safepoint.retention.retain import plan_retention
from safepoint.retention.sweep import SweepReport, sweep
from safepoint.storage.base import Storage


@dataclass(frozen=True, slots=True)
class Explanation:
    """Say for every generation, newest first, whether it stays, and why.

    `swept` is what a sweep would do at once, with the bytes that it would free; its `stopped` says why nothing would be
    swept or marked. `unmet` says which rule of the policy keeps nothing, if one does.
    """

    decisions: tuple[Decision, ...]
    swept: SweepReport
    unmet: str = ""


def explain_retention(storage: Storage, lineage: Lineage, policy: Keep, *, incarnation: int) -> Explanation:
    """Return what `retain` would do in the name of an incarnation.

    Spec: C12.
    """
    swept = sweep(storage, lineage, incarnation, is_dry=True)
    planned = plan_retention(storage, lineage, policy)
    decided = {decision.generation: decision for decision in planned.decisions}
    decisions = [
        decided.get(entry.text) or _decision(storage, entry, swept, incarnation)
        for entry in examine_all(storage, lineage)
    ]
    return Explanation(tuple(decisions), swept, planned.unmet)


def _decision(storage: Storage, entry: Generation, swept: SweepReport, incarnation: int) -> Decision:
    """Explain what the policy does not decide on: what was marked, never completed, or cannot be read."""
    is_kept = entry.text not in swept.deleted and entry.state is not GenerationState.DELETED
    return Decision(entry.text, entry.name.step, is_kept, (_reason(storage, entry, swept, incarnation),))


def _reason(storage: Storage, entry: Generation, swept: SweepReport, incarnation: int) -> str:
    when = "its data go first" if entry.text in swept.deleted else f"its data wait: {swept.stopped or 'protected'}"
    if entry.text in swept.retained:
        when = "of its files only those go that no other checkpoint needs"
    if entry.tombstone is not None:
        return f"marked earlier ({entry.tombstone.reason}); {when}"
    if entry.state is GenerationState.DAMAGED:
        return f"never deleted, for it cannot be read: {entry.refusal.reason if entry.refusal is not None else ''}"
    pin = read_pin(storage, entry.text)
    if pin is not None:
        return f"pinned: {pin.reason}"
    if entry.name.incarnation >= incarnation:
        return "not completed, or being made; only a newer start sweeps it"
    return f"never completed, by an earlier start; {when}"
