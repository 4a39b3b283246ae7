"""The bell: who rings is heard, and nothing that goes wrong with it costs more than time."""

from __future__ import annotations

import socket
import subprocess
import sys

import pytest

from safepoint.ambient import SystemAmbient
from safepoint.group import socket_bell
from safepoint.group.bell import Bell, NoBell
from safepoint.group.board_group import BoardGroup
from safepoint.group.socket_bell import BellPlace, serve_bell
from safepoint.testing.ranks import MemoryBoard, SharedMessages
from tests.group.bells import HERE, LIMIT_S, all_connected, becomes, reached, says, served
from tests.group.boards import at_once


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


def test_a_host_whose_name_is_none_is_passed_over(bells: list[Bell]) -> None:
    leader, place = served(bells, 2)
    follower = reached(bells, place, ("a" * 64, "of..nobody", *HERE))
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


def test_who_waits_looks_when_a_connection_ends_for_what_was_rung_may_be_lost(bells: list[Bell]) -> None:
    leader, *followers = all_connected(bells)
    count = leader.count
    followers[0].close()
    leader.wait(count, LIMIT_S)
    assert leader.count > count
    counts = [one.count for one in followers]
    leader.close()
    for one, before in zip(followers[1:], counts[1:], strict=True):
        one.wait(before, LIMIT_S)
        assert one.count > before


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

def end_in_child():
    elsewhere = threading.Thread(target=lambda: (leader.ring(), leader.wait(leader.count, 0.01)), daemon=True)
    elsewhere.start()
    elsewhere.join(20)
    os.write(writer, b"stuck " if elsewhere.is_alive() else b"")
    # What a child that outlives its parent would hold open; its own end must not end the parent's.
    leader.close()
    follower.close()
    held = [one for one in os.listdir("/proc/self/fd") if os.path.exists(f"/proc/self/fd/{one}")]
    held = [one for one in held if os.readlink(f"/proc/self/fd/{one}").startswith("socket:")]
    os.write(writer, b"%d" % len(held))
    os._exit(0)

# Taken, as when another thread rings and is rung meanwhile.
with leader._side.connections._lock, leader._side.rings._condition:
    child = os.fork()
    if child == 0:
        end_in_child()
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


BROKEN = """
import signal, socket
from safepoint.ambient import SystemAmbient
from safepoint.group.socket_bell import serve_bell

signal.signal(signal.SIGPIPE, signal.SIG_DFL)
leader, place = serve_bell(3, ambient=SystemAmbient())
ranks = [socket.create_connection(("127.0.0.1", place.port)) for _ in range(2)]
for one in ranks:
    one.sendall(place.greeting.encode())
while not leader.is_heard:
    leader.wait(leader.count, 0.01)
for held in leader._side.connections._held.values():
    held.shutdown(socket.SHUT_WR)
leader.ring()
print("goes on")
"""


def test_a_connection_that_is_gone_does_not_end_who_rings_by_a_signal() -> None:
    ended = subprocess.run([sys.executable, "-c", BROKEN], text=True, capture_output=True, timeout=LIMIT_S, check=False)
    assert (ended.returncode, ended.stdout) == (0, "goes on\n"), ended.stderr
