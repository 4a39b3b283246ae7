"""Transfer: move and compare memory by address, with the interpreter let go meanwhile.

Between two `memoryview`s an assignment or a comparison holds the interpreter up, and with it every other thread.
"""

from __future__ import annotations

import ctypes
import sys
from collections import deque
from typing import Any

import numpy
import numpy.typing

from safepoint.saving.spans import Integers

# Below this size, asking for a faster copy costs more than the copy.
_SMALL_BYTES = 64 << 10
# Up to this size, pieces of one size are copied faster all at once, although twice, ...
_TINY_BYTES = 1 << 10
# ... if they are more than a few.
_FEW = 8

# Memory of no length in particular.
_Memory = ctypes.c_char * sys.maxsize

move = ctypes.memmove
"""Copy so many bytes from one address to another."""


def address_of(view: memoryview) -> int:
    """Return where writable memory begins."""
    # Of the first byte alone: a type of arrays of each size would have to be made, which takes longer than the rest.
    return ctypes.addressof(ctypes.c_char.from_buffer(view)) if len(view) else 0


def transfer(target: memoryview, source: memoryview) -> None:
    """Copy memory of the same size."""
    if len(source) < _SMALL_BYTES or source.readonly:
        target[:] = source
    else:
        move(address_of(target), address_of(source), len(source))


def move_all(targets: Integers, sources: Integers, sizes: Integers) -> None:
    """Copy pieces of memory that are too small to let the interpreter go for each.

    Args:
        targets: The address of each where it shall be; they do not overlap.
        sources: The address of each where it is.
        sizes: The size of each in bytes; none is 0.
    """
    columns = (targets, sources, sizes)
    tiny = sizes[sizes <= _TINY_BYTES]
    if len(tiny) > _FEW:
        is_alone = numpy.ones(len(sizes), numpy.bool_)
        for size in numpy.flatnonzero(numpy.bincount(tiny) > _FEW).tolist():
            chosen = sizes == size
            is_alone &= ~chosen
            there, here = targets[chosen], sources[chosen]
            _pieces(there, size)[there - there.min()] = _pieces(here, size)[here - here.min()]
        columns = (targets[is_alone], sources[is_alone], sizes[is_alone])
    deque(map(_move_held, *(column.tolist() for column in columns)), maxlen=0)


def read_all(sources: Integers, size_bytes: int) -> bytes:
    """Return so many bytes from each address, one after the other."""
    return _pieces(sources, size_bytes)[sources - sources.min()].tobytes() if len(sources) else b""


def is_same(one: int, other: int, size_bytes: int) -> bool:
    """Return whether so many bytes at two addresses are equal."""
    return bool(_compare(one, other, size_bytes) == 0)


_Comparison = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t)
_compare = _Comparison(("memcmp", ctypes.CDLL(None)))


def _pieces(addresses: Integers, size_bytes: int) -> numpy.typing.NDArray[numpy.void]:
    """Return memory as an array of pieces of one size that begin at every byte from the lowest address to the highest.

    Only the pieces that begin at these addresses may be touched.
    """
    first = int(addresses.min())
    count = int(addresses.max()) - first + 1
    memory: Any = _Memory.from_address(first)
    return numpy.ndarray((count,), f"V{size_bytes}", memory, strides=(1,))


_Move = ctypes.PYFUNCTYPE(None, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t)
_move_held = _Move(("memmove", ctypes.CDLL(None)))
