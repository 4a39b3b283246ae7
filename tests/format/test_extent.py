"""Boxes and rows, compared with a picture: a numpy array in which every box paints its cells."""

from __future__ import annotations

import math

import numpy
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from safepoint.errors import CorruptionError
from safepoint.format.extent import Box, check_shape, check_tiling, split_rows

SHAPES = st.lists(st.integers(0, 4), max_size=3).map(tuple)


@st.composite
def boxes(draw: st.DrawFn, shape: tuple[int, ...]) -> Box:
    """Return a box that may reach out of the shape by one."""
    offset = tuple(draw(st.integers(0, length)) for length in shape)
    extent = tuple(draw(st.integers(0, length - start + 1)) for length, start in zip(shape, offset, strict=True))
    return Box(offset, extent)


@st.composite
def cuts(draw: st.DrawFn) -> tuple[tuple[int, ...], list[Box]]:
    """Return a shape with boxes that tile it, made by cutting along one axis after another."""
    shape = draw(st.lists(st.integers(1, 5), min_size=1, max_size=3).map(tuple))
    parts = [Box((0,) * len(shape), shape)]
    for _ in range(draw(st.integers(0, 5))):
        box = parts.pop(draw(st.integers(0, len(parts) - 1)))
        axis = draw(st.integers(0, len(shape) - 1))
        first = draw(st.integers(0, box.shape[axis]))
        for start, length in ((0, first), (first, box.shape[axis] - first)):
            offset, extent = list(box.offset), list(box.shape)
            offset[axis] += start
            extent[axis] = length
            parts.append(Box(tuple(offset), tuple(extent)))
    return shape, draw(st.permutations(parts))


def is_painted_once(shape: tuple[int, ...], parts: list[Box]) -> bool:
    canvas = numpy.zeros(tuple(length + 2 for length in shape), dtype=int)
    for box in parts:
        canvas[tuple(slice(o, o + n) for o, n in zip(box.offset, box.shape, strict=True))] += 1
    inside = canvas[tuple(slice(0, length) for length in shape)]
    return bool((inside == 1).all()) and canvas.sum() == inside.sum()


def is_tiling(shape: tuple[int, ...], parts: list[Box]) -> bool:
    try:
        check_tiling(shape, parts, where="model/w")
    except CorruptionError as exc:
        assert exc.where == "model/w"
        return False
    return True


@settings(max_examples=400)
@given(SHAPES.flatmap(lambda shape: st.tuples(st.just(shape), st.lists(boxes(shape), max_size=4))))
def test_boxes_tile_a_tensor_exactly_when_each_cell_is_painted_once(case: tuple[tuple[int, ...], list[Box]]) -> None:
    """Spec: C5.1"""
    assert is_tiling(*case) == is_painted_once(*case)


@settings(max_examples=200)
@given(cuts())
def test_pieces_of_a_tensor_tile_it_and_no_longer_when_one_is_lost_or_doubled(
    case: tuple[tuple[int, ...], list[Box]],
) -> None:
    """Spec: C5.1"""
    shape, parts = case
    assert is_tiling(shape, parts)
    for number, part in enumerate(parts):
        is_empty = math.prod(part.shape) == 0
        assert is_tiling(shape, parts[:number] + parts[number + 1 :]) == is_empty
        assert is_tiling(shape, [*parts, part]) == is_empty


@pytest.mark.parametrize(
    "box",
    [Box((0,), (2, 1)), Box((0, 0), (2,)), Box((0, 0, 0), (1, 1, 1)), Box((-1, 0), (2, 1)), Box((0, 0), (-1, -1))],
)
def test_a_box_with_other_axes_or_below_zero_is_outside(box: Box) -> None:
    assert not is_tiling((2, 1), [box])


@given(st.lists(st.integers(0, 9), max_size=3).map(tuple), st.sampled_from([1, 2, 4, 16]), st.integers(1, 200))
def test_rows_are_cut_in_order_into_pieces_below_the_limit(shape: tuple[int, ...], item: int, limit: int) -> None:
    rows = split_rows(shape, item, limit_bytes=limit)
    elements = math.prod(shape)
    count = (shape[0] if shape else 1) if elements else 0
    assert [row for start, stop in rows for row in range(start, stop)] == list(range(count))
    row_bytes = elements // count * item if count else 0
    assert all((stop - start) * row_bytes <= limit or stop - start == 1 for start, stop in rows)


@pytest.mark.timeout(20)
@pytest.mark.parametrize(
    "shape",
    [
        (2**60,),
        (2**31, 2**31),
        (0, 2**61),
        (0, 2**40, 2**40),
        (1,) * 65,
        (2**62,) * 1_000_000,
        (-1, -1),
    ],
    ids=lambda shape: f"{len(shape)} axes of {shape[0]}",
)
def test_a_shape_beyond_all_bounds_is_refused_in_little_work(shape: tuple[int, ...]) -> None:
    """Spec: F3.6"""
    with pytest.raises(CorruptionError) as caught:
        check_shape(shape, 4, where="model/w")
    assert len(str(caught.value)) < 1000


@pytest.mark.parametrize(("shape", "size"), [((), 4), ((0,), 0), ((3, 0, 2), 0), ((2**56,), 2**58), ((1,) * 64, 4)])
def test_a_shape_within_the_bounds_has_its_size(shape: tuple[int, ...], size: int) -> None:
    assert check_shape(shape, 4, where="model/w") == size
