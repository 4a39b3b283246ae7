"""What the system says of the memory at an address."""

from __future__ import annotations

from pathlib import Path

import numpy
import pytest


def address_of(memory: memoryview) -> int:
    """Return where memory begins."""
    return numpy.frombuffer(memory, dtype=numpy.uint8).ctypes.data


def flags_at(address: int) -> set[str]:
    """Return the flags of the mapping that holds an address: ``hg`` for huge pages, ``wf`` for wiped in children."""
    smaps, huge = Path("/proc/self/smaps"), Path("/sys/kernel/mm/transparent_hugepage")
    if not smaps.exists() or not huge.exists():
        pytest.skip("this system tells nothing of mappings, or has no huge pages")
    is_inside = False
    for line in smaps.read_text(encoding="utf-8").splitlines():
        first = line.split()[0]
        if first == "VmFlags:" and is_inside:
            return set(line.split()[1:])
        if not first.endswith(":"):
            begin, end = (int(part, 16) for part in first.split("-"))
            is_inside = begin <= address < end
    raise AssertionError(f"nothing lies at {address:x}")
