"""Read: fill the targets, checking each chunk's digest over the memory that it arrived in.

Spec: C11.
"""

from __future__ import annotations

from collections.abc import Sequence

from safepoint.errors import CorruptionError
from safepoint.format.digest import digest_bytes
from safepoint.restoring.boxes import copy_overlap
from safepoint.restoring.plan import ChunkRead, TensorRead, largest_piece
from safepoint.storage.base import Storage

# What a box of a tensor holds: by item, tensor name, offset and shape.
BoxKey = tuple[str, str, tuple[int, ...], tuple[int, ...]]


def read(storage: Storage, reads: Sequence[TensorRead], *, filled: dict[BoxKey, str] | None = None) -> int:
    """Fill all targets and return the number of bytes read and checked.

    A target whose bytes do not match is never committed; targets that were filled before it hold new bytes, so the
    caller must restore something else over them, or give the live objects up. Beside the targets' own memory there is
    one buffer of the largest chunk that is needed in part.

    Args:
        storage: Where the run lies.
        reads: The plan.
        filled: Takes the digest of each target's bytes, if given; they are read once more for it.

    Raises:
        CorruptionError: A chunk's bytes contradict its digest; names file, tensor, rows, expected and found.

    Spec: C11.
    """
    total = 0
    buffer = memoryview(bytearray(largest_piece(reads)))
    for tensor in reads:
        memories = [one.target.memory() for one in tensor.targets]
        for chunk in tensor.chunks:
            if chunk.begin is not None:
                _fetch(storage, tensor, chunk, memories[chunk.feeds[0]][chunk.begin : chunk.begin + chunk.size_bytes])
            else:
                piece = buffer[: chunk.size_bytes]
                _fetch(storage, tensor, chunk, piece)
                for number in chunk.feeds:
                    box = tensor.targets[number].box
                    copy_overlap(piece, chunk.box, memories[number], box, tensor.element_bytes)
            total += chunk.size_bytes
        for one, memory in zip(tensor.targets, memories, strict=True):
            if filled is not None:
                filled[tensor.item, tensor.name, one.box.offset, one.box.shape] = digest_bytes(memory)
            one.target.commit()
    return total


def _fetch(storage: Storage, tensor: TensorRead, chunk: ChunkRead, memory: memoryview) -> None:
    storage.read_into(chunk.path, chunk.offset_bytes, memory)
    found = digest_bytes(memory)
    if found != chunk.digest:
        raise CorruptionError(
            "stored bytes of a tensor are damaged",
            where=f"{chunk.path}: {tensor.item}/{tensor.name}, rows {chunk.rows[0]} to {chunk.rows[1]}",
            expected=f"digest {chunk.digest}",
            found=found,
        )
