"""Bells over sockets, and whoever calls one."""

from __future__ import annotations

import socket
from collections.abc import Callable, Sequence

from safepoint.ambient import SystemAmbient
from safepoint.group.bell import Bell
from safepoint.group.socket_bell import BellPlace, reach_bell, serve_bell

LIMIT_S = 60.0
HERE = ("127.0.0.1",)
RANKS = 4


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
