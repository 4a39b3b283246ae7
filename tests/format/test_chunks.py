"""What columns find sound is sound box by box, and gives back what it was made of."""

from __future__ import annotations

import copy
import random
from typing import Any

import pytest

from safepoint.errors import CorruptionError
from safepoint.format.chunks import IndexReader, are_boxes_sound
from safepoint.format.index import Index, decode_index
from safepoint.storage.memory import MemoryStorage
from tests.build import Values, begin, write_generation
from tests.format.examples import example
from tests.format.sealing import sealed_tree, tree_of
from tests.format.test_hostile import poison
from tests.format.test_index import CHANGES, SOUND_ALONE


def many_boxes() -> dict[str, Any]:
    """Return an index with boxes of no, one, two and three axes, some of them in several chunks and some empty."""
    storage = MemoryStorage()
    named = {
        "rows": Values("float32", (5, 2), bytes(range(40)), (9, 2), (4, 0), rows=2),
        "cube": Values("uint8", (2, 3, 2), bytes(range(12)), (2, 3, 4), (0, 0, 2)),
        "none": Values("float32", (0, 3), b"", (0, 3), (0, 0)),
        "one": Values("int64", (), bytes(range(8))),
        "line": Values("float64", (3,), bytes(range(24)), rows=1),
    }
    generation = write_generation(storage, 1, chain=begin(storage), ranks=[{"model": named}, {}])
    return tree_of(storage.read(f"generations/{generation}/rank-00000-of-00002.json", limit_bytes=1 << 20))


def outcome(tree: dict[str, Any], *, at_once: bool) -> str:
    """Return how decoding ends, with boxes looked at at once or one by one."""
    looks = are_boxes_sound if at_once else lambda index: False
    try:
        decode_index(sealed_tree(tree), where="x", are_boxes_sound=looks)
    except CorruptionError as exc:
        return str(exc)
    return "sound"


@pytest.mark.parametrize("name", sorted(CHANGES.keys() - SOUND_ALONE))
def test_what_contradicts_itself_is_refused_with_the_same_words(name: str) -> None:
    """Spec: F3.6, F3.8, F3.9, F3.10"""
    tree = tree_of(example().index)
    CHANGES[name](tree)
    assert outcome(tree, at_once=True) == outcome(copy.deepcopy(tree), at_once=False) != "sound"


def test_boxes_that_are_sound_need_no_second_look() -> None:
    seen: list[Index] = []

    def looks(index: Index) -> bool:
        seen.append(index)
        return are_boxes_sound(index)

    for tree in (tree_of(example().index), many_boxes()):
        decode_index(sealed_tree(tree), where="x", are_boxes_sound=looks)
    assert len(seen) == 2 and all(map(are_boxes_sound, seen))


@pytest.mark.parametrize("rounds", [600, pytest.param(20_000, marks=[pytest.mark.soak, pytest.mark.timeout(0)])])
def test_nothing_is_found_sound_at_once_that_is_not_sound_one_by_one(chance: random.Random, rounds: int) -> None:
    """Spec: F2.7, F3.6, F3.8, F3.9"""
    outcomes = []
    for number in range(rounds):
        tree = many_boxes() if number % 2 else tree_of(example().index)
        for _ in range(chance.choice((1, 1, 2))):
            poison(tree["tensors"] if chance.random() < 0.8 else tree, chance)
        found = outcome(tree, at_once=True)
        assert found == outcome(tree, at_once=False)
        outcomes.append(found)
    assert rounds // 300 < outcomes.count("sound") < rounds * 2 // 3


@pytest.mark.parametrize("tree", [tree_of(example().index), many_boxes()], ids=["two boxes", "many boxes"])
def test_columns_give_back_the_boxes_that_they_were_made_of(tree: dict[str, Any]) -> None:
    index = decode_index(sealed_tree(tree), where="x")
    columns = IndexReader().columns_of(index)
    assert tuple(columns.tensor(number) for number in range(len(index.tensors))) == index.tensors
    some = list(range(len(index.tensors)))[::-2]
    assert [columns.only(some).tensor(number) for number in range(len(some))] == [index.tensors[n] for n in some]
