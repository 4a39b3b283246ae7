"""A start of several ranks: the leader alone holds the run, and the others follow.

1. The leader claims, beats, keeps the journal and records what is resumed. Its word, a claim or an error, is that of
   every rank.
2. No rank goes on unless all of them see the leader's record: a folder that is not shared is found before anything is
   saved.

Spec: C1.
"""

from __future__ import annotations

import logging
from collections.abc import Callable

import msgspec

from safepoint.ambient import Ambient
from safepoint.catalog import Lineage
from safepoint.errors import CorruptionError, InternalError, RequestError, StorageError
from safepoint.format.digest import digest_bytes
from safepoint.format.encoding import RECORD_LIMIT_BYTES
from safepoint.format.names import incarnation_path
from safepoint.format.records import LineageLink
from safepoint.group.agreement import join, lead
from safepoint.group.base import Group
from safepoint.joining.claim import Claim
from safepoint.joining.holder import WAIT_S
from safepoint.joining.session import RECORDED, Session, forked
from safepoint.storage.base import Storage

# A claim may wait for the heartbeats of several starts before it.
_CLAIM_S = 4 * WAIT_S
_POLL_S = 0.25
_MOST_RANKS_NAMED = 16

_log = logging.getLogger(__name__)


class SilentJournal:
    """Be the journal of a rank that keeps none: the leader's tells how far the run came."""

    def update(self, step: int) -> None:
        """Note nothing."""

    def event(self, kind: str, **facts: object) -> None:
        """Note nothing."""


class Follower:
    """Be a session of a rank that does not lead: it knows the claim and the chain, and writes nothing.

    `lineage` is empty: what is resumed is the leader's to choose.
    """

    def __init__(self, storage: Storage, group: Group, ambient: Ambient, claim: Claim, *, deadline_s: float) -> None:
        self._storage = storage
        self._group = group
        self._ambient = ambient
        self._claim = claim
        self._deadline_s = deadline_s
        self._pid = ambient.pid()
        self._chain: tuple[LineageLink, ...] = ()
        self.lineage = Lineage(claim.run)
        self.journal = SilentJournal()

    @property
    def is_own(self) -> bool:
        """Return whether this process is the one that made the session, and no child of it."""
        return self._ambient.pid() == self._pid

    @property
    def claim(self) -> Claim:
        """Return the leader's claim."""
        self.check_is_own()
        return self._claim

    @property
    def chain(self) -> tuple[LineageLink, ...]:
        """Return the lineage that ends with this incarnation; empty until `recorded`."""
        return self._chain

    def check_is_own(self) -> None:
        """Raise `RequestError` in a child that was forked off after the session was made."""
        if not self.is_own:
            raise forked(self._storage, self._pid, self._ambient.pid())

    def recorded(self, act: Callable[[Session], int]) -> int:
        """Hear what the leader recorded, and return what its act returned; see `Session.recorded`."""
        topic = f"join/{self.claim.incarnation}/recorded"
        number, self._chain = msgspec.json.decode(
            lead(self._group, topic, _nobody, deadline_s=self._deadline_s), type=RECORDED
        )
        return number

    def close(self) -> None:
        """Do nothing: the leader lets the run go."""


RankSession = Session | Follower


def join_run(
    storage: Storage,
    group: Group,
    ambient: Ambient,
    *,
    topic: str,
    versions: dict[str, str],
    takeover: bool,
    needs_chain: bool,
    deadline_s: float,
) -> RankSession:
    """Claim the next number on the leader, and return each rank's session.

    Args:
        storage: The run's folder, as this rank sees it.
        group: The ranks.
        ambient: The clock and the process.
        topic: The beginning of the exchanges' topics; used once.
        versions: What is recorded of this start.
        takeover: Fence a living holder out instead of being refused.
        needs_chain: Whether a lineage that cannot be told refuses the join.
        deadline_s: The longest wait for other ranks, and for this rank to see the leader's record.

    Raises:
        FencedError: Another living process holds the run.
        CorruptionError: The run's records cannot be trusted.
        RequestError: Not all ranks see the same folder; names those that do not.

    Spec: C1.
    """
    sessions: list[RankSession] = []

    def claim() -> bytes:
        session = Session(
            storage,
            ambient,
            world_size=group.world_size,
            versions=versions,
            takeover=takeover,
            needs_chain=needs_chain,
            group=group,
            deadline_s=deadline_s,
        )
        sessions.append(session)
        return msgspec.json.encode((session.claim, _seen(storage, session.claim) if group.world_size > 1 else ""))

    try:
        word = lead(group, f"{topic}/claim", claim, deadline_s=deadline_s + _CLAIM_S)
        claimed, digest = msgspec.json.decode(word, type=tuple[Claim, str])
        if group.rank != 0:
            sessions.append(Follower(storage, group, ambient, claimed, deadline_s=deadline_s))
        if group.world_size > 1:
            _check_is_shared(storage, group, ambient, claimed, digest, topic=topic, deadline_s=deadline_s)
    except BaseException:
        for session in sessions:
            session.close()
        raise
    return sessions[0]


def _check_is_shared(
    storage: Storage, group: Group, ambient: Ambient, claim: Claim, digest: str, *, topic: str, deadline_s: float
) -> None:
    """Raise `RequestError` unless every rank reads the leader's record; on all ranks.

    Spec: C1.9.
    """
    path = incarnation_path(claim.incarnation)

    def look() -> bytes:
        ends = ambient.monotonic() + min(deadline_s, WAIT_S)
        while (found := _seen(storage, claim)) != digest:
            # A network file system may show a new file late.
            if ambient.monotonic() >= ends:
                return f"another {path}".encode() if found else f"no {path}".encode()
            ambient.sleep(_POLL_S)
        return b""

    def judge(parts: list[bytes]) -> bytes:
        blind = {rank: part.decode() for rank, part in enumerate(parts) if part}
        if blind:
            named = [f"rank {rank} sees {what}" for rank, what in list(blind.items())[:_MOST_RANKS_NAMED]]
            rest = f", and {len(blind) - _MOST_RANKS_NAMED} more" if len(blind) > _MOST_RANKS_NAMED else ""
            raise RequestError(
                "the ranks do not share one folder for the run",
                where=storage.url,
                expected=f"every rank to see what rank 0 wrote, {path}",
                found=", ".join(named) + rest,
                remedy="Give a folder of a file system that all hosts have mounted, under the same name.",
            )
        return b""

    join(group, f"{topic}/shared", look, judge, deadline_s=deadline_s + WAIT_S)


def _seen(storage: Storage, claim: Claim) -> str:
    """Return the digest of the record of a claim, or nothing where none can be read."""
    try:
        return digest_bytes(storage.read(incarnation_path(claim.incarnation), limit_bytes=RECORD_LIMIT_BYTES))
    except (StorageError, CorruptionError) as exc:
        _log.debug("the record of incarnation %d cannot be read here: %s", claim.incarnation, exc)
        return ""


def _nobody() -> bytes:
    raise InternalError("a rank that does not lead was asked to act")
