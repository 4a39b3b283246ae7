"""Select: choose the newest usable checkpoint on the live lineage, or the step that was asked for.

Spec: C10.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from safepoint.catalog import (
    NEVER_COMPLETED,
    Generation,
    GenerationState,
    Lineage,
    examine,
    list_generations,
    read_lineage,
)
from safepoint.contract import UNCHANGED
from safepoint.errors import CorruptionError, NotFoundError, RequestError
from safepoint.format.asked import Asked, fits, step_of, told
from safepoint.format.manifest import Manifest
from safepoint.format.names import MANIFEST, RUN_RECORD, GenerationName
from safepoint.format.records import LineageLink, Refusal, RunRecord
from safepoint.journal import read_journal
from safepoint.notes import read_record
from safepoint.storage.base import Storage

_LOST = "committed according to the journal, and not there"
_USABLE = (GenerationState.COMMITTED,)
_USABLE_BY_BRANCH = (GenerationState.COMMITTED, GenerationState.SUPERSEDED)


@dataclass(frozen=True, slots=True)
class Wish:
    """Say which checkpoint is wanted: the newest good one, or that of a step or of a name.

    With `branch` an older or superseded step may be chosen; what is newer on the lineage then becomes superseded. With
    `required` finding nothing is an error.

    Raises:
        RequestError: `branch` comes without a step: which branch is meant is not for us to pick.
    """

    asked: Asked | None = None
    branch: bool = False
    required: bool = False

    def __post_init__(self) -> None:
        if self.branch and self.asked is None:
            raise RequestError(
                "a restore goes back on purpose, and no step is named",
                where="branch=True",
                expected="restore(step=..., branch=True)",
                remedy="Without branch=True the newest good checkpoint is restored.",
            )


def select(
    storage: Storage, lineage: Lineage, wish: Wish, refused: Mapping[str, Refusal]
) -> tuple[Generation | None, list[Refusal]]:
    """Return the next candidate, newest first, and the refusals met on the way to it.

    Where a branch is allowed, of several with the step asked for those of the live lineage come first.

    Args:
        refused: Generations found unusable before, by name; they are passed over.

    Raises:
        RequestError: The step is older than the newest checkpoint, and `branch` was not said.

    Spec: C10.
    """
    met: list[Refusal] = []
    newer: GenerationName | None = None
    names = list_generations(storage)
    if wish.branch:
        names.sort(key=lambda name: not lineage.is_live(name))
    for name in names:
        is_wanted = fits(name, wish.asked)
        if str(name) in refused or (not is_wanted and wish.branch):
            continue
        if not wish.branch and not lineage.is_live(name):
            continue
        if not is_wanted and newer is not None:
            continue
        generation = examine(storage, name, lineage)
        if not is_wanted:
            if generation.state in _USABLE and wish.asked is not None and name.step > step_of(wish.asked):
                newer = name
            continue
        if generation.state in (_USABLE_BY_BRANCH if wish.branch else _USABLE):
            if newer is not None:
                raise _needs_branch(storage, name, newer)
            return generation, met
        if generation.refusal is not None:
            met.append(_with_journal(storage, generation.refusal))
    return None, met


def lost_after(storage: Storage, lineage: Lineage, step: int) -> list[Refusal]:
    """Return the live generations above a step that journals name as committed and whose folders are gone.

    Retention deletes nothing above the newest good checkpoint, so these are losses.

    Spec: C10.
    """
    names = (GenerationName.parse(text) for text in _lost_generations(storage, lineage, {}))
    lost = [name for name in names if name is not None and name.step > step and lineage.is_live(name)]
    return [Refusal(str(name), MANIFEST, _LOST) for name in lost]


def superseded_by(storage: Storage, lineage: Lineage, chosen: Manifest) -> list[str]:
    """Return the live generations that going on from the chosen one leaves behind, newest first.

    Spec: C10.5
    """
    start = LineageLink(lineage.newest + 1, chosen.generation, chosen.step)
    following = Lineage(lineage.run, chain=(*chosen.lineage, start))
    return [str(name) for name in list_generations(storage) if lineage.is_live(name) and not following.is_live(name)]


def nothing_found(storage: Storage, lineage: Lineage, wish: Wish, refused: Mapping[str, Refusal]) -> None:
    """Return when a fresh start is right; otherwise raise what says why it is not.

    Raises:
        NotFoundError: A step was asked for, or a checkpoint is required, and there is none.
        CorruptionError: There are checkpoints, or there were, and none can be used.

    Spec: C10.
    """
    damaged = [refusal for refusal in refused.values() if refusal.reason != NEVER_COMPLETED]
    lost = _lost_generations(storage, lineage, refused) if wish.asked is None else []
    if damaged or lost:
        reasons = [f"{refusal.generation}/{refusal.file}: {refusal.reason}" for refusal in damaged]
        reasons += [f"{name}: {_LOST}" for name in lost]
        raise CorruptionError(
            "no checkpoint of the run can be used",
            where=storage.url,
            found="\n  - " + "\n  - ".join(reasons),
            remedy=f"{UNCHANGED} Repair the storage or bring back a copy; to begin anew, say restart=True.",
        )
    if wish.asked is None and not wish.required:
        return
    raise _no_match(storage, wish)


def check_run_is_there(storage: Storage, wish: Wish) -> None:
    """Raise `NotFoundError` when something was asked for and the path holds no run, or no such step; creates nothing.

    A step of which there is a folder may still turn out to be no checkpoint; that is told after the run was joined.

    Spec: C1.
    """
    if wish.asked is None and not wish.required:
        return
    if not _holds_run(storage):
        raise NotFoundError(
            "there is no run here",
            where=storage.url,
            expected="a run" if wish.asked is None else f"a run with {told(wish.asked)}",
            remedy="Nothing was created. Check the path.",
        )
    if wish.asked is not None and not any(fits(name, wish.asked) for name in list_generations(storage)):
        raise _no_match(storage, wish)


def _holds_run(storage: Storage) -> bool:
    """Return whether a run is there; where its own record can be read, nothing else is."""
    if not storage.root_exists():
        return False
    if read_record(storage, RUN_RECORD, RunRecord, []) is not None:
        return True
    return read_lineage(storage, needs_chain=False).run is not None


def _with_journal(storage: Storage, refusal: Refusal) -> Refusal:
    """Return a refusal as the journal lets it be told.

    A folder without a manifest is a save that was never completed, unless the journal says otherwise.
    """
    name = GenerationName.parse(refusal.generation)
    if name is None or refusal.reason != NEVER_COMPLETED:
        return refusal
    if refusal.generation not in read_journal(storage, name.incarnation).committed:
        return refusal
    return Refusal(refusal.generation, refusal.file, "the manifest is missing, and the journal says it was committed")


def _lost_generations(storage: Storage, lineage: Lineage, refused: Mapping[str, Refusal]) -> list[str]:
    """Return generations that journals and resumed records name, which were not deleted by us and are gone."""
    named: set[str] = set()
    deleted: set[str] = set()
    for incarnation in lineage.incarnations:
        journal = read_journal(storage, incarnation.number)
        named |= journal.committed
        deleted |= journal.deleted
    # The first link resumed nothing, or a checkpoint of another run, which is not looked for here.
    named |= {link.resumed for link in lineage.chain[1:] if link.resumed is not None}
    present = {str(name) for name in list_generations(storage)}
    return sorted(named - deleted - present - set(refused))


def _no_match(storage: Storage, wish: Wish) -> NotFoundError:
    steps = sorted({name.step for name in list_generations(storage)})
    is_left = wish.asked is not None and not wish.branch and any(fits(n, wish.asked) for n in list_generations(storage))
    back = " One on a branch that was left is restored with branch=True." if is_left else ""
    wanted = "any committed checkpoint" if wish.asked is None else f"a committed checkpoint of {told(wish.asked)}"
    return NotFoundError(
        "no checkpoint matches",
        where=storage.url,
        expected=wanted,
        found=f"steps {', '.join(map(str, steps))}" if steps else "no checkpoint",
        remedy=f"{UNCHANGED} Check the path and the step: `safepoint ls` lists what is there.{back}",
    )


def _needs_branch(storage: Storage, name: GenerationName, newer: GenerationName) -> RequestError:
    return RequestError(
        "the step asked for is older than the newest checkpoint",
        where=storage.url,
        expected=f"step {newer.step}",
        found=f"step {name.step}",
        remedy="To go back on purpose say branch=True; the newer checkpoints then become superseded.",
    )
