"""Transfer: move and compare memory by address, with the interpreter let go meanwhile.

Between two `memoryview`s an assignment or a comparison holds the interpreter up, and with it every other thread.
"""

from __future__ import annotations

import ctypes

# Below this size, asking for a faster copy costs more than the copy.
_SMALL_BYTES = 64 << 10

move = ctypes.memmove
"""Copy so many bytes from one address to another."""


def address_of(view: memoryview) -> int:
    """Return where writable memory begins."""
    return ctypes.addressof((ctypes.c_char * len(view)).from_buffer(view)) if len(view) else 0


def transfer(target: memoryview, source: memoryview) -> None:
    """Copy memory of the same size."""
    if len(source) < _SMALL_BYTES or source.readonly:
        target[:] = source
    else:
        move(address_of(target), address_of(source), len(source))


def is_same(one: int, other: int, size_bytes: int) -> bool:
    """Return whether so many bytes at two addresses are equal."""
    return bool(_compare(one, other, size_bytes) == 0)


_Comparison = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t)
_compare = _Comparison(("memcmp", ctypes.CDLL(None)))
