"""Whatever a record says, decoding it ends with a value or with an error of our own."""

from __future__ import annotations

import copy
import random
from collections.abc import Iterator
from typing import Any

import pytest

from safepoint.contract import judge
from safepoint.errors import CorruptionError, FormatVersionError
from safepoint.format.encoding import unseal
from safepoint.format.index import decode_index
from safepoint.format.manifest import decode_manifest
from safepoint.format.plain import decode_plain, encode_plain
from safepoint.format.records import ResumedRecord, check_resumed
from tests.format.examples import LIMIT, example
from tests.format.sealing import sealed_tree, tree_of

ROUNDS = 3000

POISON: list[Any] = [
    None,
    True,
    0,
    -1,
    1,
    2**31,
    10**15,
    2**63 - 1,
    2**63,
    10**40,
    0.5,
    1e300,
    "",
    "..",
    "../../etc/passwd",
    "/etc/passwd",
    "a" * 100_000,
    "\0",
    "nan",
    "0x1.8p+0",
    "f" * 32,
    "step-000000000007-i000001-0badcafe",
    "step-999999999999-i999999-ffffffff",
    "rank-00000-of-00001.safetensors",
    "rank-99999-of-99999.json",
    [],
    [[]],
    [1] * 100,
    [2**62] * 70,
    {},
    {"$float": "0x1p"},
    {"$tuple": [{"$same": 0}]},
    {"$dict": [[[], 1]]},
    {"$numpy": ["O", ""]},
    {"a": {"b": {"c": []}}},
]

PLAIN = encode_plain({"a": (1.5, {2}, b"x", -(2**70), complex(1, 2)), "b": [None, {3: "x"}], "c": {"lr": 0.1}})


@pytest.fixture
def records() -> dict[str, bytes]:
    case = example(plain={"model": PLAIN})
    resumed = case.storage.read("incarnations/000001.resumed.json", limit_bytes=LIMIT)
    return {"index": case.index, "manifest": case.manifest, "resumed": resumed, "generation": case.generation.encode()}


def test_a_record_with_hostile_fields_ends_in_a_value_or_a_typed_error(
    records: dict[str, bytes], chance: random.Random
) -> None:
    """Spec: F2.7"""
    generation = records["generation"].decode()
    outcomes = {"value": 0, "error": 0}
    for number in range(ROUNDS):
        kind = ("index", "manifest", "resumed")[number % 3]
        tree = tree_of(records[kind])
        for _ in range(chance.choice((1, 1, 2, 4))):
            poison(tree, chance)
        try:
            decode(kind, sealed_tree(tree), generation)
            outcomes["value"] += 1
        except (CorruptionError, FormatVersionError) as exc:
            assert len(str(exc)) < 5000, "a message must not repeat a hostile text at length"
            outcomes["error"] += 1
    assert min(outcomes.values()) > ROUNDS // 100, f"the damage is too one-sided to show anything: {outcomes}"


def test_a_hostile_plain_value_ends_in_a_value_or_a_typed_error(chance: random.Random) -> None:
    """Spec: F2.7"""
    for _ in range(ROUNDS):
        tree = {"plain": copy.deepcopy(PLAIN)}
        for _ in range(chance.choice((1, 2, 4))):
            poison(tree, chance)
        try:
            decode_plain(tree.get("plain"), where="x")
        except CorruptionError as exc:
            assert len(str(exc)) < 5000


def test_random_bytes_end_in_a_typed_error(chance: random.Random) -> None:
    """Spec: F2.7"""
    for _ in range(300):
        data = chance.randbytes(chance.randrange(200))
        with pytest.raises(CorruptionError):
            decode_index(data, where="x")


def decode(kind: str, data: bytes, generation: str) -> None:
    if kind == "manifest":
        found = decode_manifest(data, where="x", generation=generation)
        judge(found.conditions, found.conditions)
    elif kind == "index":
        for item in decode_index(data, where="x").items.values():
            decode_plain(item.plain, where="x")
    else:
        check_resumed(unseal(data, ResumedRecord, where="x"), where="x")


def poison(tree: dict[str, Any], chance: random.Random) -> None:
    """Replace, add, remove or double one part of a tree."""
    places = list(_places(tree))
    if not places:
        return
    owner, key = chance.choice(places)
    how = chance.randrange(4)
    if how == 0:
        del owner[key]
    elif how == 1 and isinstance(owner, list):
        owner.append(copy.deepcopy(owner[key]))
    elif how == 1:
        owner[chance.choice(["extra", "$float", "../x", "", "ä"])] = copy.deepcopy(owner[key])
    else:
        owner[key] = copy.deepcopy(chance.choice(POISON))


def _places(tree: Any) -> Iterator[tuple[Any, Any]]:
    keys = range(len(tree)) if isinstance(tree, list) else list(tree) if isinstance(tree, dict) else ()
    for key in keys:
        yield tree, key
        yield from _places(tree[key])
