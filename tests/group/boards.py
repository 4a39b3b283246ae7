"""Groups of threads over any board, for the tests of this folder."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any

from safepoint.ambient import SystemAmbient
from safepoint.group.base import Group
from safepoint.group.bell import Bell
from safepoint.group.board_group import BoardGroup
from safepoint.group.socket_bell import reach_bell, serve_bell
from safepoint.group.solo import SoloGroup
from safepoint.group.torch_store import TorchStoreBoard, serve
from safepoint.testing.ranks import RankThreads

WAIT_S = 60.0


def on_solo(act: Callable[[Group], Any]) -> list[Any]:
    return [act(SoloGroup())]


def on_threads(act: Callable[[Group], Any]) -> list[Any]:
    return [outcome.returned() for outcome in RankThreads(4).run(lambda rank: act(rank.group))]


def on_store(act: Callable[[Group], Any]) -> list[Any]:
    board = serve(("127.0.0.1",), ambient=SystemAmbient())
    return [value for value in at_once([lambda g=group: act(g) for group in groups_of(board, 3)])]


def on_store_with_bell(act: Callable[[Group], Any]) -> list[Any]:
    ambient = SystemAmbient()
    board = serve(("127.0.0.1",), ambient=ambient)
    bell, place = serve_bell(3, ambient=ambient)
    bells = [bell, *(reach_bell(("127.0.0.1",), place, ambient=ambient) for _ in range(2))]
    try:
        return at_once([lambda g=group: act(g) for group in groups_of(board, 3, bells=bells)])
    finally:
        for one in bells:
            one.close()


def groups_of(
    board: TorchStoreBoard, world_size: int, grace_s: float = 5.0, bells: Sequence[Bell | None] = ()
) -> list[BoardGroup]:
    boards = [board] + [TorchStoreBoard(board.place) for _ in range(1, world_size)]
    return [
        BoardGroup(one, rank=rank, world_size=world_size, ambient=SystemAmbient(), grace_s=grace_s, bell=bell)
        for rank, (one, bell) in enumerate(zip(boards, bells or [None] * world_size, strict=True))
    ]


def at_once(calls: list[Callable[[], Any]]) -> list[Any]:
    """Run all calls in threads; return what they returned, or raise what the first of them raised."""
    outcomes: list[Any] = [None] * len(calls)
    errors: list[BaseException] = []

    def run(number: int) -> None:
        try:
            outcomes[number] = calls[number]()
        except BaseException as exc:  # noqa: BLE001 (the top of a thread: handed to the caller)
            errors.append(exc)

    threads = [threading.Thread(target=run, args=(number,), daemon=True) for number in range(len(calls))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(WAIT_S)
    if errors:
        raise errors[0]
    assert not any(thread.is_alive() for thread in threads)
    return outcomes
