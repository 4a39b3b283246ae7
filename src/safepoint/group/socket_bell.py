"""A bell over sockets of our own.

1. The leader's process listens, every other rank is connected to it, and a thread on each side waits for the rings of
   the other. No call here outlasts an interrupt, the end of its process or the death of the other side.
2. The ends of a connection know each other by what they say first, which is told with the place of the board.
3. Where a rank cannot connect, or a connection breaks, ranks look as often as if there were no bell.
"""

from __future__ import annotations

import contextlib
import logging
import os
import select
import socket
import threading
import weakref
from collections.abc import Callable, Sequence
from functools import partial

import msgspec

from safepoint.ambient import Ambient
from safepoint.group.bell import Bell, NoBell

# A leader of more ranks has more to do than to ring for each.
MOST_RANKS = 256

_SECRET_BYTES = 16
_RING = b"\0"
_READ_BYTES = 4096
_CONNECT_S = 10.0
# Where a job has given up Python's way with the signal, a rank that is gone would end the one that rings it.
_QUIETLY = getattr(socket, "MSG_NOSIGNAL", 0)

_log = logging.getLogger(__name__)


class BellPlace(msgspec.Struct, frozen=True):
    """Say at which port of the leader's host a bell is, what a rank says there first, and what it is answered."""

    port: int
    greeting: str
    answer: str


class SocketBell:
    """Ring and listen over sockets; made by `serve_bell` and `reach_bell`.

    Args:
        side: The leader's side, or another rank's.
    """

    def __init__(self, side: _Leader | _Follower) -> None:
        self._side = side
        # Also where a group is let go of without being closed.
        self._end = weakref.finalize(self, side.end)
        os.register_at_fork(after_in_child=partial(_let_go, weakref.ref(side)))
        try:
            # A daemon: to look up the name of a host may take minutes.
            threading.Thread(target=side.run, name="safepoint-bell", daemon=True).start()
        except RuntimeError:
            self._end()
            side.let_go()
            raise

    @property
    def is_heard(self) -> bool:
        """Return whether all ranks that post for this one are connected."""
        return self._side.is_heard

    @property
    def count(self) -> int:
        """Return how often something came; rings that came together are one."""
        return self._side.rings.count

    def wait(self, count: int, seconds: float) -> None:
        """Wait for the thread that reads."""
        self._side.rings.wait(count, seconds)

    def ring(self) -> None:
        """Send a byte on each connection that has room for it; where there is none, enough of them are unread."""
        self._side.connections.ring()

    def close(self) -> None:
        """End the thread, which closes the connections."""
        self._end()


def serve_bell(world_size: int, *, ambient: Ambient) -> tuple[Bell, BellPlace | None]:
    """Return the leader's bell and its place; where there cannot be one, and for many ranks, one that is never rung."""
    if world_size > MOST_RANKS:
        return NoBell(ambient), None
    try:
        side = _Leader(world_size - 1, ambient.token(_SECRET_BYTES), ambient.token(_SECRET_BYTES))
        return SocketBell(side), side.place
    except (OSError, RuntimeError) as exc:
        _log.info("ranks look for messages now and then, for there is no bell: %s", exc)
        return NoBell(ambient), None


def reach_bell(hosts: Sequence[str], place: BellPlace | None, *, ambient: Ambient) -> Bell:
    """Return another rank's bell, which goes on to connect.

    Args:
        hosts: The names or addresses of the leader's host, in the order in which to try them.
        place: Where the bell is; None for nowhere.
        ambient: The clock where there is none.
    """
    try:
        return NoBell(ambient) if place is None else SocketBell(_Follower(hosts, place))
    except (OSError, RuntimeError) as exc:
        _log.info("this rank looks for messages now and then, for it has no bell: %s", exc)
        return NoBell(ambient)


class _Rings:
    """Count rings, and let threads wait for the next one."""

    def __init__(self) -> None:
        self.count = 0
        self._condition = threading.Condition()

    def add(self) -> None:
        with self._condition:
            self.count += 1
            self._condition.notify_all()

    def wait(self, count: int, seconds: float) -> None:
        with self._condition:
            self._condition.wait_for(lambda: self.count > count, seconds)

    def renew(self) -> None:
        """Free what a fork may have left locked for good."""
        self._condition = threading.Condition()


class _Connections:
    """Hold the sockets whose other ends are known, by their numbers.

    None is closed while something is sent: its number might be that of another file by then.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._held: dict[int, socket.socket] = {}

    def __len__(self) -> int:
        return len(self._held)

    def get(self, number: int) -> socket.socket | None:
        return self._held.get(number)

    def add(self, connection: socket.socket) -> None:
        with contextlib.suppress(OSError):
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        connection.setblocking(False)
        with self._lock:
            self._held[connection.fileno()] = connection

    def drop(self, number: int) -> None:
        with self._lock:
            connection = self._held.pop(number, None)
            if connection is not None:
                connection.close()

    def ring(self) -> None:
        with self._lock:
            for connection in self._held.values():
                with contextlib.suppress(OSError):
                    connection.send(_RING, _QUIETLY)

    def let_go(self) -> None:
        with self._lock:
            for connection in self._held.values():
                connection.close()

    def renew(self) -> None:
        """Free what a fork may have left locked for good."""
        self._lock = threading.Lock()


class _Waker:
    """End another thread's wait for sockets; of this process alone, though a child that was forked off has it too.

    Each end is closed by the side that uses it: under the other its number might be that of another file by then.
    """

    def __init__(self) -> None:
        self._pid = os.getpid()
        self._own, self.other = socket.socketpair()

    def wake(self) -> None:
        if os.getpid() == self._pid:
            with contextlib.suppress(OSError):
                # A child may hold it open.
                self._own.shutdown(socket.SHUT_RDWR)
            self._own.close()

    def let_go(self) -> None:
        self.other.close()
        if os.getpid() != self._pid:
            self._own.close()


class _Leader:
    """Let the other ranks connect, and hear them.

    Args:
        others: How many other ranks there are.
        greeting: What each says first.
        answer: What it is answered.
    """

    def __init__(self, others: int, greeting: str, answer: str) -> None:
        self.rings, self.connections = _Rings(), _Connections()
        self._others, self._greeting, self._answer = others, greeting.encode("ascii"), answer.encode("ascii")
        self._strangers: dict[int, socket.socket] = {}
        self._door = _listening()
        self._waker = _Waker()
        # Not an epoll, which a child that was forked off would share.
        self._poll = select.poll()
        for one in (self._door, self._waker.other):
            self._poll.register(one, select.POLLIN)
        self.place = BellPlace(self._door.getsockname()[1], greeting, answer)

    @property
    def is_heard(self) -> bool:
        return len(self.connections) == self._others

    def run(self) -> None:
        while True:
            for number, _ in self._poll.poll():
                if number == self._waker.other.fileno():
                    self.let_go()
                    return
                if number == self._door.fileno():
                    self._open()
                else:
                    self._read(number)

    def end(self) -> None:
        self._waker.wake()

    def let_go(self) -> None:
        self.connections.let_go()
        for one in self._strangers.values():
            one.close()
        self._door.close()
        self._waker.let_go()

    def _open(self) -> None:
        try:
            connection, _ = self._door.accept()
        except (BlockingIOError, ConnectionError):
            return
        except OSError as exc:
            # It would fail again at once, and again.
            self._poll.unregister(self._door)
            _log.info("ranks look for messages now and then, for no more of them can connect: %s", exc)
            return
        connection.setblocking(False)
        if len(self._strangers) > self._others:
            # Whoever does not say who it is keeps no rank out.
            self._drop(next(iter(self._strangers)))
        self._strangers[connection.fileno()] = connection
        self._poll.register(connection, select.POLLIN)

    def _read(self, number: int) -> None:
        stranger = self._strangers.get(number)
        connection = stranger or self.connections.get(number)
        if connection is None:
            return
        try:
            said = connection.recv(_READ_BYTES)
            is_known = bool(said) if stranger is None else self._admits(stranger, said)
        except BlockingIOError:
            return
        except OSError:
            is_known = False
        if is_known:
            self.rings.add()
        else:
            self._drop(number)

    def _admits(self, stranger: socket.socket, said: bytes) -> bool:
        if self.is_heard or not said.startswith(self._greeting):
            return False
        stranger.send(self._answer, _QUIETLY)
        self.connections.add(self._strangers.pop(stranger.fileno()))
        return True

    def _drop(self, number: int) -> None:
        self._poll.unregister(number)
        stranger = self._strangers.pop(number, None)
        if stranger is not None:
            stranger.close()
            return
        self.connections.drop(number)
        # Who waits looks more often from now on, and what was rung may be lost.
        self.rings.add()


class _Follower:
    """Connect to the leader, and hear it.

    Args:
        hosts: Where to try, in this order.
        place: What to find there.
    """

    def __init__(self, hosts: Sequence[str], place: BellPlace) -> None:
        self.rings, self.connections = _Rings(), _Connections()
        self._hosts, self._place = tuple(hosts), place
        self._waker = _Waker()

    @property
    def is_heard(self) -> bool:
        return len(self.connections) == 1

    def run(self) -> None:
        connection = self._connected()
        if connection is not None:
            self._hear(connection)
        self._waker.let_go()

    def end(self) -> None:
        self._waker.wake()

    def let_go(self) -> None:
        self.connections.let_go()
        self._waker.let_go()

    def _connected(self) -> socket.socket | None:
        for host in self._hosts:
            # What is no name of a host at all is no OSError.
            with contextlib.suppress(OSError, UnicodeError), contextlib.ExitStack() as closing:
                connection = socket.create_connection((host, self._place.port), timeout=_CONNECT_S)
                closing.enter_context(connection)
                if self._is_answered(connection):
                    closing.pop_all()
                    return connection
        _log.info("this rank looks for messages now and then, for it does not reach the bell of rank 0")
        return None

    def _is_answered(self, connection: socket.socket) -> bool:
        connection.sendall(self._place.greeting.encode("ascii"), _QUIETLY)
        heard = b""
        while len(heard) < len(self._place.answer):
            more = connection.recv(_READ_BYTES)
            if not more:
                return False
            heard += more
        return heard.startswith(self._place.answer.encode("ascii"))

    def _hear(self, connection: socket.socket) -> None:
        number = connection.fileno()
        self.connections.add(connection)
        self.rings.add()
        poll = select.poll()
        for one in (connection, self._waker.other):
            poll.register(one, select.POLLIN)
        with contextlib.suppress(OSError):
            while self._waker.other.fileno() not in dict(poll.poll()) and connection.recv(_READ_BYTES):
                self.rings.add()
        self.connections.drop(number)
        # Who waits looks more often from now on, and what was rung may be lost.
        self.rings.add()


def _listening() -> socket.socket:
    if socket.has_dualstack_ipv6():
        door = socket.create_server(("", 0), family=socket.AF_INET6, dualstack_ipv6=True, backlog=MOST_RANKS)
    else:
        door = socket.create_server(("", 0), backlog=MOST_RANKS)
    door.setblocking(False)
    return door


def _let_go(side: Callable[[], _Leader | _Follower | None]) -> None:
    """Close in a child that was forked off what is its parent's."""
    found = side()
    if found is not None:
        found.rings.renew()
        found.connections.renew()
        found.let_go()
