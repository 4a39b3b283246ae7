"""The digest of an item that several ranks stored: a sum of shares, whoever stored what."""

from __future__ import annotations

import msgspec
import pytest
import xxhash

from safepoint.format.index import Chunk, Tensor
from safepoint.format.state_digest import add_digests, joint_digest, rank_share

TREE = {"lr": {"$float": "0x1p-3"}}


def box(name: str, offset: int, digest: str) -> Tensor:
    chunk = Chunk((0, 2), 0, 4096, 8, digest * 32)
    return Tensor("model", name, "float32", (4,), (offset,), (2,), (chunk,))


BOXES = [box("a", 0, "1"), box("a", 2, "2"), box("b", 0, "3"), box("b", 2, "4")]


def share(*boxes: Tensor, tree: tuple[object] | None = None, rank: int | None = None) -> str:
    return rank_share(tree, boxes, tree_of=rank, boxes_of=rank)


def test_it_does_not_depend_on_which_rank_stored_what() -> None:
    """Spec: F7.5"""
    divided = [share(*BOXES[:2], tree=(TREE,)), share(*BOXES[2:])]
    otherwise = [share(BOXES[3]), share(BOXES[2], BOXES[0]), share(BOXES[1], tree=(TREE,))]
    assert joint_digest("module", divided) == joint_digest("module", otherwise[::-1])


@pytest.mark.parametrize(
    "other",
    [
        ("optimizer", [share(*BOXES, tree=(TREE,))]),
        ("module", [share(*BOXES, tree=({},))]),
        ("module", [share(*BOXES)]),
        ("module", [share(*BOXES[:3], tree=(TREE,))]),
        ("module", [share(*BOXES[:3], box("b", 2, "5"), tree=(TREE,))]),
        ("module", [share(*BOXES[:3], box("c", 2, "4"), tree=(TREE,))]),
        ("module", [share(*BOXES, tree=(TREE,), rank=0)]),
    ],
    ids=["type", "tree", "no tree", "box lost", "bytes", "name", "rank"],
)
def test_it_tells_every_difference(other: tuple[str, list[str]]) -> None:
    """Spec: F7.5"""
    assert joint_digest(*other) != joint_digest("module", [share(*BOXES, tree=(TREE,))])


def test_states_of_two_ranks_that_are_exchanged_are_another_state() -> None:
    here = [share(BOXES[0], tree=(1,), rank=0), share(BOXES[1], tree=(2,), rank=1)]
    there = [share(BOXES[1], tree=(2,), rank=0), share(BOXES[0], tree=(1,), rank=1)]
    assert joint_digest("stateful", here) != joint_digest("stateful", there)


def test_it_is_what_the_specification_says() -> None:
    """Spec: F7.5"""
    lines = [[None, TREE], [None, "a", "float32", [4], [0], [2], ["1" * 32]]]
    total = sum(xxhash.xxh3_128_intdigest(msgspec.json.encode(line)) for line in lines) % 2**128
    expected = xxhash.xxh3_128_hexdigest(f"module\n{total:032x}".encode())
    assert joint_digest("module", [share(BOXES[0]), share(tree=(TREE,))]) == expected


def test_sums_wrap_and_keep_their_length() -> None:
    assert add_digests([]) == "0" * 32
    assert add_digests(["f" * 32, "0" * 31 + "2"]) == "0" * 31 + "1"
