"""Signs of life: what tells a rank that is slow from one that is frozen or gone.

1. A rank that is watched counts on the board, from a thread of its own, as long as its process runs, whatever its other
   threads do: one that reads for an hour counts on, one that is stopped does not.
2. Whoever waits sees by its own clock whether a count moves; times of two hosts are never compared. What it slept
   itself beyond its pause is nobody's silence: of a job that was stopped as a whole, nobody is taken for gone.
3. Only a count that stands still is silence. A rank that has not begun to count, or says that it rests, may be anywhere
   in the program and is not judged.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

from safepoint.ambient import Ambient
from safepoint.errors import LeaderLostError
from safepoint.group.board import Board

_FOLDER = "alive"
_REST = b""
# A count moves so often within the time that counts as silence, and a watcher looks as often.
_MOVES = 8
_LONGEST_PAUSE_S = 5.0

_log = logging.getLogger(__name__)


def is_sign(key: str) -> bool:
    """Return whether a key of the board is that of a rank's count."""
    return key.startswith(f"{_FOLDER}/")


class Pulse:
    """Count on the board while anything is under way, and say once that the rank rests when nothing is any more.

    Args:
        board: This rank's access to the board.
        rank: This rank.
        ambient: The clock.
    """

    def __init__(self, board: Board, rank: int, ambient: Ambient) -> None:
        self._board = board
        self._key = _key(rank)
        self._ambient = ambient
        self._lock = threading.Lock()
        self._under_way = 0
        self._is_counting = False
        self._count = 0
        self._silence_s = 0.0
        self._failure: BaseException | None = None

    @contextmanager
    def beating(self, silence_s: float) -> Iterator[None]:
        """Count while the block runs, often enough for those who take `silence_s` seconds for silence.

        The thread looks now and then whether it is still wanted: blocks that follow each other closely share one.
        """
        with self._lock:
            if self._failure is not None:
                raise self._failure
            self._silence_s = silence_s
            self._under_way += 1
            is_first = not self._is_counting
            self._is_counting = True
        if is_first:
            self._start()
        try:
            yield
        finally:
            with self._lock:
                self._under_way -= 1

    def _start(self) -> None:
        try:
            threading.Thread(target=self._run, name="safepoint-alive", daemon=True).start()
        except RuntimeError as exc:
            with self._lock:
                self._is_counting = False
            # Whoever never counted is waited for as long as anyone who shows nothing.
            _log.warning("no sign of life is shown, for there is no thread for it: %s", exc)

    def _run(self) -> None:
        try:
            while self._beat():
                self._ambient.sleep(_pause_s(self._silence_s))
        except BaseException as exc:  # noqa: BLE001 (the top of a thread: raised where the next block begins)
            self._failure = exc

    def _beat(self) -> bool:
        with self._lock:
            goes_on = self._is_counting = self._under_way > 0
            self._count += 1
        try:
            self._board.post(self._key, str(self._count).encode("ascii") if goes_on else _REST, limit_s=self._silence_s)
        except LeaderLostError as exc:
            # Whoever waits for the leader finds that out; a board that comes back is to see the count move again.
            _log.debug("a sign of life was not left: %s", exc)
        return goes_on


class Watch:
    """Follow the counts of ranks that one wait is for.

    Args:
        board: This rank's access to the board.
        ambient: The clock.
        silence_s: How long a count may stand still.
    """

    def __init__(self, board: Board, ambient: Ambient, silence_s: float) -> None:
        self.silence_s = silence_s
        self.silent: tuple[int, ...] = ()
        self._board = board
        self._ambient = ambient
        self._pause_s = _pause_s(silence_s)
        self._looked_at = float("-inf")
        self._counts: dict[int, bytes] = {}
        self._still_s: dict[int, float] = {}

    def finds_silence(self, ranks: Iterable[int]) -> bool:
        """Return whether any of these ranks is silent, and keep which; looks only now and then."""
        now = self._ambient.monotonic()
        passed_s = now - self._looked_at
        if passed_s < self._pause_s:
            return False
        self._looked_at = now
        for rank in ranks:
            count = self._board.look(_key(rank), limit_s=self.silence_s) or _REST
            is_still = count != _REST and count == self._counts.get(rank)
            self._still_s[rank] = self._still_s[rank] + min(passed_s, 2 * self._pause_s) if is_still else 0.0
            self._counts[rank] = count
        self.silent = tuple(rank for rank in ranks if self._still_s[rank] >= self.silence_s)
        return bool(self.silent)


def _key(rank: int) -> str:
    return f"{_FOLDER}/{rank}"


def _pause_s(silence_s: float) -> float:
    return min(silence_s / _MOVES, _LONGEST_PAUSE_S)
