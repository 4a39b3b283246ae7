"""How a start of the job claims its number, and what it records.

1. A number is claimed by publishing its record exclusively; numbers are contiguous and never deleted.
2. Of two starts that claim at once, the lower living number goes on; the higher closes its claim. So does a start
   that fails before it has recorded what it resumed.
3. A start that finds a higher claim waits until that claim is closed or has recorded what it resumed: only the latter
   fences. So neither of two starts at once, nor a job that runs, ends for a claim that is about to be closed.
4. What an incarnation resumed from is recorded before it saves anything. If we die between claim and record, the number
   is taken and has resumed nothing: the lineage is that of the newest one that did record.

Spec: C1.
"""

from __future__ import annotations

import contextlib
import datetime
import logging
from collections.abc import Collection
from dataclasses import dataclass

import msgspec

from safepoint.ambient import Ambient, ProcessIdentity
from safepoint.catalog import Incarnation, Lineage, list_generations, read_lineage
from safepoint.errors import (
    CorruptionError,
    FencedError,
    FormatVersionError,
    ObjectExistsError,
    ObjectMissingError,
    OutcomeUnknownError,
    RequestError,
    StorageError,
)
from safepoint.format.encoding import RECORD_LIMIT_BYTES, seal, unseal
from safepoint.format.names import (
    GENERATIONS,
    INCARNATIONS,
    JOURNAL,
    MAX_INCARNATION,
    RUN_RECORD,
    incarnation_path,
    parse_incarnation_file,
)
from safepoint.format.records import (
    Holder,
    IncarnationRecord,
    LineageLink,
    Refusal,
    RefusedRecord,
    ResumedRecord,
    RunRecord,
)
from safepoint.format.version import FORMAT_VERSION
from safepoint.joining.holder import CLOSED, WAIT_S, FoundHolder, find_holder
from safepoint.storage.base import Storage
from safepoint.storage.naming import names_in

_NONCE_BYTES = 8
_POLL_S = 0.5

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Claim:
    """Hold what a start of the job owns of its run: the run's id and its own number."""

    run: str
    incarnation: int


def claim_incarnation(
    storage: Storage,
    ambient: Ambient,
    *,
    world_size: int,
    versions: dict[str, str],
    takeover: bool = False,
    wait_s: float = WAIT_S,
    known: dict[int, Incarnation] | None = None,
) -> Claim:
    """Claim the next number of a run, creating the run if there is none.

    Args:
        known: As for `safepoint.catalog.read_lineage`, which is asked several times here.
        takeover: Do not ask whether an earlier holder lives; it is fenced by the new number.
        wait_s: How long to watch the heartbeat of a holder that only a heartbeat can tell of.

    Raises:
        FencedError: A living process holds the run.
        CorruptionError: The folder's records cannot be trusted.
        StorageError: The storage failed; at most a claimed number is left behind, closed if the storage lets us.

    Spec: C1.
    """
    known = {} if known is None else known
    run = _ensure_run(storage, ambient, known)
    lineage = read_lineage(storage, needs_chain=False, known=known)
    if not takeover:
        _refuse_beside(storage, lineage, ambient, wait_s)
    # A number that a generation bears was claimed, also when its record is gone.
    used = max([lineage.newest, *(name.incarnation for name in list_generations(storage))])
    claim = Claim(run, _publish_claim(storage, ambient, run, used + 1, world_size, versions))
    try:
        storage.sync_folder(INCARNATIONS)
        if not takeover:
            again = read_lineage(storage, needs_chain=False, known=known)
            _refuse_earlier(storage, ambient, again, lineage.newest, claim, wait_s)
    except BaseException as exc:
        close_claim(storage, ambient, claim, reason=str(exc) or type(exc).__name__)
        raise
    return claim


def close_claim(storage: Storage, ambient: Ambient, claim: Claim, *, reason: str) -> None:
    """Close a claim that recorded nothing, so that it neither fences nor holds; what the storage refuses is logged.

    Spec: C1.3.
    """
    record = RefusedRecord(
        format=FORMAT_VERSION,
        run=claim.run,
        incarnation=claim.incarnation,
        reason=reason,
        nonce=ambient.token(_NONCE_BYTES),
    )
    try:
        publish_record(storage, incarnation_path(claim.incarnation, "refused.json"), record)
        storage.sync_folder(INCARNATIONS)
    except (StorageError, OutcomeUnknownError) as exc:
        _log.warning("the claim of incarnation %d could not be closed: %s", claim.incarnation, exc)
        # It still fences, but the next start of this same process is let in.
        with contextlib.suppress(StorageError):
            storage.put(incarnation_path(claim.incarnation, "alive"), CLOSED)


def record_resumed(
    storage: Storage,
    ambient: Ambient,
    claim: Claim,
    *,
    resumed: str | None,
    step: int,
    chain: tuple[LineageLink, ...],
    refused: tuple[Refusal, ...] = (),
    branch: bool = False,
    source: str = "",
) -> tuple[LineageLink, ...]:
    """Record what an incarnation resumed from, durably, and return its chain.

    Args:
        chain: The lineage of the resumed generation; empty for a fresh start, and for one from another run.
        source: The other run that the generation is of, as the user called it; empty for the own one.

    Raises:
        FencedError: A newer incarnation exists.

    Spec: C1.
    """
    check_not_fenced(storage, claim, ambient=ambient)
    own = (*chain, LineageLink(claim.incarnation, resumed, step))
    record = ResumedRecord(
        format=FORMAT_VERSION,
        run=claim.run,
        incarnation=claim.incarnation,
        resumed=resumed,
        step=step,
        chain=own,
        refused=refused,
        branch=branch,
        nonce=ambient.token(_NONCE_BYTES),
        source=source,
    )
    publish_record(storage, incarnation_path(claim.incarnation, "resumed.json"), record)
    storage.sync_folder(INCARNATIONS)
    return own


def check_not_fenced(storage: Storage, claim: Claim, *, ambient: Ambient | None = None, wait_s: float = WAIT_S) -> None:
    """Raise `FencedError` when a newer incarnation than ours, not closed, exists.

    Args:
        ambient: Lets a newer claim that has recorded nothing yet be closed first, on this clock; None does not wait.
        wait_s: How long to wait for that.

    Spec: C5.
    """
    deadline: float | None = None
    while True:
        names = names_in(storage, INCARNATIONS)
        newer = _newer_claims(names, claim.incarnation)
        if not newer:
            return
        decided = [number for number in newer if f"{number:06d}.resumed.json" in names]
        if ambient is not None and deadline is None:
            deadline = ambient.monotonic() + wait_s
        if ambient is None or decided or deadline is None or ambient.monotonic() >= deadline:
            raise FencedError(
                "a newer start of the job owns the run",
                where=storage.url,
                expected=f"incarnation {claim.incarnation} to be the newest",
                found=f"incarnation {max(decided or newer)}",
                remedy="Stop this process; the newer one goes on.",
            )
        ambient.sleep(_POLL_S)


def loss_of_run(storage: Storage, claim: Claim) -> StorageError | None:
    """Return an error when the run's folder was deleted, or replaced by another run's, under its holder; else None.

    A record that cannot be read proves nothing, nor does one that is missing while any other file of ours is there.

    Spec: C5.3.
    """
    found = "neither the run's record nor a file of this start"
    try:
        run = unseal(storage.read(RUN_RECORD, limit_bytes=RECORD_LIMIT_BYTES), RunRecord, where=RUN_RECORD).run
        if run == claim.run:
            return None
        found = f"run {run}"
    except ObjectMissingError:
        with contextlib.suppress(StorageError, CorruptionError):
            if claim.incarnation in map(parse_incarnation_file, names_in(storage, INCARNATIONS)):
                return None
    except (StorageError, CorruptionError, FormatVersionError):
        return None
    return StorageError(
        "the run's folder was deleted or replaced while this job runs",
        where=storage.url,
        expected=f"run {claim.run}",
        found=found,
        remedy="Nothing was saved. Put the folder back, or end the job and start it on another one.",
    )


def publish_record(storage: Storage, path: str, record: msgspec.Struct) -> None:
    """Publish a small record exclusively; on "exists" or a lost answer, our own bytes read back mean success.

    Spec: F6.
    """
    data = seal(record)
    try:
        storage.publish(path, data)
    except (ObjectExistsError, OutcomeUnknownError):
        if not _holds(storage, path, data):
            raise


def _newer_claims(names: Collection[str], incarnation: int) -> list[int]:
    """Return the taken numbers above ours that were not refused, from a listing; one may have lost its own record.

    Spec: F6.4.
    """
    # Numbers have the same length, so a greater one's files come behind all of ours, whose number ends with a point.
    behind = f"{incarnation:06d}/"
    numbers = {parse_incarnation_file(name) for name in names if name > behind}
    return sorted(number for number in numbers if number is not None and f"{number:06d}.refused.json" not in names)


def _holds(storage: Storage, path: str, data: bytes) -> bool:
    try:
        return storage.read(path, limit_bytes=RECORD_LIMIT_BYTES) == data
    except (StorageError, CorruptionError):
        return False


def _ensure_run(storage: Storage, ambient: Ambient, known: dict[int, Incarnation]) -> str:
    try:
        lineage = read_lineage(storage, needs_chain=False, known=known)
    except CorruptionError:
        # A path that is no folder is a wrong call, and looks like damage from within: this raises what it is.
        storage.root_exists()
        raise
    if lineage.run is not None:
        # Somebody may have removed a folder by hand; what stands in the others is not to be lost for it.
        _make_folders(storage)
        return lineage.run
    storage.make_root()
    record = RunRecord(
        format=FORMAT_VERSION,
        flags=(),
        run=ambient.token(_NONCE_BYTES),
        created=utc_text(ambient.now()),
        nonce=ambient.token(_NONCE_BYTES),
    )
    _make_folders(storage)
    try:
        publish_record(storage, RUN_RECORD, record)
    except ObjectExistsError:
        return unseal(storage.read(RUN_RECORD, limit_bytes=RECORD_LIMIT_BYTES), RunRecord, where=RUN_RECORD).run
    storage.sync_folder("")
    return record.run


def _make_folders(storage: Storage) -> None:
    for folder in (INCARNATIONS, GENERATIONS, JOURNAL):
        storage.make_folder(folder)
    storage.sync_folder("")


def _publish_claim(
    storage: Storage, ambient: Ambient, run: str, first: int, world_size: int, versions: dict[str, str]
) -> int:
    identity = ambient.process()
    for number in range(first, MAX_INCARNATION + 1):
        record = IncarnationRecord(
            format=FORMAT_VERSION,
            run=run,
            incarnation=number,
            nonce=ambient.token(_NONCE_BYTES),
            holder=_holder(identity),
            world_size=world_size,
            started=utc_text(ambient.now()),
            versions=versions,
            elastic_run=ambient.variable("TORCHELASTIC_RUN_ID") or "",
            elastic_restart=int(ambient.variable("TORCHELASTIC_RESTART_COUNT") or 0),
        )
        try:
            publish_record(storage, incarnation_path(number), record)
        except ObjectExistsError:
            continue
        return number
    raise RequestError(
        "a run has used all incarnation numbers", where=storage.url, expected=f"at most {MAX_INCARNATION}"
    )


def _refuse_beside(storage: Storage, lineage: Lineage, ambient: Ambient, wait_s: float) -> None:
    holder = find_holder(storage, _without_own_elastic_job(lineage, ambient), ambient, wait_s=wait_s)
    if holder is not None:
        raise _held(storage, holder)


def _refuse_earlier(storage: Storage, ambient: Ambient, again: Lineage, seen: int, own: Claim, wait_s: float) -> None:
    """Raise `FencedError` when a lower claim that appeared since we looked is alive."""
    between = tuple(entry for entry in again.incarnations if seen < entry.number < own.incarnation)
    holder = find_holder(storage, Lineage(own.run, between), ambient, wait_s=wait_s)
    if holder is not None:
        raise _held(storage, holder)


def _without_own_elastic_job(lineage: Lineage, ambient: Ambient) -> Lineage:
    """Leave out earlier restarts of this same elastic job: its agent has ended them before it restarted us."""
    job = ambient.variable("TORCHELASTIC_RUN_ID")
    if not job or job == "none":
        return lineage
    restart = int(ambient.variable("TORCHELASTIC_RESTART_COUNT") or 0)
    others = tuple(
        entry
        for entry in lineage.incarnations
        if entry.record is None or entry.record.elastic_run != job or entry.record.elastic_restart >= restart
    )
    return Lineage(lineage.run, others, lineage.chain, lineage.damage)


def _held(storage: Storage, holder: FoundHolder) -> FencedError:
    if holder.is_this_process:
        return FencedError(
            "another manager of this same process holds the run",
            where=storage.url,
            found=str(holder),
            remedy="Call close() on that manager first (in a notebook, one that was made before), or pass "
            "takeover=True to fence it out.",
        )
    return FencedError(
        "another process holds the run",
        where=storage.url,
        found=str(holder),
        remedy="Stop it first, or pass takeover=True to fence it out.",
    )


def _holder(identity: ProcessIdentity) -> Holder:
    return Holder(identity.host, identity.user, identity.boot, identity.namespace, identity.pid, identity.start)


def utc_text(seconds: float) -> str:
    """Return a time for people to read, in UTC with microseconds."""
    return datetime.datetime.fromtimestamp(seconds, datetime.timezone.utc).isoformat()
