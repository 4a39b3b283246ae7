"""What a group makes of a bell: it looks at once when it is rung, and relies on no ring."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from safepoint.ambient import SystemAmbient
from safepoint.errors import AbortedError, LeaderLostError
from safepoint.group.bell import NoBell
from safepoint.group.board_group import BoardGroup
from safepoint.testing.ambient import FakeAmbient, FakeWorld
from safepoint.testing.ranks import MemoryBoard, SharedMessages
from tests.group.boards import at_once

LIMIT_S = 60.0
RANKS = 4


class Played:
    """A bell that is said to be heard, and rings when the clock says so."""

    is_heard = True

    def __init__(self, ambient: FakeAmbient, rings_at: Sequence[float] = ()) -> None:
        self._ambient, self._rings_at = ambient, list(rings_at)
        self.count = 0

    def wait(self, count: int, seconds: float) -> None:
        assert count == self.count
        now = self._ambient.monotonic()
        if self._rings_at and self._rings_at[0] <= now + seconds:
            self._ambient.sleep(self._rings_at.pop(0) - now)
            self.count += 1
        else:
            self._ambient.sleep(seconds)

    def ring(self) -> None:
        pass

    def close(self) -> None:
        pass


class Watched(MemoryBoard):
    """A board on which a message appears at a time, and which notes when it is looked at."""

    def __init__(self, ambient: FakeAmbient, rank: int, appear: dict[str, float] | None = None) -> None:
        super().__init__(SharedMessages(), rank)
        self._ambient, self._appear = ambient, appear or {}
        self.looked_at: list[float] = []

    def look(self, key: str, *, limit_s: float) -> bytes | None:
        self.looked_at.append(self._ambient.monotonic())
        return f"{key}\0said".encode() if self.looked_at[-1] >= self._appear.get(key, float("inf")) else None


def waiting(appears_s: float, rings_s: Sequence[float]) -> tuple[float, list[float]]:
    """Return how late a rank is that waits for a word, and when it looks, in seconds from the beginning."""
    ambient = FakeAmbient(FakeWorld(), pid=1)
    began = ambient.monotonic()
    board = Watched(ambient, 1, {"plan/word": began + appears_s})
    bell = Played(ambient, [began + one for one in rings_s])
    group = BoardGroup(board, rank=1, world_size=2, ambient=ambient, bell=bell)
    assert group.spread("plan", None, deadline_s=LIMIT_S) == b"said"
    looks_s = [one - began for one in board.looked_at]
    return looks_s[-1] - appears_s, looks_s


def test_who_is_rung_looks_at_once_and_seldom_before() -> None:
    late_s, looks_s = waiting(0.3, [0.3])
    assert late_s == pytest.approx(0.0, abs=1e-6)
    assert len(looks_s) <= 8


def test_a_message_that_comes_behind_its_ring_is_found_soon() -> None:
    late_s, _ = waiting(10.003, [10.0])
    assert 0 <= late_s <= 0.01


def test_a_message_is_found_where_its_ring_is_lost() -> None:
    late_s, _ = waiting(10.1, [])
    assert 0 <= late_s <= 0.3


def test_rings_for_others_end_no_wait() -> None:
    late_s, looks_s = waiting(10.0, [0.5 * number for number in range(1, 21)])
    assert late_s == pytest.approx(0.0, abs=1e-6)
    assert len(looks_s) > 20


def test_a_leader_that_is_rung_names_only_those_who_are_absent() -> None:
    ambient = FakeAmbient(FakeWorld(), pid=1)
    board, bell = MemoryBoard(SharedMessages(), 0), Played(ambient)
    group = BoardGroup(board, rank=0, world_size=RANKS, ambient=ambient, bell=bell)
    board.post("plan/2", b"two", limit_s=LIMIT_S)
    board.post("plan/3", b"three", limit_s=LIMIT_S)
    with pytest.raises(AbortedError, match=r"found nothing from rank 1\. "):
        group.gather("plan", b"zero", deadline_s=LIMIT_S)


class Measured(MemoryBoard):
    """A board that hands over one message in so many seconds, as one of large messages does."""

    def __init__(self, ambient: FakeAmbient, seconds: float) -> None:
        super().__init__(SharedMessages(), 0)
        self._ambient, self._seconds = ambient, seconds

    def take(self, keys: Sequence[str], *, limit_s: float) -> dict[str, bytes]:
        ends = self._ambient.monotonic() + limit_s
        found = super().take(keys, limit_s=limit_s)
        self._ambient.sleep(self._seconds * len(found))
        if self._ambient.monotonic() > ends:
            raise LeaderLostError("no answer")
        return found


def test_what_came_behind_an_absent_rank_is_not_all_taken_in_the_end() -> None:
    ambient = FakeAmbient(FakeWorld(), pid=1)
    board = Measured(ambient, 0.6)
    group = BoardGroup(board, rank=0, world_size=RANKS, ambient=ambient, bell=Played(ambient))
    for rank in (2, 3):
        board.post(f"plan/{rank}", b"large", limit_s=LIMIT_S)
    with pytest.raises(AbortedError, match=r"found nothing from rank 1\. "):
        group.gather("plan", b"zero", deadline_s=LIMIT_S)


class Counted(NoBell):
    """No bell that counts how often it should have rung."""

    rings, is_closed = 0, False

    def ring(self) -> None:
        self.rings += 1

    def close(self) -> None:
        self.is_closed = True


def test_every_word_and_every_part_is_rung_for_and_the_bell_ends_with_the_group() -> None:
    ambient, messages = SystemAmbient(), SharedMessages()
    ends = [Counted(ambient) for _ in range(2)]
    groups = [
        BoardGroup(MemoryBoard(messages, rank), rank=rank, world_size=2, ambient=ambient, bell=end)
        for rank, end in enumerate(ends)
    ]

    def act(group: BoardGroup) -> None:
        group.gather("all", b"", deadline_s=LIMIT_S)
        group.spread("word", None if group.rank else b"said", deadline_s=LIMIT_S)
        group.close(deadline_s=LIMIT_S)

    at_once([lambda group=group: act(group) for group in groups])
    # The leader's closing word and its other one; the other rank's part and its farewell.
    assert [end.rings for end in ends] == [2, 2]
    assert all(end.is_closed for end in ends)
