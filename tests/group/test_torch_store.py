"""The board in a store of torch's: parts, keys that are deleted, clients that end, and servers that are not ours."""

from __future__ import annotations

import gc
import threading
import time
from datetime import timedelta
from typing import Any

import pytest
import torch.distributed as dist

from safepoint.ambient import SystemAmbient
from safepoint.errors import InternalError, LeaderLostError, RequestError
from safepoint.group import torch_store
from safepoint.group.board_group import BoardGroup
from safepoint.group.torch_store import PART_BYTES, Place, TorchStoreBoard, open_group, serve
from tests.group.boards import at_once, groups_of
from tests.group.exchanges import pattern

LIMIT_S = 30.0
MIB = 1 << 20
# An address that no host has; a name that is none may take the resolver long.
NOWHERE = "0.0.0.1"


@pytest.fixture
def board() -> TorchStoreBoard:
    return serve(("127.0.0.1",), ambient=SystemAmbient())


def client_of(board: TorchStoreBoard) -> Any:
    return dist.TCPStore(
        "127.0.0.1", board.place.port, None, False, timeout=timedelta(seconds=10), wait_for_workers=False
    )


@pytest.mark.parametrize(
    ("size", "part_count"), [(0, 0), (PART_BYTES, 0), (PART_BYTES + 1, 2), (3 * PART_BYTES, 3), (3 * PART_BYTES + 1, 4)]
)
def test_no_value_is_longer_than_one_mib(board: TorchStoreBoard, size: int, part_count: int) -> None:
    other, client = TorchStoreBoard(board.place), client_of(board)
    own_keys = client.num_keys()
    post_surely(other, "a", pattern(size, 1))
    keys = [f"{board.place.namespace}/a", *(f"{board.place.namespace}/a#{number}" for number in range(part_count))]
    assert client.num_keys() == own_keys + len(keys)
    assert max(len(client.get(key)) for key in keys) <= MIB
    assert board.take(["a", "absent"], limit_s=LIMIT_S) == {"a": pattern(size, 1)}
    assert client.num_keys() == own_keys


def test_a_message_without_its_head_is_not_there(board: TorchStoreBoard) -> None:
    other, client = TorchStoreBoard(board.place), client_of(board)
    post_surely(other, "a", pattern(2 * MIB, 1))
    client.delete_key(f"{board.place.namespace}/a")
    assert board.look("a", limit_s=LIMIT_S) is None


def test_settled_generations_leave_no_key(board: TorchStoreBoard) -> None:
    """Also those of a message in parts, and of a rank that voted when all was over."""
    groups, client = groups_of(board, 3, grace_s=1.0), client_of(board)
    own_keys = client.num_keys()

    def save(group: BoardGroup, generation: str) -> None:
        group.spread(f"{generation}/plan", None if group.rank else bytes(3 * MIB), deadline_s=LIMIT_S)
        group.gather(f"{generation}/ballot", bytes(2 * MIB), deadline_s=LIMIT_S)
        group.spread(f"{generation}/verdict", None if group.rank else b"committed", deadline_s=LIMIT_S)

    def run(group: BoardGroup) -> None:
        for number in range(3):
            save(group, f"g{number}")
        group.settle("g0")
        group.settle("g1")

    at_once([lambda group=group: run(group) for group in groups])
    # Of the last one: the plan with its parts, the closing word, the verdict.
    assert client.num_keys() - own_keys == 1 + len(range(0, 3 * MIB + len("g2/plan/word") + 1, PART_BYTES)) + 2
    groups[0].settle("g2")
    assert board.look("g2/verdict/word", limit_s=LIMIT_S) is None
    assert client.num_keys() == own_keys


def test_a_message_over_the_limit_is_refused(board: TorchStoreBoard, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch_store, "MESSAGE_LIMIT_BYTES", 10)
    board.post("a", bytes(10), limit_s=LIMIT_S)
    with pytest.raises(InternalError):
        board.post("a", bytes(11), limit_s=LIMIT_S)


def test_the_store_of_another_job_at_the_same_port_is_not_ours(board: TorchStoreBoard) -> None:
    stranger = TorchStoreBoard(Place(("127.0.0.1",), board.place.port, "0000"))
    with pytest.raises(LeaderLostError, match="serves another store"):
        stranger.look("a", limit_s=LIMIT_S)


def test_the_hosts_are_tried_in_their_order_until_one_is_ours(
    board: TorchStoreBoard, monkeypatch: pytest.MonkeyPatch
) -> None:
    connect = torch_store._tcp_store

    def connected(host: str, port: int, *, is_server: bool, wait_s: float) -> Any:
        return connect(host, port, is_server=is_server, wait_s=0.5 if host == NOWHERE else wait_s)

    monkeypatch.setattr(torch_store, "_tcp_store", connected)
    place = Place((NOWHERE, "127.0.0.1"), board.place.port, board.place.namespace)
    post_surely(board, "a", b"x")
    assert TorchStoreBoard(place).look("a", limit_s=LIMIT_S) == b"x"


def test_a_board_that_is_closed_is_lost_to_all(board: TorchStoreBoard) -> None:
    other = TorchStoreBoard(board.place)
    other.post("a", b"x", limit_s=LIMIT_S)
    board.close()
    board.close()
    for one in (board, other):
        with pytest.raises(LeaderLostError, match=r"the store of rank 0 cannot be reached \[127\.0\.0\.1, port \d+\]"):
            one.look("a", limit_s=LIMIT_S)


def test_the_client_of_a_thread_ends_with_it(board: TorchStoreBoard) -> None:
    before = store_threads()
    at_once([lambda: board.post("a", b"x", limit_s=LIMIT_S)] * 5)
    for _ in range(1_000):
        gc.collect()
        if store_threads() <= before:
            return
        time.sleep(0.01)
    raise AssertionError("clients outlive their threads")


def test_a_group_needs_an_initialised_process_group() -> None:
    with pytest.raises(RequestError, match="not initialised"):
        open_group(ambient=SystemAmbient())


def post_surely(board: TorchStoreBoard, key: str, message: bytes) -> None:
    """Post a message, and wait until the server has it: a store's `set` does not, but its client keeps the order."""
    board.post(key, message, limit_s=LIMIT_S)
    assert board.look(key, limit_s=LIMIT_S) == message


def store_threads() -> set[threading.Thread]:
    return {thread for thread in threading.enumerate() if thread.name == "safepoint-store"}
