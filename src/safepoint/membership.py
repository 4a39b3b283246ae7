"""A manager's membership of its run: join, record what is resumed, leave."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from typing import TypeVar

from safepoint.ambient import Ambient
from safepoint.catalog import Lineage, read_lineage
from safepoint.errors import InternalError, RequestError
from safepoint.group.agreement import lead
from safepoint.group.base import Group
from safepoint.joining.follower import RankSession, join_run
from safepoint.joining.session import Session
from safepoint.restoring.match import Choice
from safepoint.restoring.restore import Restored
from safepoint.restoring.select import Wish, nothing_found, select
from safepoint.storage.base import Storage

Told = TypeVar("Told")


class Membership:
    """Hold at most one session at a time. All ranks join, and record, alike.

    Args:
        group: The ranks.
        environment: Tells versions and devices, for the record of each start.
        takeover: Fence out a process that holds the run, instead of being refused.
        restart: Pass over the checkpoints that there are, once.
        deadline_s: How long to wait for other ranks.
    """

    def __init__(
        self,
        storage: Storage,
        ambient: Ambient,
        *,
        group: Group,
        environment: Callable[[], Mapping[str, str]],
        takeover: bool,
        restart: bool,
        deadline_s: float = 60.0,
    ) -> None:
        self._storage = storage
        self._ambient = ambient
        self._group = group
        self._deadline_s = deadline_s
        self._joins = 0
        self._looks = 0
        # Topics of exchanges that every rank has left behind when all have come to the next join.
        self._past: list[str] = []
        self._environment = environment
        self._takeover = takeover
        self._session: RankSession | None = None
        self._thread = threading.get_ident()
        self._is_closed = False
        self.restarts = restart
        # Why the live objects must not be trained on; empty where they may.
        self.unusable = ""

    @property
    def is_joined(self) -> bool:
        """Return whether this process holds a session; a child that was forked off does not."""
        return self._session is not None and self._session.is_own

    def join(self, wish: Wish) -> RankSession:
        """Claim the next number and return the session, which is not yet held: see `hold`.

        Raises:
            RequestError: The membership was closed.
            FencedError: Another living process holds the run.
            CorruptionError: The run's records cannot be trusted.
            RequestError: Not all ranks see the same folder.
        """
        if self._is_closed:
            raise RequestError("the manager is closed", where=self._storage.url, remedy="Make another one.")
        self._joins += 1
        topic = f"join/attempt-{self._joins}"
        session = join_run(
            self._storage,
            self._group,
            self._ambient,
            topic=topic,
            versions=dict(self._environment()),
            takeover=self._takeover,
            needs_chain=not (self.restarts or (wish.branch)),
            deadline_s=self._deadline_s,
        )
        past, self._past = self._past, [topic, f"join/{session.claim.incarnation}"]
        for earlier in past:
            self._group.settle(earlier)
        return session

    def enter(
        self, wish: Wish, find: Callable[[Lineage], Restored], settle: Callable[[RankSession, Restored], Told]
    ) -> Told:
        """Join, or join anew, and hold the session once what it resumes is recorded.

        Args:
            find: Restores what a lineage offers. A run that is held stays so until this has succeeded: a refusal leaves
                the training as it was.
            settle: Records what was restored, and returns what the caller is told.

        Raises:
            SafepointError: As `join`, `find` and `settle` do.
        """
        restored = None
        if self.is_joined:
            restored = find(self._look_back(wish))
            self.leave()
        session = self.join(wish)
        try:
            told = settle(session, find(session.lineage) if restored is None else restored)
        except BaseException:
            session.close()
            raise
        self.hold(session)
        return told

    def hold(self, session: RankSession) -> None:
        """Hold a session that has recorded what it resumed."""
        self._session = session
        self._thread = threading.get_ident()
        self.restarts = False

    def mark_touched(self) -> None:
        """Note that a restore has begun to write to the live objects; a later one that ends takes it back."""
        self.unusable = "a restore did not come to its end, so the live objects may hold a mixture"

    def check_covers(self, choice: Choice) -> None:
        """Raise `RequestError` when a restore would leave out items that may hold a mixture."""
        if self.unusable and (choice.skip or choice.only is not None):
            raise RequestError(
                f"{self.unusable}; this restore leaves some as they are",
                expected="a restore of all items",
                found="skip=" + ", ".join(sorted(choice.skip)) if choice.skip else "items=",
                remedy="Restore without skip= and items=, or make the objects anew.",
            )

    def require(self) -> RankSession:
        """Return the session; a first boundary without a restore joins here, and passes over no checkpoint.

        Raises:
            RequestError: The run has checkpoints, and the training did not start from one; or it was closed; or this
                process is a child that was forked off.
            CorruptionError: It has checkpoints, and none can be used.
            InternalError: The live objects are unusable.
        """
        if self.unusable:
            raise InternalError(self.unusable, remedy="Restore a good checkpoint, or end the process.")
        if self._session is not None:
            self._session.check_is_own()
            if threading.get_ident() != self._thread:
                raise RequestError(
                    "a manager is used from another thread than the one that trains",
                    where=self._storage.url,
                    remedy="Call it from the thread that called restore(); what another thread sees is of no boundary.",
                )
            return self._session
        session = self.join(Wish())
        try:
            if not self.restarts:
                self._check_nothing_is_there(session)
            record_start(session, Restored(), is_branch=False)
        except BaseException:
            session.close()
            raise
        self.hold(session)
        return session

    def leave(self) -> None:
        """Let the session go, and say so. Idempotent."""
        if self._session is not None:
            self._session.close()
            self._session = None

    def close(self) -> None:
        """Let the session go for good: nothing joins any more. Idempotent."""
        self.leave()
        self._is_closed = True

    def _look_back(self, wish: Wish) -> Lineage:
        """Return the lineage on the leader, which alone looks at it; what it meets is raised on all ranks."""
        found = [Lineage(None)]

        def look() -> bytes:
            found.append(read_lineage(self._storage, needs_chain=not wish.branch))
            return b""

        self._looks += 1
        topic = f"join/look-{self._looks}"
        self._past.append(topic)
        lead(self._group, topic, look, deadline_s=self._deadline_s)
        return found[-1]

    def _check_nothing_is_there(self, session: RankSession) -> None:
        def look() -> bytes:
            self._look_for_checkpoints(session)
            return b""

        lead(self._group, f"join/{session.claim.incarnation}/nothing", look, deadline_s=self._deadline_s)

    def _look_for_checkpoints(self, session: RankSession) -> None:
        generation, met = select(self._storage, session.lineage, Wish(), {})
        if generation is None:
            nothing_found(self._storage, session.lineage, Wish(), {refusal.generation: refusal for refusal in met})
            return
        raise RequestError(
            "the run has checkpoints, and this training did not start from one",
            where=self._storage.url,
            found=generation.text,
            remedy="Call restore() before the first update, or pass restart=True to begin anew.",
        )


def record_start(session: RankSession, restored: Restored, *, is_branch: bool) -> int:
    """Record what a session resumes, durably, and return how many updates are known to be done again; on all ranks.

    Spec: C1.
    """
    return session.recorded(lambda leader: _record(leader, restored, is_branch=is_branch))


def _record(session: Session, restored: Restored, *, is_branch: bool) -> int:
    refused = tuple(restored.refused.values())
    if restored.saved is None:
        session.record(resumed=None, step=0, chain=(), refused=refused, branch=is_branch)
        return 0
    manifest, source = restored.saved.manifest, restored.source
    furthest = session.furthest_step_from(manifest.generation) if source else session.furthest_step()
    session.record(
        resumed=manifest.generation,
        step=manifest.step,
        # The history of another run is not this one's.
        chain=() if source else manifest.lineage,
        refused=refused,
        branch=is_branch,
        source=source,
    )
    return max(0, furthest - manifest.step)
