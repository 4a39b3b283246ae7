"""Read: fill the targets, checking each chunk's digest over the memory that it arrived in.

Spec: C11.
"""

from __future__ import annotations

from collections.abc import Sequence

from safepoint.errors import CorruptionError
from safepoint.format.digest import digest_bytes
from safepoint.restoring.plan import TensorRead
from safepoint.storage.base import Storage


def read(storage: Storage, reads: Sequence[TensorRead]) -> int:
    """Fill all targets and return the number of bytes read and checked.

    A target whose bytes do not match is never committed; targets that were filled before it hold new bytes, so the
    caller must restore something else over them, or give the live objects up.

    Raises:
        CorruptionError: A chunk's bytes contradict its digest; names file, tensor, rows, expected and found.

    Spec: C11.
    """
    total = 0
    for tensor in reads:
        memory = tensor.target.memory()
        for chunk in tensor.chunks:
            part = memory[chunk.begin : chunk.begin + chunk.size_bytes]
            storage.read_into(chunk.path, chunk.offset_bytes, part)
            found = digest_bytes(part)
            if found != chunk.digest:
                raise CorruptionError(
                    "stored bytes of a tensor are damaged",
                    where=f"{chunk.path}: {tensor.item}/{tensor.name}, rows {chunk.rows[0]} to {chunk.rows[1]}",
                    expected=f"digest {chunk.digest}",
                    found=found,
                )
            total += chunk.size_bytes
        tensor.target.commit()
    return total
