"""Who holds a run, and whether that process still lives.

1. A holder is gone if its process is checkably dead or stopped, if it said it closed, or if its heartbeat's value did
   not move during a whole wait of the newcomer's own clock. Times of two hosts are never compared.
2. An incarnation that was refused holds nothing.

Spec: C1.
"""

from __future__ import annotations

import logging
import threading
from dataclasses import dataclass

from safepoint.ambient import Ambient, ProcessIdentity
from safepoint.catalog import Incarnation, Lineage
from safepoint.errors import CorruptionError, ObjectMissingError, StorageError
from safepoint.format.names import incarnation_path
from safepoint.format.records import Holder
from safepoint.storage.base import Storage

CLOSED = b"closed"
BEAT_S = 5.0
WAIT_S = 30.0
_POLL_S = 1.0
_LIMIT_BYTES = 64

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class FoundHolder:
    """Name a living holder: which incarnation, who, where, since when, and whether it is this very process."""

    incarnation: int
    host: str
    user: str
    pid: int
    started: str
    is_this_process: bool = False

    def __str__(self) -> str:
        who = f"process {self.pid} of {self.user or 'unknown'} on {self.host}"
        return f"incarnation {self.incarnation}: {who}, started {self.started}"


def find_holder(storage: Storage, lineage: Lineage, ambient: Ambient, *, wait_s: float = WAIT_S) -> FoundHolder | None:
    """Return the living holder of a run, or None when every earlier start is provably gone.

    Looks at the starts that have not been closed, newest first, down to the first one that joined completely: that one
    has itself made sure of those before it. Takes up to `wait_s` where only a heartbeat can tell.

    Spec: C1.
    """
    for incarnation in reversed(lineage.incarnations):
        if incarnation.refused is not None:
            continue
        if _is_alive(storage, incarnation, ambient, wait_s):
            return _describe(incarnation, ambient)
        if incarnation.resumed is not None:
            return None
    return None


def _describe(incarnation: Incarnation, ambient: Ambient) -> FoundHolder:
    record = incarnation.record
    if record is None:
        return FoundHolder(incarnation.number, "an unknown host", "", 0, "at an unknown time")
    holder = record.holder
    is_own = _identity_of(holder) == ambient.process()
    return FoundHolder(incarnation.number, holder.host, holder.user, holder.pid, record.started, is_own)


def _identity_of(holder: Holder) -> ProcessIdentity:
    return ProcessIdentity(holder.host, holder.user, holder.boot, holder.namespace, holder.pid, holder.start)


def _is_alive(storage: Storage, incarnation: Incarnation, ambient: Ambient, wait_s: float) -> bool:
    path = incarnation_path(incarnation.number, "alive")
    first = _value(storage, path)
    if first == CLOSED:
        return False
    if incarnation.record is not None:
        state = ambient.state_of(_identity_of(incarnation.record.holder))
        if state != "elsewhere":
            return state == "running"
    deadline = ambient.monotonic() + wait_s
    while ambient.monotonic() < deadline:
        ambient.sleep(_POLL_S)
        value = _value(storage, path)
        if value == CLOSED:
            return False
        if value != first:
            return True
    return False


def _value(storage: Storage, path: str) -> bytes:
    try:
        return storage.read(path, limit_bytes=_LIMIT_BYTES)
    except (ObjectMissingError, CorruptionError):
        # Something else in its place tells as little as its absence; a holder that lives puts its value there again.
        return b""


class Heartbeat:
    """Move the value of an incarnation's ``alive`` file while this process lives.

    Owns one daemon thread. A beat that fails is logged and tried again at the next beat: a holder whose storage is
    away for longer than the wait of a newcomer may be taken for gone, and is then fenced.
    """

    def __init__(self, storage: Storage, number: int, *, beat_s: float = BEAT_S) -> None:
        self._storage = storage
        self._path = incarnation_path(number, "alive")
        self._beat_s = beat_s
        self._stop = threading.Event()
        self._count = 0
        self._beat()
        self._thread = threading.Thread(target=self._run, name="safepoint-heartbeat", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stop beating and say that this holder is gone. Idempotent."""
        if self._stop.is_set():
            return
        self._stop.set()
        self._thread.join()
        self._put(CLOSED)

    def _run(self) -> None:
        while not self._stop.wait(self._beat_s):
            self._beat()

    def _beat(self) -> None:
        self._count += 1
        self._put(str(self._count).encode("ascii"))

    def _put(self, value: bytes) -> None:
        try:
            self._storage.put(self._path, value)
        except StorageError as exc:
            _log.warning("the heartbeat could not be written: %s", exc)
