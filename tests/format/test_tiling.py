"""The proof over columns, compared with a picture of each tensor in which every box paints its cells."""

from __future__ import annotations

import random

import numpy
import pytest

from safepoint.errors import CorruptionError
from safepoint.format.extent import Box
from safepoint.format.tiling import check_tilings
from tests.restoring.tiles import cut

Case = tuple[tuple[int, ...], list[Box]]


def is_painted_once(shape: tuple[int, ...], boxes: list[Box]) -> bool:
    """Return whether boxes that reach at most one out of a shape paint each of its cells once, and no other."""
    canvas = numpy.zeros([length + 2 for length in shape], dtype=int)
    for box in boxes:
        canvas[tuple(slice(o, o + n) for o, n in zip(box.offset, box.shape, strict=True))] += 1
    inside = canvas[tuple(slice(0, length) for length in shape)]
    return bool((inside == 1).all()) and canvas.sum() == inside.sum()


def prove(cases: list[Case], axes: int) -> None:
    """Prove the boxes of several tensors at once, in a random order."""
    rows = [(number, *box.offset, *box.shape) for number, (_, boxes) in enumerate(cases) for box in boxes]
    random.Random(len(rows)).shuffle(rows)
    table = numpy.array(rows, dtype=numpy.int64).reshape(len(rows), 1 + 2 * axes)
    wholes = [(f"t{number}", shape) for number, (shape, _) in enumerate(cases)]
    check_tilings(wholes, table[:, 0], table[:, 1 : 1 + axes].T, table[:, 1 + axes :].T)


def grid(shape: tuple[int, ...], chance: random.Random) -> list[Box]:
    """Cut every axis as sharding over a mesh does: in parts of one length, the last ones shorter or empty."""
    boxes = [Box((), ())]
    for length in shape:
        parts = chance.randint(1, 4)
        size = -(-length // parts)
        starts = [min(part * size, length) for part in range(parts)]
        boxes = [
            Box((*box.offset, start), (*box.shape, min(size, length - start))) for box in boxes for start in starts
        ]
    return boxes


def strided(shape: tuple[int, ...], chance: random.Random) -> list[Box]:
    """Cut the first axis in parts, and each of them again: what lies on one rank is not in one run."""
    outer, inner = chance.randint(1, 3), chance.randint(1, 3)
    bounds = [shape[0] * n // (outer * inner) for n in range(outer * inner + 1)]
    boxes = [
        Box((bounds[n], *(0 for _ in shape[1:])), (bounds[n + 1] - bounds[n], *shape[1:])) for n in range(outer * inner)
    ]
    return [boxes[column + row * inner] for column in range(inner) for row in range(outer)]


def spoilt(boxes: list[Box], shape: tuple[int, ...], chance: random.Random) -> list[Box]:
    """Lose, double, move, lengthen or shorten one box."""
    number = chance.randrange(len(boxes))
    box, rest = boxes[number], boxes[:number] + boxes[number + 1 :]
    kind = chance.randrange(4)
    if kind == 0 or not shape:
        return rest
    if kind == 1:
        return [*boxes, box]
    axis = chance.randrange(len(shape))
    offset, lengths = list(box.offset), list(box.shape)
    if kind == 2:
        offset[axis] += 1 if offset[axis] + lengths[axis] <= shape[axis] else -1
    else:
        lengths[axis] += 1 if not lengths[axis] or chance.random() < 0.5 else -1
    return [*rest, Box(tuple(offset), tuple(lengths))]


@pytest.mark.parametrize("seed", range(60))
def test_boxes_tile_exactly_when_each_cell_is_painted_once(seed: int) -> None:
    """Spec: C5.1"""
    print(f"seed {seed}")
    chance = random.Random(seed)
    axes = seed % 4
    cases: list[Case] = []
    for _ in range(chance.randint(1, 6)):
        shape = tuple(chance.randint(0 if chance.random() < 0.1 else 1, 6) for _ in range(axes))
        kinds = [grid, strided, lambda shape, chance: cut(shape, chance.randint(1, 8), chance)] if shape else [grid]
        cases.append((shape, chance.choice(kinds)(shape, chance)))
    assert all(is_painted_once(*case) for case in cases)
    prove(cases, axes)
    for number, (shape, boxes) in enumerate(cases):
        broken = spoilt(boxes, shape, chance)
        changed = [*cases[:number], (shape, broken), *cases[number + 1 :]]
        if is_painted_once(shape, broken):
            prove(changed, axes)
            continue
        with pytest.raises(CorruptionError) as caught:
            prove(changed, axes)
        assert caught.value.where == f"t{number}"


def test_random_boxes_tile_exactly_when_each_cell_is_painted_once() -> None:
    """Most of these have overlaps and gaps of one size, so that the number of elements alone says nothing.

    Spec: C5.1
    """
    chance = random.Random(5)
    outcomes = set()
    for _ in range(600):
        shape = tuple(chance.randint(1, 3) for _ in range(chance.randint(1, 3)))
        boxes = []
        left = numpy.prod(shape)
        while left > 0 and len(boxes) < 9:
            offset = tuple(chance.randrange(length) for length in shape)
            lengths = tuple(chance.randint(0, whole - start) for start, whole in zip(offset, shape, strict=True))
            if numpy.prod(lengths) <= left:
                boxes.append(Box(offset, lengths))
                left -= numpy.prod(lengths)
        expected = is_painted_once(shape, boxes)
        outcomes.add(expected)
        try:
            prove([(shape, boxes)], len(shape))
            assert expected
        except CorruptionError:
            assert not expected
    assert outcomes == {True, False}


def test_columns_of_which_each_is_cut_at_other_rows_are_whole() -> None:
    columns = [
        Box((row, column), (rows, 2))
        for column, cuts in ((0, (0, 3, 7)), (2, (0, 5, 7)), (4, (0, 1, 7)))
        for row, rows in ((cuts[0], cuts[1]), (cuts[1], cuts[2] - cuts[1]))
    ]
    pinwheel = [Box((0, 0), (1, 2)), Box((0, 2), (2, 1)), Box((2, 1), (1, 2)), Box((1, 0), (2, 1)), Box((1, 1), (1, 1))]
    prove([((7, 6), columns), ((3, 3), pinwheel)], 2)
    with pytest.raises(CorruptionError, match="overlap"):
        prove([((7, 6), [*columns[:-1], Box((0, 4), (6, 2))])], 2)


def test_so_many_elements_that_their_number_would_not_fit_are_no_gap_and_no_overlap() -> None:
    long = (1 << 31, 1 << 32)
    prove([(long, [Box((0, 0), (1 << 30, 1 << 32)), Box((1 << 30, 0), (1 << 30, 1 << 32))])], 2)
    with pytest.raises(CorruptionError, match="gap"):
        prove([(long, [])], 2)
