"""The exchanges of a group, over any board.

1. The leader ends each gathering by one word to all: every message is there, or the error that names the absent ranks.
   So each rank knows whether its message arrived, and all raise the same error. `Board.post` tells nothing about it.
2. Nothing waits within the board: this module looks again and again, ever less often, until its deadline, and at once
   when the bell rings. What is there, and when a wait is over, is told by looks and by the clock.
3. A rank waits `grace_s` longer than the deadline, for the leader's deadline began when the leader called.
4. The leader takes the messages of others off as it reads them; its own words stay until `settle`.
5. A word of the leader names its key: the verdict on one generation is never taken for that on another. What ranks send
   the leader is judged by who gathers it.
6. Within `watched`, whoever is waited for and shows no sign of life is not waited for until the deadline.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import TypeVar

from safepoint.ambient import Ambient
from safepoint.errors import AbortedError, InternalError, LeaderLostError
from safepoint.group.agreement import decode_error, encode_error
from safepoint.group.bell import Bell, NoBell
from safepoint.group.board import Board
from safepoint.group.signs import Pulse, Watch

GRACE_S = 5.0

# Each pause is this part of the wait so far, or of the time since the bell rang: what is rung for may come later.
_PAUSE_SHARE = 0.1
_PAUSE_SHARE_WITH_BELL = 2.0
_SHORTEST_PAUSE_S = 0.001
_LONGEST_PAUSE_S = 0.25
# The board answers some 20,000 looks in a second; more ranks look less often.
_PAUSE_PER_RANK_S = 1 / 20_000
_MOST_RANKS_NAMED = 16
# What a last look may take when the deadline is over, and what tidying may take.
_LAST_LOOK_S = 1.0

_Found = TypeVar("_Found")


class BoardGroup:
    """Be one rank of a group whose messages lie on a board.

    Args:
        board: This rank's access to the board. The group closes it.
        rank: This rank; rank 0 leads and keeps the board.
        world_size: The number of ranks.
        ambient: The clock.
        grace_s: How much longer than the leader a rank waits for the leader's word.
        bell: Tells when to look. The group closes it. Default: there is none.
    """

    def __init__(
        self,
        board: Board,
        *,
        rank: int,
        world_size: int,
        ambient: Ambient,
        grace_s: float = GRACE_S,
        bell: Bell | None = None,
    ) -> None:
        self._board = board
        self._bell = bell if bell is not None else NoBell(ambient)
        self._rank = rank
        self._world_size = world_size
        self._ambient = ambient
        self._grace_s = grace_s
        self._pid = ambient.pid()
        self._lock = threading.Lock()
        self._posted: set[str] = set()
        self._overdue: set[str] = set()
        self._pulse = Pulse(board, rank, ambient)
        # The seconds of silence that end a wait of this thread; none outside of `watched`.
        self._watched = threading.local()

    @property
    def rank(self) -> int:
        """Return this process's rank."""
        return self._rank

    @property
    def world_size(self) -> int:
        """Return the number of ranks."""
        return self._world_size

    def spread(self, topic: str, message: bytes | None, *, deadline_s: float) -> bytes:
        """Post the leader's message, or wait for it."""
        if (message is not None) != (self._rank == 0):
            raise InternalError("the leader spreads a message, and the others pass none", where=topic)
        key = f"{topic}/word"
        if message is not None:
            self._say(key, message, limit_s=deadline_s)
            return message
        return self._hear(key, wait_s=deadline_s + self._grace_s, topic=topic)

    def gather(self, topic: str, message: bytes, *, deadline_s: float) -> list[bytes] | None:
        """Collect the messages of all ranks and tell them how that ended, or post one and wait for that word."""
        closing = f"{topic}/closed"
        if self._rank == 0:
            return self._collect(topic, message, closing, deadline_s)
        ends = self._ambient.monotonic() + deadline_s + self._grace_s
        self._post(f"{topic}/{self._rank}", message, limit_s=deadline_s)
        word = self._hear(closing, wait_s=max(0.0, ends - self._ambient.monotonic()), topic=topic)
        if word:
            raise decode_error(word, where=topic)
        return None

    @contextmanager
    def watched(self, *, silence_s: float) -> Iterator[None]:
        """Count on the board while the block runs, and watch the counts of those that it waits for."""
        outer = self._silence_s
        with self._pulse.beating(silence_s):
            self._watched.silence_s = silence_s
            try:
                yield
            finally:
                self._watched.silence_s = outer

    def leave(self, topic: str, message: bytes, *, limit_s: float) -> None:
        """Post a message under a key of its own."""
        self._board.post(f"{topic}/left", message, limit_s=limit_s)

    def find(self, topic: str, *, limit_s: float) -> bytes | None:
        """Look once."""
        return self._board.look(f"{topic}/left", limit_s=limit_s)

    def settle(self, topic: str) -> None:
        """Take the words of the leader, and messages that came late, off the board."""
        with self._lock:
            posted = {key for key in self._posted if _is_below(key, topic)}
            overdue = {key for key in self._overdue if _is_below(key, topic)}
            self._posted -= posted
            self._overdue -= overdue
        if posted:
            self._board.remove(sorted(posted), limit_s=self._grace_s)
        if overdue:
            self._board.take(sorted(overdue), limit_s=self._grace_s)

    def close(self, *, deadline_s: float) -> None:
        """Say farewell, or wait for the farewells of the others; do nothing in a child that was forked off."""
        if self._ambient.pid() != self._pid:
            return
        try:
            if self._rank == 0:
                self._receive({f"farewell/{rank}": rank for rank in range(1, self._world_size)}, deadline_s)
            else:
                self._post(f"farewell/{self._rank}", b"", limit_s=deadline_s)
        except LeaderLostError:
            # Nobody is left to take leave of.
            pass
        self._board.close()
        self._bell.close()

    def _collect(self, topic: str, message: bytes, closing: str, deadline_s: float) -> list[bytes]:
        missing = {f"{topic}/{rank}": rank for rank in range(1, self._world_size)}
        watch = self._watch()
        messages = {0: message, **self._receive(missing, deadline_s, watch)}
        absent = sorted(set(range(self._world_size)) - set(messages))
        if absent:
            error = _absence(topic, absent, self._world_size, deadline_s)
            if watch is not None and watch.silent:
                error = _silence(topic, watch.silent, self._world_size, watch.silence_s)
            with self._lock:
                self._overdue |= {f"{topic}/{rank}" for rank in absent}
            self._say(closing, encode_error(error), limit_s=self._grace_s)
            raise error
        self._say(closing, b"", limit_s=self._grace_s)
        return [messages[rank] for rank in range(self._world_size)]

    def _receive(self, missing: dict[str, int], deadline_s: float, watch: Watch | None = None) -> dict[int, bytes]:
        """Return the messages that came within the deadline, by rank, or until a rank is silent."""
        messages: dict[int, bytes] = {}
        looked_at = self._ambient.monotonic()

        def take(keys: list[str], limit_s: float) -> bool:
            for key, message in self._board.take(keys, limit_s=limit_s).items():
                messages[missing.pop(key)] = message
            return missing.keys().isdisjoint(keys)

        def look(limit_s: float) -> bool | None:
            nonlocal looked_at
            # Every rank rings: the leader of many does not look for all of them each time, ...
            now = self._ambient.monotonic()
            one_by_one = self._bell.is_heard and watch is None and now - looked_at < _LONGEST_PAUSE_S
            # ... but often enough that in the end there are not all to be taken that came behind an absent one.
            looked_at = looked_at if one_by_one else now
            while missing and take(list(missing)[: 1 if one_by_one else None], limit_s):
                pass
            return True if not missing or (watch is not None and watch.finds_silence(missing.values())) else None

        if missing and not self._poll(look, deadline_s, watch):
            take(list(missing), _LAST_LOOK_S)
        return messages

    def _say(self, key: str, message: bytes, *, limit_s: float) -> None:
        with self._lock:
            self._posted.add(key)
        self._post(key, _sealed(key, message), limit_s=limit_s)

    def _post(self, key: str, message: bytes, *, limit_s: float) -> None:
        self._board.post(key, message, limit_s=limit_s)
        self._bell.ring()

    def _hear(self, key: str, *, wait_s: float, topic: str) -> bytes:
        watch = self._watch()
        found = "nothing"

        def look(limit_s: float) -> bytes | None:
            nonlocal found
            word = self._board.look(key, limit_s=limit_s)
            message = None if word is None else _unsealed(key, word)
            if word is not None and message is None:
                # What was said in another exchange may still be replaced by what is said in this one.
                found = "a word of another exchange"
            if message is None and watch is not None and watch.finds_silence([0]):
                raise LeaderLostError(
                    "the leader shows no sign of life",
                    where=topic,
                    expected=f"one from rank 0 within {watch.silence_s:g} s",
                    found="nothing",
                    remedy="See whether the process of rank 0 runs.",
                )
            return message

        message = self._poll(look, wait_s, watch)
        if message is None:
            raise LeaderLostError(
                "the leader did not answer",
                where=topic,
                expected=f"a word from rank 0 within {wait_s:g} s",
                found=found,
                remedy="See whether the process of rank 0 runs and its host can be reached.",
            )
        return message

    @property
    def _silence_s(self) -> float | None:
        silence_s: float | None = getattr(self._watched, "silence_s", None)
        return silence_s

    def _watch(self) -> Watch | None:
        return None if self._silence_s is None else Watch(self._board, self._ambient, self._silence_s)

    def _poll(self, look: Callable[[float], _Found | None], wait_s: float, watch: Watch | None = None) -> _Found | None:
        """Look until something is there or the time is over; the last look is after the end, never before it."""
        began = rung = self._ambient.monotonic()
        longest_s = _LONGEST_PAUSE_S + self._world_size * _PAUSE_PER_RANK_S
        while True:
            count, now = self._bell.count, self._ambient.monotonic()
            left_s = wait_s - (now - began)
            # The board of a leader that is stopped does not answer.
            longest_look_s = left_s if watch is None else min(left_s, watch.silence_s)
            found = look(max(longest_look_s, _LAST_LOOK_S))
            if found is not None or left_s <= 0:
                return found
            # Looks for many ranks take long themselves; half of the time is left to the board for their messages.
            looked_s = self._ambient.monotonic() - now
            share = _PAUSE_SHARE_WITH_BELL if self._bell.is_heard else _PAUSE_SHARE
            pause_s = min(max((now - rung) * share, looked_s, _SHORTEST_PAUSE_S), longest_s)
            self._bell.wait(count, min(pause_s, left_s))
            if self._bell.count > count:
                rung = self._ambient.monotonic()


def _sealed(key: str, message: bytes) -> bytes:
    return key.encode("utf-8") + b"\0" + message


def _unsealed(key: str, word: bytes) -> bytes | None:
    """Return what the leader said under a key; None where the word was said under another."""
    seal = _sealed(key, b"")
    return word[len(seal) :] if word.startswith(seal) else None


def _is_below(key: str, topic: str) -> bool:
    return key.startswith(f"{topic}/")


def _absence(topic: str, absent: list[int], world_size: int, deadline_s: float) -> AbortedError:
    return AbortedError(
        f"{len(absent)} of {world_size} ranks were absent from an exchange",
        where=topic,
        expected=f"a message from each rank within {deadline_s:g} s",
        found=f"nothing from {_named(absent)}",
        remedy="See whether those processes run and reach the host of rank 0.",
    )


def _silence(topic: str, silent: Iterable[int], world_size: int, silence_s: float) -> AbortedError:
    listed = list(silent)
    return AbortedError(
        f"{len(listed)} of {world_size} ranks show no sign of life",
        where=topic,
        expected=f"one from each rank that is waited for within {silence_s:g} s",
        found=f"nothing from {_named(listed)}",
        remedy="See whether those processes run and reach the host of rank 0.",
    )


def _named(ranks: Iterable[int]) -> str:
    listed = list(ranks)
    text = ", ".join(f"rank {rank}" for rank in listed[:_MOST_RANKS_NAMED])
    return text if len(listed) <= _MOST_RANKS_NAMED else f"{text} and {len(listed) - _MOST_RANKS_NAMED} more"
