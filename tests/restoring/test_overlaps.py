"""Which boxes overlap, compared with a look at every pair."""

from __future__ import annotations

import itertools
import random
from collections import Counter

import numpy
import pytest

from safepoint.format.chunks import frame_of
from safepoint.format.columns import Columns, HeldTensor, columns_from
from safepoint.format.extent import Box, element_count
from safepoint.restoring import overlaps
from safepoint.restoring.boxes import overlap
from safepoint.restoring.overlaps import find_overlaps
from tests.restoring.tiles import cut

Named = tuple[str, Box]

SHAPES = {"a": (7, 5), "b": (6,), "c": (), "d": (4, 3, 2), "e": (9, 1)}


def columns(boxes: list[Named], name: str) -> Columns:
    held = tuple(HeldTensor("model", tensor, "uint8", SHAPES[tensor]) for tensor, _ in boxes)
    offsets = [start for _, box in boxes for start in box.offset]
    lengths = [length for _, box in boxes for length in box.shape]
    found = columns_from(frame_of(held, {}), numpy.array([offsets, lengths], numpy.int64))
    return Columns(found.frame, found.table, name)


def random_boxes(chance: random.Random) -> list[Named]:
    """Return boxes that may overlap, some of them empty."""
    found = []
    for name, shape in SHAPES.items():
        for _ in range(chance.randrange(3)):
            offset = tuple(chance.randrange(length) for length in shape)
            lengths = tuple(chance.randint(0, whole - start) for start, whole in zip(offset, shape, strict=True))
            found.append((name, Box(offset, lengths)))
    return found


def numbered(layouts: list[list[Named]]) -> list[tuple[tuple[int, int], Named]]:
    """Return all boxes with their layout and place."""
    return [((layout, place), box) for layout, boxes in enumerate(layouts) for place, box in enumerate(boxes)]


def common(one: Named, other: Named) -> int:
    """Return how many elements two boxes have in common."""
    if one[0] != other[0] or not element_count(one[1].shape) or not element_count(other[1].shape):
        return 0
    found = overlap(one[1], other[1])
    return 0 if found is None else element_count(found.shape)


@pytest.mark.parametrize("at_once", [1, 1 << 20])
def test_pairs_are_those_that_a_look_at_every_pair_finds(
    at_once: int, chance: random.Random, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(overlaps, "_PAIRS_AT_ONCE", at_once)
    for _ in range(60):
        layouts: list[list[Named]] = [[] for _ in range(3)]
        for name, shape in SHAPES.items():
            tiles = cut(shape, chance.randint(1, 6), chance) if shape else [Box((), ())]
            for box in tiles:
                layouts[chance.randrange(3)].append((name, box))
        others = [random_boxes(chance) for _ in range(2)]
        pairs = itertools.product(numbered(layouts), numbered(others))
        expected = Counter((*one[0], *other[0], count) for one, other in pairs if (count := common(one[1], other[1])))
        found: Counter[tuple[int, ...]] = Counter()
        stored = [columns(boxes, f"stored {number}") for number, boxes in enumerate(layouts)]
        asked = [columns(boxes, f"asked {number}") for number, boxes in enumerate(others)]
        for one in find_overlaps(stored, asked, frozenset()):
            rows = zip(one.layouts, one.places, one.others, one.other_places, one.counts, strict=True)
            found.update(tuple(map(int, row)) for row in rows)
        assert found == expected


def test_items_that_are_left_out_are_in_no_pair() -> None:
    one, other = (columns([("b", Box((0,), (6,)))], name) for name in ("one", "other"))
    assert [len(found.places) for found in find_overlaps([one], [other], frozenset())] == [1]
    assert list(find_overlaps([one], [other], frozenset({"model"}))) == []
