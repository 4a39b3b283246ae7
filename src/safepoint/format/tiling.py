"""The proof that boxes make tensors whole, for many tensors and boxes at a time, in columns of numbers.

Boxes of one tensor do not overlap if, along one axis, any two of them begin and end alike or lie apart, and if those
that begin and end alike do not overlap along the other axes. The boxes of a grid, or of rows of a grid, are of that
kind. Where boxes are not, each is compared with its neighbours by itself.

Spec: C5.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy
import numpy.typing

from safepoint.format.extent import MAX_BYTES, Box, Shape, check_tiling

Column = numpy.typing.NDArray[numpy.int64]


def check_tilings(wholes: Sequence[tuple[str, Shape]], tensors: Column, offsets: Column, shapes: Column) -> None:
    """Prove that boxes cover each of some tensors exactly: inside, without overlap, without a gap.

    Boxes without elements take part in nothing.

    Args:
        wholes: Where each tensor belongs, for messages, and its shape; all have the same number of axes.
        tensors: For each box the number of its tensor in `wholes`.
        offsets: For each axis the offsets of all boxes.
        shapes: For each axis the lengths of all boxes.

    Raises:
        CorruptionError: They do not; names the first tensor at fault and its first box, as `check_tiling` does.

    Spec: C5.
    """
    axes = range(len(offsets))
    whole = numpy.array([shape for _, shape in wholes], numpy.int64).reshape(len(wholes), len(axes)).T
    is_filled = (shapes > 0).all(axis=0)
    if not is_filled.all():
        # A length below zero belongs to no box; those are left to the look at single ones.
        is_filled |= (shapes < 0).any(axis=0)
        tensors, offsets, shapes = tensors[is_filled], offsets[:, is_filled], shapes[:, is_filled]
    # Beyond this the number of elements would not fit into its word.
    in_doubt = numpy.maximum(whole, 1).astype(float).prod(axis=0) > MAX_BYTES
    for axis in axes:
        is_outside = (offsets[axis] < 0) | (shapes[axis] < 0) | (offsets[axis] > whole[axis][tensors] - shapes[axis])
        in_doubt[tensors[is_outside]] = True
    covered = numpy.zeros(len(wholes), numpy.int64)
    numpy.add.at(covered, tensors, shapes.prod(axis=0))
    in_doubt |= covered != whole.prod(axis=0)
    suspects = _meeting(tensors, offsets, shapes, axes)
    if len(suspects):
        is_suspect = numpy.isin(tensors, suspects)
        suspects = _meeting(tensors[is_suspect], offsets[:, is_suspect], shapes[:, is_suspect], axes[::-1])
    in_doubt[suspects] = True
    for number in numpy.flatnonzero(in_doubt).tolist():
        where, shape = wholes[number]
        own = tensors == number
        pairs = zip(offsets[:, own].T.tolist(), shapes[:, own].T.tolist(), strict=True)
        check_tiling(shape, [Box(tuple(offset), tuple(length)) for offset, length in pairs], where=where)


def _meeting(tensors: Column, offsets: Column, shapes: Column, axes: Sequence[int]) -> Column:
    """Return the tensors of which boxes meet, as far as looking along one axis after another can tell."""
    keys = [key for axis in axes for key in (offsets[axis], shapes[axis])]
    order = numpy.lexsort((*reversed(keys), tensors))
    tensors = tensors[order]
    # Whether a box and the next one begin and end alike along all axes so far.
    is_alike = tensors[1:] == tensors[:-1]
    meets = numpy.zeros(len(is_alike), numpy.bool_)
    for axis in axes:
        begin = offsets[axis][order]
        end = begin + shapes[axis][order]
        is_same = (begin[1:] == begin[:-1]) & (end[1:] == end[:-1])
        meets |= is_alike & ~is_same & (begin[1:] < end[:-1])
        is_alike &= is_same
    return numpy.unique(tensors[1:][meets | is_alike])
