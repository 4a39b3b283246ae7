"""The retention of one manager: after each committed save by the same policy, with what it meets told in the log."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection

from safepoint.ambient import Ambient
from safepoint.contract import Reason
from safepoint.retention.policy import Keep
from safepoint.retention.retain import Known, retain
from safepoint.storage.base import Storage

_log = logging.getLogger(__name__)


class Retention:
    """Retain after each save of one manager.

    Args:
        policy: What is kept; None keeps everything.
        accepts: Whether the contract accepts what a checkpoint says of itself; None for what each one records of it.
    """

    def __init__(
        self, ambient: Ambient, *, policy: Keep | None, accepts: Callable[[Reason], bool] | None = None
    ) -> None:
        self._ambient = ambient
        self.policy = policy
        self._accepts = accepts
        self._known = Known()
        self._unmet = ""

    def retain(self, storage: Storage, *, run: str, incarnation: int, unknown: Collection[str]) -> tuple[str, ...]:
        """Sweep and mark as `safepoint.retention.retain.retain` does, and return what was swept."""
        report = retain(
            storage,
            run=run,
            incarnation=incarnation,
            policy=self.policy,
            ambient=self._ambient,
            unknown=frozenset(unknown),
            known=self._known,
            accepts=self._accepts,
        )
        for text in (*report.warnings, *filter(None, [report.stopped])):
            _log.warning("retention: %s", text)
        if report.unmet != self._unmet:
            self._unmet = report.unmet
            if report.unmet:
                _log.warning("retention: %s", report.unmet)
        return tuple(report.swept.deleted)
