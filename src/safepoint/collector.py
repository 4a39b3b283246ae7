"""The interpreter's collector of cycles, held still for a while.

What a save or a restore makes is kept to its end, and there is a good deal of it: a collection finds nothing of it, and
in a process that has torch in memory it takes a tenth of a second or more.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def collector_at_rest() -> Iterator[None]:
    """Have no cycles collected within the block; a collector that was off before stays so."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()
