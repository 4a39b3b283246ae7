"""The bell: who rings is heard, and nothing that goes wrong with it costs more than time."""

from __future__ import annotations

import socket
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence

import pytest

from safepoint.ambient import SystemAmbient
from safepoint.errors import AbortedError
from safepoint.group import socket_bell
from safepoint.group.bell import Bell, NoBell
from safepoint.group.board_group import BoardGroup
from safepoint.group.socket_bell import BellPlace, reach_bell, serve_bell
from safepoint.testing.ambient import FakeAmbient, FakeWorld
from safepoint.testing.ranks import MemoryBoard, SharedMessages
from tests.group.boards import at_once

LIMIT_S = 60.0
HERE = ("127.0.0.1",)
RANKS = 4


@pytest.fixture
def bells() -> Iterator[list[Bell]]:
    """Bells that are closed in the end."""
    made: list[Bell] = []
    yield made
    for one in made:
        one.close()


def served(bells: list[Bell], world_size: int) -> tuple[Bell, BellPlace]:
    bell, place = serve_bell(world_size, ambient=SystemAmbient())
    bells.append(bell)
    assert place is not None
    return bell, place


def reached(bells: list[Bell], place: BellPlace | None, hosts: Sequence[str] = HERE) -> Bell:
    bells.append(reach_bell(hosts, place, ambient=SystemAmbient()))
    return bells[-1]


def all_connected(bells: list[Bell]) -> list[Bell]:
    leader, place = served(bells, RANKS)
    followers = [reached(bells, place) for _ in range(1, RANKS)]
    for one in (leader, *followers):
        becomes(lambda one=one: one.is_heard, one)
    return [leader, *followers]


def becomes(holds: Callable[[], bool], bell: Bell) -> None:
    """Wait until something holds that other threads bring about; a bell's own waits pass the time."""
    for _ in range(600):
        if holds():
            return
        bell.wait(bell.count, 0.1)
    raise AssertionError("it did not come")


def says(place: BellPlace, text: bytes = b"") -> socket.socket:
    caller = socket.create_connection((HERE[0], place.port), timeout=LIMIT_S)
    caller.sendall(text)
    return caller


def test_the_leader_rings_everywhere_and_each_rank_rings_at_the_leader(bells: list[Bell]) -> None:
    leader, *followers = all_connected(bells)
    counts = [one.count for one in followers]
    leader.ring()
    for one, count in zip(followers, counts, strict=True):
        one.wait(count, LIMIT_S)
        assert one.count > count
    for one in followers:
        count = leader.count
        one.ring()
        leader.wait(count, LIMIT_S)
        assert leader.count > count


def test_whoever_does_not_say_the_greeting_is_no_rank(bells: list[Bell]) -> None:
    leader, place = served(bells, 2)
    foreign = says(place, b"0" * len(place.greeting))
    assert foreign.recv(1) == b""
    assert not leader.is_heard


def test_whoever_says_nothing_keeps_no_rank_out(bells: list[Bell]) -> None:
    leader, place = served(bells, 2)
    silent = [says(place) for _ in range(10)]
    follower = reached(bells, place)
    becomes(lambda: leader.is_heard and follower.is_heard, leader)
    assert [one.recv(1) for one in silent[:8]] == [b""] * 8
    for one in silent:
        one.close()


def test_no_more_callers_are_ranks_than_there_are(bells: list[Bell]) -> None:
    _, *_ = all_connected(bells)
    side = bells[0]._side  # type: ignore[attr-defined]  # one over sockets
    late = says(side.place, side.place.greeting.encode())
    assert late.recv(1) == b""
    assert bells[0].is_heard


def test_what_answers_otherwise_is_not_the_leader(bells: list[Bell]) -> None:
    with socket.create_server((HERE[0], 0)) as stranger:
        follower = reached(bells, BellPlace(stranger.getsockname()[1], "a" * 32, "b" * 32))
        caller, _ = stranger.accept()
        caller.settimeout(LIMIT_S)
        assert caller.recv(32) == b"a" * 32
        caller.sendall(b"c" * 32)
        assert caller.recv(1) == b""
    assert not follower.is_heard


def test_the_hosts_are_tried_in_their_order_until_one_answers(
    bells: list[Bell], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(socket_bell, "_CONNECT_S", 1.0)
    leader, place = served(bells, 2)
    follower = reached(bells, place, ("0.0.0.1", *HERE))
    becomes(lambda: leader.is_heard and follower.is_heard, leader)


@pytest.mark.skipif(not socket.has_dualstack_ipv6(), reason="this host speaks one version of the protocol")
def test_a_rank_may_come_by_either_version_of_the_protocol(bells: list[Bell]) -> None:
    leader, place = served(bells, 3)
    by_six, by_four = reached(bells, place, ("::1",)), reached(bells, place)
    becomes(lambda: leader.is_heard and by_six.is_heard and by_four.is_heard, leader)


def test_a_connection_that_breaks_is_heard_no_more_on_either_side(bells: list[Bell]) -> None:
    leader, *followers = all_connected(bells)
    followers[1].close()
    becomes(lambda: not leader.is_heard and not followers[1].is_heard, leader)
    leader.close()
    becomes(lambda: not any(one.is_heard for one in followers), followers[0])
    for one in (leader, *followers):
        one.ring()
        one.close()


def test_where_there_is_nothing_to_connect_to_nobody_rings(bells: list[Bell]) -> None:
    leader, place = served(bells, 2)
    leader.close()
    side = leader._side  # type: ignore[attr-defined]  # one over sockets
    becomes(lambda: side._door.fileno() < 0, NoBell(SystemAmbient()))
    follower = reached(bells, place)
    becomes(lambda: follower._side._waker.other.fileno() < 0, follower)  # type: ignore[attr-defined]
    assert not follower.is_heard
    assert isinstance(reached(bells, None), NoBell)


def test_a_leader_of_very_many_ranks_has_no_bell(bells: list[Bell]) -> None:
    bell, place = serve_bell(socket_bell.MOST_RANKS + 1, ambient=SystemAmbient())
    assert isinstance(bell, NoBell) and place is None


def test_a_reader_that_never_reads_does_not_stop_who_rings(bells: list[Bell]) -> None:
    leader, place = served(bells, 2)
    caller = says(place, place.greeting.encode())
    becomes(lambda: leader.is_heard, leader)
    caller.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1)
    for _ in range(200_000):
        leader.ring()
    assert leader.is_heard
    caller.close()


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


def test_exchanges_go_on_where_some_ranks_have_no_bell(bells: list[Bell]) -> None:
    leader, place = served(bells, 3)
    messages, ambient = SharedMessages(), SystemAmbient()
    ends = [leader, reached(bells, place), NoBell(ambient)]
    groups = [
        BoardGroup(MemoryBoard(messages, rank), rank=rank, world_size=3, ambient=ambient, bell=end)
        for rank, end in enumerate(ends)
    ]
    parts = at_once([lambda g=group: g.gather("all", b"%d" % g.rank, deadline_s=LIMIT_S) for group in groups])
    assert parts == [[b"0", b"1", b"2"], None, None]
    assert not leader.is_heard


FORKED = """
import os, sys, threading
from safepoint.ambient import SystemAmbient
from safepoint.group.socket_bell import reach_bell, serve_bell

leader, place = serve_bell(2, ambient=SystemAmbient())
follower = reach_bell(("127.0.0.1",), place, ambient=SystemAmbient())
while not (leader.is_heard and follower.is_heard):
    leader.wait(leader.count, 0.01)
reader, writer = os.pipe()
child = os.fork()
if child == 0:
    # What a child that outlives its parent would hold open; its own end must not end the parent's.
    leader.close()
    follower.close()
    held = [one for one in os.listdir("/proc/self/fd") if os.path.exists(f"/proc/self/fd/{one}")]
    held = [one for one in held if os.readlink(f"/proc/self/fd/{one}").startswith("socket:")]
    os.write(writer, b"%d" % len(held))
    os._exit(0)
os.waitpid(child, 0)
for one, other in ((leader, follower), (follower, leader)):
    count = other.count
    one.ring()
    other.wait(count, 60)
    assert other.count > count
print(os.read(reader, 100).decode(), leader.is_heard, follower.is_heard, flush=True)
# Whoever waits now is left in the middle of it.
threading.Thread(target=lambda: follower.wait(follower.count, 600), daemon=True).start()
sys.exit(7)
"""


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="counts what a process holds open by /proc")
def test_a_child_holds_nothing_of_it_and_a_process_ends_while_threads_wait() -> None:
    ended = subprocess.run(
        [sys.executable, "-W", "ignore::DeprecationWarning", "-c", FORKED],
        text=True,
        capture_output=True,
        timeout=LIMIT_S,
        check=False,
    )
    assert (ended.returncode, ended.stdout) == (7, "0 True True\n"), ended.stderr
