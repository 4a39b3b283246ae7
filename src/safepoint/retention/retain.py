"""Retention at a committed save: sweep what earlier saves marked, then mark what is to go.

1. Nothing is marked and swept by the same call: between the two lies at least one committed save.
2. A failure of retention never fails the save: it is reported, and tried again at the next one.

Spec: C12.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass, field

from safepoint.ambient import Ambient
from safepoint.catalog import Incarnation, Lineage, examine_all, read_lineage
from safepoint.contract import Reason
from safepoint.errors import SafepointError
from safepoint.notes import Manifests
from safepoint.retention.mark import mark
from safepoint.retention.policy import Decision, Keep, decide, find_unmet
from safepoint.retention.survey import candidates_among, pins_among, resumed_lately
from safepoint.retention.sweep import SweepReport, may_sweep, sweep
from safepoint.storage.base import Storage


@dataclass(frozen=True, slots=True)
class RetentionReport:
    """Say what was swept, what was decided and why, and what was marked.

    `stopped` says why nothing was marked; it is empty otherwise. `warnings` holds those of the sweep as well; `unmet`
    says which rule of the policy keeps nothing, if one does.
    """

    swept: SweepReport
    decisions: tuple[Decision, ...] = ()
    marked: tuple[str, ...] = ()
    warnings: tuple[str, ...] = ()
    stopped: str = ""
    unmet: str = ""


@dataclass(frozen=True, slots=True)
class Known:
    """Keep from one call to the next what was read of a run: records of starts, which never change, and manifests."""

    incarnations: dict[int, Incarnation] = field(default_factory=dict)
    manifests: Manifests = field(default_factory=Manifests)


@dataclass(frozen=True, slots=True)
class RetentionPlan:
    """Say what would be decided, newest first, and which rule of the policy keeps nothing, if one does."""

    decisions: tuple[Decision, ...]
    unmet: str = ""


def retain(
    storage: Storage,
    *,
    run: str,
    incarnation: int,
    policy: Keep | None,
    ambient: Ambient,
    protected: Collection[str] = (),
    unknown: Collection[str] = (),
    known: Known | None = None,
    accepts: Callable[[Reason], bool] | None = None,
) -> RetentionReport:
    """Sweep what earlier saves marked, then mark what the policy lets go; to be called after a committed save.

    Never raises an error with a type, or the system's: what fails is a warning, for training goes on without it.

    Args:
        storage: Where the run lies; nothing outside it is ever touched.
        run: The run's id.
        incarnation: The start that has just committed.
        policy: What is kept; None keeps everything, and only sweeps.
        ambient: Gives each tombstone's nonce.
        protected: Generations that stay whatever the policy says, such as a base that later saves refer to.
        unknown: Generations whose save ended without a known outcome: they are neither counted nor deleted.
        known: What earlier calls for this run have read.
        accepts: Whether the contract of the run accepts a reason; None for what each checkpoint records of it.

    Spec: C12.
    """
    swept, known = SweepReport(), known or Known()
    try:
        if policy is None and not may_sweep(storage, incarnation):
            return RetentionReport(swept)
        lineage = read_lineage(storage, known=known.incarnations)
        manifests = known.manifests
        swept = sweep(storage, lineage, incarnation, protected=protected, unknown=unknown, manifests=manifests)
        if policy is None or swept.stopped:
            return RetentionReport(swept, warnings=swept.warnings, stopped=swept.stopped)
        planned = plan_retention(
            storage, lineage, policy, protected=protected, unknown=unknown, manifests=manifests, accepts=accepts
        )
        kept = {*protected, *unknown, *resumed_lately(lineage)}
        marked, warnings = mark(storage, lineage, incarnation, run, planned.decisions, kept, ambient=ambient)
    except (SafepointError, OSError) as exc:
        return RetentionReport(swept, warnings=(*swept.warnings, str(exc)), stopped=f"the run could not be read: {exc}")
    warnings = [*swept.warnings, *warnings]
    return RetentionReport(swept, planned.decisions, tuple(marked), tuple(warnings), unmet=planned.unmet)


def plan_retention(
    storage: Storage,
    lineage: Lineage,
    policy: Keep,
    *,
    protected: Collection[str] = (),
    unknown: Collection[str] = (),
    manifests: Manifests | None = None,
    accepts: Callable[[Reason], bool] | None = None,
) -> RetentionPlan:
    """Return what would be decided; changes nothing.

    Spec: C12.
    """
    found = examine_all(storage, lineage, manifests)
    candidates = candidates_among(storage, lineage, found, unknown=unknown, accepts=accepts)
    reasons = {generation: "protected by its manager" for generation in protected} | resumed_lately(lineage)
    reasons |= pins_among(storage, (entry.generation for entry in candidates))
    decisions = decide(candidates, policy, protected=reasons)
    return RetentionPlan(tuple(decisions), find_unmet(candidates, policy))
