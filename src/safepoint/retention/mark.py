"""The first phase of deleting: a tombstone marks a generation, and no byte of it goes.

If we die after a tombstone has its name, readers pass the generation over and a later sweep deletes it. A tombstone of
a start that is off the lineage is void, and so is one on what was resumed last: readers look at the generation as if
it bore none, and a valid one may take its place. A newer start ends the marking: it is looked for before each mark.

Spec: C12.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable

from safepoint.ambient import Ambient
from safepoint.catalog import Lineage, read_tombstone
from safepoint.errors import FencedError, ObjectExistsError, SafepointError
from safepoint.format.encoding import seal
from safepoint.format.names import TOMBSTONE, generation_path
from safepoint.format.records import TombstoneRecord
from safepoint.format.version import FORMAT_VERSION
from safepoint.joining.claim import Claim, check_not_fenced
from safepoint.retention.policy import Decision
from safepoint.storage.base import Storage

_NONCE_BYTES = 8


def mark(
    storage: Storage,
    lineage: Lineage,
    incarnation: int,
    run: str,
    decisions: Iterable[Decision],
    protected: Collection[str],
    *,
    ambient: Ambient,
) -> tuple[list[str], list[str]]:
    """Publish a tombstone for each generation that is decided to go, and return (what was marked, warnings).

    A mark that fails is a warning: the generation stays and is decided on again at the next save. So is a newer start.

    Args:
        storage: Where the run lies.
        lineage: The run's lineage, read after the newest commit.
        incarnation: The start in whose name it is marked; it must be on the lineage's chain.
        run: The run's id.
        decisions: What the policy decided.
        protected: Generations that are never marked, looked at once more here.
        ambient: Gives each record's nonce.

    Spec: C12.
    """
    marked, warnings = [], []
    for decision in decisions:
        if decision.is_kept or decision.generation in protected:
            continue
        record = TombstoneRecord(
            format=FORMAT_VERSION,
            run=run,
            generation=decision.generation,
            incarnation=incarnation,
            reason="; ".join(decision.reasons),
            nonce=ambient.token(_NONCE_BYTES),
        )
        try:
            # It may be choosing what to resume from, and would find that gone by the time it reads it.
            check_not_fenced(storage, Claim(run, incarnation))
            _publish(storage, lineage, record)
        except FencedError as exc:
            warnings.append(f"nothing more is marked: {exc.found} is newer")
            break
        except (SafepointError, OSError) as exc:
            warnings.append(f"{decision.generation} could not be marked for deletion: {exc}")
            continue
        marked.append(decision.generation)
    return marked, warnings


def _publish(storage: Storage, lineage: Lineage, record: TombstoneRecord) -> None:
    path = generation_path(record.generation, TOMBSTONE)
    try:
        storage.publish(path, seal(record))
    except ObjectExistsError:
        if read_tombstone(storage, record.generation, lineage) is not None:
            return
        # A void one. If we die between the two, the generation bears none and is decided on again.
        storage.delete(path)
        storage.publish(path, seal(record))
    storage.sync_folder(generation_path(record.generation))
