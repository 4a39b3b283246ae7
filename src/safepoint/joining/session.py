"""One start's hold on a run: its claim, its heartbeat, its journal, and the lineage it goes on from.

A session is that of the process which made it. In a child that was forked off, it refuses every use but `close`, which
does nothing there: the run is the parent's, threads did not come along, and a lock may be held for ever.
"""

from __future__ import annotations

from collections.abc import Callable

import msgspec

from safepoint.ambient import Ambient
from safepoint.catalog import Incarnation, Lineage, read_lineage
from safepoint.errors import CorruptionError, InternalError, RequestError
from safepoint.format.names import incarnation_path
from safepoint.format.records import LineageLink, Refusal
from safepoint.group.agreement import lead
from safepoint.group.base import Group
from safepoint.group.solo import SoloGroup
from safepoint.joining.claim import Claim, claim_incarnation, close_claim, record_resumed
from safepoint.joining.holder import Heartbeat
from safepoint.journal import Journal, read_journal
from safepoint.storage.base import Storage

# What the leader tells of a recorded start: a number of its choice, and the chain.
RECORDED = tuple[int, tuple[LineageLink, ...]]


class Session:
    """Hold a run from the claim of a number until `close`; on the leader of several ranks only.

    Args:
        group: The ranks that are told what was recorded; None for this process alone.
        deadline_s: How long they wait for it.
        needs_chain: Whether a lineage that cannot be told refuses the join.
        takeover: Fence a living holder out instead of being refused.

    Raises:
        FencedError: Another living process holds the run.
        CorruptionError: The run's records cannot be trusted.

    Spec: C1.
    """

    def __init__(
        self,
        storage: Storage,
        ambient: Ambient,
        *,
        world_size: int,
        versions: dict[str, str],
        takeover: bool,
        needs_chain: bool = True,
        group: Group | None = None,
        deadline_s: float = 60.0,
    ) -> None:
        self._group = group or SoloGroup()
        self._deadline_s = deadline_s
        self._storage = storage
        self._ambient = ambient
        self._chain: tuple[LineageLink, ...] = ()
        self._journal: Journal | None = None
        self._is_closed = False
        self._pid = ambient.pid()
        known: dict[int, Incarnation] = {}
        self._claim = claim_incarnation(
            storage, ambient, world_size=world_size, versions=versions, takeover=takeover, known=known
        )
        self._heartbeat: Heartbeat | None = None
        try:
            self._heartbeat = Heartbeat(storage, self._claim.incarnation)
            self.lineage: Lineage = read_lineage(storage, needs_chain=needs_chain, known=known)
            if needs_chain:
                _check_no_record_was_lost(storage, self.lineage)
        except BaseException:
            self.close()
            raise

    @property
    def is_own(self) -> bool:
        """Return whether this process is the one that made the session, and no child of it."""
        return self._ambient.pid() == self._pid

    @property
    def claim(self) -> Claim:
        """Return the claim.

        Raises:
            RequestError: This process is a child that was forked off.
        """
        self.check_is_own()
        return self._claim

    @property
    def chain(self) -> tuple[LineageLink, ...]:
        """Return the lineage that ends with this incarnation; empty until `record`."""
        return self._chain

    @property
    def journal(self) -> Journal:
        """Return the journal of this incarnation, once it has recorded what it resumed."""
        self.check_is_own()
        if self._journal is None:
            raise InternalError("a session that recorded nothing has no journal")
        return self._journal

    def check_is_own(self) -> None:
        """Raise `RequestError` in a child that was forked off after the session was made."""
        if not self.is_own:
            raise forked(self._storage, self._pid, self._ambient.pid())

    def furthest_step(self) -> int:
        """Return the last update that earlier starts on the lineage are known to have done; 0 when none is known.

        What a start did beyond the step to which a later one went back on purpose was left, and is not done again.
        """
        resumed = [entry.resumed for entry in self.lineage.incarnations if entry.resumed is not None]
        branches = [(record.incarnation, record.step) for record in resumed if record.branch]
        furthest = 0
        for link in self.lineage.chain:
            last_step = read_journal(self._storage, link.incarnation).last_step or 0
            left_at = [step for number, step in branches if number > link.incarnation]
            furthest = max(furthest, min([last_step, *left_at]))
        return furthest

    def furthest_step_from(self, generation: str) -> int:
        """Return the last update that earlier starts are known to have done whose history begins with a checkpoint of
        another run; 0 when none is known.
        """
        resumed = [entry.resumed for entry in self.lineage.incarnations if entry.resumed is not None]
        numbers = [record.incarnation for record in resumed if record.chain[0].resumed == generation]
        return max((read_journal(self._storage, number).last_step or 0 for number in numbers), default=0)

    def record(
        self,
        *,
        resumed: str | None,
        step: int,
        chain: tuple[LineageLink, ...],
        refused: tuple[Refusal, ...],
        branch: bool,
        source: str = "",
    ) -> None:
        """Record what this start goes on from. Until then it saves nothing.

        Spec: C1.
        """
        self._chain = record_resumed(
            self._storage,
            self._ambient,
            self.claim,
            resumed=resumed,
            step=step,
            chain=chain,
            refused=refused,
            branch=branch,
            source=source,
        )
        self._journal = Journal(self._storage, self.claim.incarnation)
        self._journal.event("resumed", generation=resumed, step=step)

    def recorded(self, act: Callable[[Session], int]) -> int:
        """Let `act` record what this start goes on from, tell all ranks the chain, and return what it returned.

        Raises:
            SafepointError: What the act raised, on every rank.
        """

        def told() -> bytes:
            return msgspec.json.encode((act(self), self._chain))

        topic = f"join/{self.claim.incarnation}/recorded"
        number, _ = msgspec.json.decode(lead(self._group, topic, told, deadline_s=self._deadline_s), type=RECORDED)
        return number

    def close(self) -> None:
        """Let the run go, and say so; a claim that has recorded nothing is closed. Idempotent; nothing in a fork."""
        if self._is_closed or not self.is_own:
            return
        self._is_closed = True
        if self._journal is not None:
            self._journal.close()
        if self._heartbeat is not None:
            self._heartbeat.close()
        if not self._chain:
            close_claim(self._storage, self._ambient, self._claim, reason="the start ended before it recorded anything")


def forked(storage: Storage, parent: int, child: int) -> RequestError:
    """Return the error of a use in a process that was forked off the one that holds the run."""
    return RequestError(
        "the run is held by the process that this one was forked from",
        where=storage.url,
        expected=f"process {parent}",
        found=f"process {child}",
        remedy="Train and save in the parent, or make a manager after the fork.",
    )


def _check_no_record_was_lost(storage: Storage, lineage: Lineage) -> None:
    """Raise `CorruptionError` when a start newer than the chain had recorded what it resumed, and the record is gone.

    Such a start may have gone back to an older step on purpose; without its record the branch that it left would be
    taken up again.

    Spec: C9.5.
    """
    newest = lineage.chain[-1].incarnation if lineage.chain else 0
    for entry in lineage.incarnations:
        is_open = entry.number > newest and entry.refused is None
        if is_open and read_journal(storage, entry.number).has_resumed:
            raise CorruptionError(
                "what the newest start resumed from is missing, although its journal says that it was recorded",
                where=incarnation_path(entry.number, "resumed.json"),
                remedy="Choose a checkpoint yourself: restore(step=..., branch=True).",
            )
