"""What a bell over sockets makes of what breaks, call by call."""

from __future__ import annotations

import socket
import struct
import threading
from collections.abc import Callable

import pytest

from safepoint.ambient import SystemAmbient
from safepoint.group import socket_bell
from safepoint.group.bell import Bell, NoBell
from safepoint.group.socket_bell import BellPlace, reach_bell, serve_bell
from tests.group.bells import HERE, LIMIT_S, all_connected, becomes, reached, says, served


def test_a_rank_that_can_have_no_sockets_has_no_bell(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse() -> None:
        raise OSError(24, "Too many open files")

    monkeypatch.setattr(socket, "socketpair", refuse)
    assert isinstance(reach_bell(HERE, BellPlace(1, "a", "b"), ambient=SystemAmbient()), NoBell)
    assert serve_bell(2, ambient=SystemAmbient())[1] is None


def test_no_socket_is_left_where_the_system_gives_no_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(_thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    def listen() -> socket.socket:
        made.append(listening())
        return made[-1]

    def pair() -> tuple[socket.socket, socket.socket]:
        made.extend(paired())
        return made[-2], made[-1]

    made: list[socket.socket] = []
    listening, paired = socket_bell._listening, socket.socketpair
    monkeypatch.setattr(socket_bell, "_listening", listen)
    monkeypatch.setattr(socket, "socketpair", pair)
    monkeypatch.setattr(threading.Thread, "start", refuse)
    assert isinstance(reach_bell(HERE, BellPlace(1, "a", "b"), ambient=SystemAmbient()), NoBell)
    assert serve_bell(2, ambient=SystemAmbient())[1] is None
    assert [one.fileno() for one in made] == [-1] * 5


def test_a_bell_that_nobody_has_any_more_ends() -> None:
    bell, _ = serve_bell(2, ambient=SystemAmbient())
    side = bell._side  # type: ignore[attr-defined]  # one over sockets
    del bell
    becomes(lambda: side._door.fileno() < 0, NoBell(SystemAmbient()))


def test_all_who_wait_look_when_it_rings_once(bells: list[Bell]) -> None:
    leader, place = served(bells, 2)
    given = (leader.count, 10 * LIMIT_S)
    waiting = [threading.Thread(target=leader.wait, args=given, daemon=True) for _ in range(3)]
    for one in waiting:
        one.start()
    condition = leader._side.rings._condition  # type: ignore[attr-defined]  # one over sockets
    becomes(lambda: len(condition._waiters) == len(waiting), NoBell(SystemAmbient()))
    caller = says(place, place.greeting.encode())
    for one in waiting:
        one.join(LIMIT_S / 6)
    assert not any(one.is_alive() for one in waiting)
    caller.close()


class Slow:
    """A connection under whose sending another thread wants to close it, and that has no options."""

    def __init__(self, close: Callable[[], None]) -> None:
        self._end = threading.Thread(target=close, daemon=True)
        self.is_closed = self.was_closed = False

    def fileno(self) -> int:
        return 1

    def setsockopt(self, *_option: int) -> None:
        raise OSError(22, "Invalid argument")

    def setblocking(self, _is_on: bool) -> None:
        pass

    def send(self, _data: bytes, _flags: int) -> None:
        self._end.start()
        self._end.join(0.1)
        self.was_closed = self.is_closed

    def close(self) -> None:
        self.is_closed = True

    def ends(self) -> None:
        self._end.join(LIMIT_S)


@pytest.mark.parametrize("is_dropped", [False, True])
def test_no_connection_is_closed_under_who_rings(is_dropped: bool) -> None:
    connections = socket_bell._Connections()
    connection = Slow((lambda: connections.drop(1)) if is_dropped else connections.let_go)
    connections.add(connection)  # type: ignore[arg-type]  # what is used of a socket
    connections.ring()
    connection.ends()
    assert connection.is_closed and not connection.was_closed


def test_a_ring_goes_at_once_and_waits_for_nobody(bells: list[Bell]) -> None:
    leader, follower = all_connected(bells)[:2]
    for bell in (leader, follower):
        for one in bell._side.connections._held.values():  # type: ignore[attr-defined]  # one over sockets
            assert one.gettimeout() == 0
            assert one.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)
            assert one.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)


def test_a_caller_that_said_nothing_is_let_go_of_in_the_end(bells: list[Bell]) -> None:
    leader, place = served(bells, 2)
    caller = says(place)
    strangers = leader._side._strangers  # type: ignore[attr-defined]  # one over sockets
    becomes(lambda: bool(strangers), NoBell(SystemAmbient()))
    assert [one.gettimeout() for one in strangers.values()] == [0]
    leader.close()
    assert caller.recv(1) == b""
    caller.close()


class Door:
    """A listening socket that accepts nobody for so many errors."""

    def __init__(self, door: socket.socket, errors: list[OSError]) -> None:
        self._door, self._errors = door, errors
        self.asked = 0

    def fileno(self) -> int:
        return self._door.fileno()

    def close(self) -> None:
        self._door.close()

    def accept(self) -> tuple[socket.socket, object]:
        self.asked += 1
        if self._errors:
            raise self._errors.pop()
        return self._door.accept()


def test_a_caller_that_hung_up_keeps_no_other_out(bells: list[Bell]) -> None:
    leader, place = served(bells, 2)
    side = leader._side  # type: ignore[attr-defined]  # one over sockets
    side._door = Door(side._door, [ConnectionAbortedError(), BlockingIOError()])
    follower = reached(bells, place)
    becomes(lambda: leader.is_heard and follower.is_heard, leader)


def test_a_leader_that_can_take_no_more_asks_once_and_hears_those_it_has(bells: list[Bell]) -> None:
    leader, place = served(bells, 3)
    follower = reached(bells, place)
    becomes(lambda: follower.is_heard, follower)
    side = leader._side  # type: ignore[attr-defined]  # one over sockets
    side._door = Door(side._door, [OSError(24, "Too many open files") for _ in range(1000)])
    caller = says(place)
    becomes(lambda: side._door.asked > 0, NoBell(SystemAmbient()))
    for _ in range(10):
        count = leader.count
        follower.ring()
        leader.wait(count, LIMIT_S)
    assert side._door.asked == 1
    caller.close()


def test_what_has_nothing_to_read_or_was_dropped_is_passed_over_and_asked_no_more() -> None:
    side = socket_bell._Leader(1, "a", "b")
    assert side._door.gettimeout() == 0
    near, far = socket.socketpair()
    near.setblocking(False)
    number = near.fileno()
    side._strangers[number] = near
    side._poll.register(near)
    side._read(number)
    assert side._strangers[number] is near
    far.close()
    side._read(number)
    assert (near.fileno(), side._strangers, side._poll.poll(0)) == (-1, {}, [])
    side._read(number)
    side.end()
    side.let_go()


def test_a_wait_ends_though_a_child_holds_the_other_end_open() -> None:
    waker = socket_bell._Waker()
    waker.other.settimeout(LIMIT_S)
    held = waker._own.dup()
    waker.wake()
    assert waker.other.recv(1) == b""
    held.close()
    waker.let_go()


def answered(bells: list[Bell], *said: bytes) -> tuple[Bell, socket.socket]:
    """Return a rank's bell and the other end of its connection, on which so much was said."""
    with socket.create_server((HERE[0], 0)) as stranger:
        follower = reached(bells, BellPlace(stranger.getsockname()[1], "a" * 32, "b" * 32))
        caller, _ = stranger.accept()
    caller.settimeout(LIMIT_S)
    caller.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    assert caller.recv(32) == b"a" * 32
    for part in said:
        caller.sendall(part)
    return follower, caller


def test_who_hangs_up_before_the_answer_is_not_listened_to(bells: list[Bell]) -> None:
    follower, caller = answered(bells)
    caller.close()
    side = follower._side  # type: ignore[attr-defined]  # one over sockets
    becomes(lambda: side._waker.other.fileno() < 0, NoBell(SystemAmbient()))
    assert not follower.is_heard


def test_a_rank_looks_once_it_is_connected_and_once_the_connection_is_reset(bells: list[Bell]) -> None:
    follower, caller = answered(bells, b"b" * 32)
    becomes(lambda: follower.is_heard and follower.count == 1, NoBell(SystemAmbient()))
    caller.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    caller.close()
    becomes(lambda: not follower.is_heard and follower.count == 2, NoBell(SystemAmbient()))


class Torn:
    """A connection on which an answer comes in two parts."""

    def __init__(self) -> None:
        self._parts = [b"a", b"nswer"]

    def sendall(self, _data: bytes, _flags: int) -> None:
        pass

    def recv(self, _most: int) -> bytes:
        return self._parts.pop(0)


def test_an_answer_may_come_in_parts() -> None:
    side = socket_bell._Follower(HERE, BellPlace(1, "who", "answer"))
    assert side._is_answered(Torn())  # type: ignore[arg-type]  # what is used of a socket
    side.end()
    side.let_go()
