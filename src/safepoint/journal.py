"""The journal: cheap lines that tell how far a run came. Never needed to restore, never synced.

One line of JSON each. A line ``{"step": n}`` is replaced by the next one, so the file grows only with events.

Spec: F8.
"""

from __future__ import annotations

import logging
import math
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import msgspec

from safepoint.errors import CorruptionError, ObjectMissingError, SafepointError, StorageError
from safepoint.format.names import MAX_STEP, GenerationName, journal_path
from safepoint.storage.base import Appender, Storage

_LIMIT_BYTES = 64 << 20
# Both are noted after a commit alone: where one line is lost, the other still tells that the generation was there.
_WITNESSES = {"committed": "committed", "saved": "committed", "deleted": "deleted"}

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class NotedCost:
    """Tell what a save cost: see `safepoint.stats.SaveCost`."""

    blocked_s: float
    total_s: float
    is_background: bool


@dataclass(frozen=True, slots=True)
class JournalSummary:
    """Tell what an incarnation noted: its last update, the generations it committed and deleted, whether it had
    recorded what it resumed, which it does before the first line, and what its saves cost, oldest first.
    """

    last_step: int | None
    has_resumed: bool
    committed: frozenset[str]
    deleted: frozenset[str]
    costs: tuple[NotedCost, ...] = ()


class Journal:
    """Write one incarnation's journal, from any thread.

    A line that cannot be written is logged and lost: the journal is no reason to stop a training.
    """

    def __init__(self, storage: Storage, incarnation: int) -> None:
        self._lock = threading.Lock()
        self._appender: Appender | None = None
        try:
            self._appender = storage.append(journal_path(incarnation))
        except StorageError as exc:
            _log.warning("the journal could not be opened, so this start keeps none: %s", exc)

    def update(self, step: int) -> None:
        """Note that an update was completed."""
        if self._appender is not None:
            self._write(self._appender.replace_last, b'{"step": %d}' % step)

    def event(self, kind: str, **facts: object) -> None:
        """Note something that stays: ``resumed``, ``committed``, ``saved`` or ``deleted``, each with its generation."""
        if self._appender is not None:
            self._write(self._appender.append, msgspec.json.encode({"event": kind, **facts}))

    def close(self) -> None:
        """Close the file. Idempotent."""
        with self._lock:
            if self._appender is not None:
                self._appender.close()

    def _write(self, verb: Callable[[bytes], None], line: bytes) -> None:
        with self._lock:
            try:
                verb(line)
            except (SafepointError, OSError) as exc:
                _log.warning("a line of the journal could not be written: %s", exc)


def read_journal(storage: Storage, incarnation: int) -> JournalSummary:
    """Return what an incarnation noted. Lines that are torn or foreign are passed over: the journal proves nothing."""
    try:
        data = storage.read(journal_path(incarnation), limit_bytes=_LIMIT_BYTES)
    except (ObjectMissingError, CorruptionError):
        data = b""
    steps: list[int] = []
    costs: list[NotedCost] = []
    has_resumed = False
    named: dict[str, set[str]] = {"committed": set(), "deleted": set()}
    # A start that saved ten thousand times has twice as many lines, and a join reads all journals.
    decoder = msgspec.json.Decoder(_Line)
    for text in data.splitlines():
        try:
            line = decoder.decode(text)
        except (msgspec.MsgspecError, ValueError, RecursionError):
            continue
        has_resumed |= line.event == "resumed"
        if type(line.step) is int and 0 <= line.step <= MAX_STEP:
            steps.append(line.step)
        if isinstance(line.generation, str) and isinstance(line.event, str) and line.event in _WITNESSES:
            named[_WITNESSES[line.event]].add(line.generation)
        if line.event == "saved":
            costs += _cost(line)
    last_step = max(steps, default=None)
    return JournalSummary(
        last_step, has_resumed, frozenset(named["committed"]), frozenset(named["deleted"]), tuple(costs)
    )


def unsound_lines(storage: Storage, incarnation: int) -> list[int]:
    """Return the numbers, from 1, of the lines of an incarnation's journal that are not as they are written.

    They bear no digest: a line in which one letter has become another that may stand there is not found.

    Raises:
        CorruptionError: It is no file that can be a journal.
        StorageError: The storage cannot answer.
    """
    try:
        data = storage.read(journal_path(incarnation), limit_bytes=_LIMIT_BYTES)
    except ObjectMissingError:
        return []
    return [number for number, text in enumerate(data.split(b"\n"), start=1) if text and not _is_sound(text)]


def _is_sound(text: bytes) -> bool:
    try:
        line = msgspec.json.decode(text, type=_WrittenLine)
    except (msgspec.MsgspecError, ValueError, RecursionError):
        return False
    if line.event is None:
        return line.generation is None
    is_fresh = line.event == "resumed" and line.generation is None
    return is_fresh or (line.generation is not None and GenerationName.parse(line.generation) is not None)


class _WrittenLine(msgspec.Struct, forbid_unknown_fields=True):
    """Hold what a line tells where it is as it was written."""

    step: int | None = None
    event: Literal["resumed", "committed", "saved", "deleted"] | None = None
    generation: str | None = None
    blocked_s: float | None = None
    total_s: float | None = None
    is_background: bool | None = None


class _Line(msgspec.Struct):
    """Hold what a line may tell; a line may hold anything."""

    step: object = None
    event: object = None
    generation: object = None
    blocked_s: object = None
    total_s: object = None
    is_background: object = None


def _cost(line: _Line) -> list[NotedCost]:
    blocked_s, total_s = line.blocked_s, line.total_s
    if not isinstance(line.is_background, bool) or not isinstance(blocked_s, float) or not isinstance(total_s, float):
        return []
    is_sound = math.isfinite(blocked_s) and math.isfinite(total_s) and blocked_s >= 0 and total_s >= 0
    return [NotedCost(blocked_s, total_s, line.is_background)] if is_sound else []
