"""Checking: the digest of each chunk of a run, taken as its bytes arrive.

Spec: C11.
"""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import CancelledError

from safepoint.errors import CorruptionError, InternalError
from safepoint.format.digest import digest_bytes, running_digest
from safepoint.format.index import Chunk, Tensor
from safepoint.restoring.plan import ChunkRead, TensorRead
from safepoint.restoring.runs import Batch, Run
from safepoint.restoring.workers import Workers


def check_run(run: Run, batch: Batch, pieces: Iterator[tuple[int, memoryview]], workers: Workers) -> int:
    """Digest pieces as they arrive, compare each chunk of the run, and return their size.

    Raises:
        CorruptionError: A chunk's bytes contradict its digest.
        CancelledError: The workers are stopped.
    """
    state, arrived_bytes, matched = running_digest(), 0, 0
    for part, piece in pieces:
        if workers.is_stopped:
            raise CancelledError
        number, chunk = run.parts[part]
        if len(piece) == chunk.size_bytes:
            check_chunk(digest_bytes(piece), chunk, batch.tensors[number], chunk.path)
            matched += 1
            continue
        state.update(piece)
        arrived_bytes += len(piece)
        if arrived_bytes == chunk.size_bytes:
            check_chunk(state.hexdigest(), chunk, batch.tensors[number], chunk.path)
            state.reset()
            arrived_bytes, matched = 0, matched + 1
    if matched != len(run.parts):
        raise InternalError("not all of a run was checked", where=run.path, expected=len(run.parts), found=matched)
    return sum(chunk.size_bytes for _, chunk in run.parts)


def check_chunk(found: str, chunk: ChunkRead | Chunk, tensor: TensorRead | Tensor, path: str) -> None:
    """Compare the digest that was found of a chunk with its own.

    Raises:
        CorruptionError: They differ; names file, tensor and rows.
    """
    if found != chunk.digest:
        raise CorruptionError(
            "stored bytes of a tensor are damaged",
            where=f"{path}: {tensor.item}/{tensor.name}, rows {chunk.rows[0]} to {chunk.rows[1]}",
            expected=f"digest {chunk.digest}",
            found=found,
        )
