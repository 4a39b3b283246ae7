"""What a restore can promise: everything that differs, of whatever rank, judged by the contract.

Spec: C11.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING

import msgspec

from safepoint.contract import PER_RANK, Contract, Promise, Reason, judge, lowest
from safepoint.errors import Difference, MismatchError
from safepoint.format.manifest import Conditions, Manifest
from safepoint.restoring.match import Match
from safepoint.restoring.own_conditions import compared_with
from safepoint.restoring.refusal import check_contract
from safepoint.restoring.together import Ranks, merged_findings
from safepoint.restoring.topology import topology_reasons
from safepoint.restoring.validate import SavedState
from safepoint.state.item import STREAMS_ITEM, Item

if TYPE_CHECKING:
    # Restoring runs without torch, which a probe needs.
    from safepoint.state.probe import Probe


def find_promise(
    saved: SavedState,
    matched: Match,
    *,
    contract: Contract,
    conditions: Conditions | None,
    further: Callable[[Manifest], Sequence[Reason]],
    ranks: Ranks,
) -> Promise:
    """Return the promise, the same on all ranks.

    Args:
        saved: The saved state.
        matched: What is restored, and what differs in it.
        contract: What is asked for.
        conditions: Those of now; None compares nothing.
        further: Gives reasons that only the caller knows.
        ranks: The ranks.

    Raises:
        ContractError: The promise is less than the contract asks for.
    """
    reasons = ranks.joined(
        lambda: _reasons(saved, matched, conditions, _further(saved, matched, further, ranks), rank=ranks.rank),
        merged_findings,
        list[Reason],
    )
    promise = Promise(
        "approximate" if conditions is None else lowest(reason.level for reason in reasons), tuple(reasons)
    )
    # What restore(skip=...) leaves out needs no word; nor does anything where nothing is compared, but what belongs to
    # no rank of this job.
    left_out = {reason.word for reason in matched.reasons if reason.word.endswith(".skipped")}
    exempt = {
        reason
        for reason in reasons
        if reason.word in left_out or (conditions is None and not reason.word.endswith(PER_RANK))
    }
    check_contract(
        contract,
        promise,
        where=saved.manifest.generation,
        exempt=exempt,
        derivable=matched.derivable,
        saved_ranks=saved.manifest.world_size,
    )
    return promise


def judged(saved: Manifest, conditions: Conditions, items: Iterable[str], *, rank: int) -> Promise:
    """Return what a checkpoint's conditions promise under those of a rank, as far as they are of some items."""
    names = set(items)
    before = compared_with(saved.conditions, conditions, rank=rank)
    return judge(_of_items(before, names), _of_items(conditions, names))


def with_probe(
    promise: Promise, probe: Probe | None, manifest: Manifest, *, permitted: frozenset[str], ranks: Ranks
) -> Promise:
    """Return the promise with what the user's probe finds, which must be permitted.

    Raises:
        MismatchError: The numbers are others; the live objects hold the restored state.
    """
    differences = ranks.joined(
        lambda: [] if probe is None else list(probe.compare(manifest.probe)), merged_findings, list[Difference]
    )
    if differences and "probe" not in permitted:
        raise MismatchError(
            "the restored state gives other numbers than the saved one",
            where=manifest.generation,
            expected=None if probe is None else f"equal within {probe.tolerance}",
            differences=differences,
            remedy="The live objects hold the restored state; find what it does not cover before training on.",
        )
    return lowered(
        promise, [Reason("probe", "approximate", one.subject, one.saved, one.current) for one in differences]
    )


def changed_items(promise: Promise, items: Mapping[str, Item], permitted: frozenset[str]) -> frozenset[str]:
    """Return the names of the items that a permitted difference makes other than they were saved.

    Args:
        promise: The promise, with its reasons.
        items: The live items.
        permitted: The words that the contract permits.
    """
    if any(reason.word == "device" and reason.subject == "device" for reason in promise.reasons):
        # What an item says of itself names the kind of device it lies on.
        return frozenset(items)
    words = {reason.word for reason in promise.reasons}
    named = {word.split(".")[0] for word in words & permitted if "." in word or word == STREAMS_ITEM}
    if "scheduler" in words:
        named |= {name for name, item in items.items() if item.type in ("scheduler", "optimizer")}
    return frozenset(named)


def lowered(promise: Promise, found: Sequence[Reason]) -> Promise:
    """Return the promise with reasons that showed after the restore."""
    return Promise(lowest([promise.level, *(reason.level for reason in found)]), (*promise.reasons, *found))


def _further(
    saved: SavedState, matched: Match, further: Callable[[Manifest], Sequence[Reason]], ranks: Ranks
) -> list[Reason]:
    return [*further(saved.manifest), *topology_reasons(saved, matched.items, world_size=ranks.world_size)]


def _reasons(
    saved: SavedState, matched: Match, conditions: Conditions | None, further: Sequence[Reason], *, rank: int
) -> list[Reason]:
    reasons = [*matched.reasons, *further]
    if conditions is None:
        return reasons
    found = judged(saved.manifest, conditions, {item.name for item in matched.items}, rank=rank).reasons
    told = {reason.word for reason in found}
    # Where an item's own differences are listed, that its structure is another one says nothing more.
    listed = {reason.word.split(".")[0] for reason in matched.reasons if "." in reason.word}
    general = {f"{name}.{what}" for name in listed for what in ("structure", "parameters")}
    kept = [reason for reason in found if reason.word not in general]
    return [*kept, *(reason for reason in reasons if reason.word not in told)]


def _of_items(conditions: Conditions, names: set[str]) -> Conditions:
    """Return the conditions without those of items that are left out or come later; a loader tells the batch."""
    parts = {part: getattr(conditions, part) for part in ("structure", "configuration", "datasets")}
    kept = {part: {name: one for name, one in named.items() if name in names} for part, named in parts.items()}
    batch = conditions.global_batch if conditions.datasets.keys() <= names else None
    return msgspec.structs.replace(conditions, global_batch=batch, **kept)
