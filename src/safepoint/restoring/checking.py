"""Checking: the digest of each chunk of a run, taken as its bytes arrive.

Spec: C11.
"""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import CancelledError

from safepoint.errors import CorruptionError, InternalError
from safepoint.format.digest import digest_bytes, running_digest
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
            _compare(digest_bytes(piece), batch.tensors[number], chunk)
            matched += 1
            continue
        state.update(piece)
        arrived_bytes += len(piece)
        if arrived_bytes == chunk.size_bytes:
            _compare(state.hexdigest(), batch.tensors[number], chunk)
            state.reset()
            arrived_bytes, matched = 0, matched + 1
    if matched != len(run.parts):
        raise InternalError("not all of a run was checked", where=run.path, expected=len(run.parts), found=matched)
    return sum(chunk.size_bytes for _, chunk in run.parts)


def _compare(found: str, tensor: TensorRead, chunk: ChunkRead) -> None:
    if found != chunk.digest:
        raise CorruptionError(
            "stored bytes of a tensor are damaged",
            where=f"{chunk.path}: {tensor.item}/{tensor.name}, rows {chunk.rows[0]} to {chunk.rows[1]}",
            expected=f"digest {chunk.digest}",
            found=found,
        )
