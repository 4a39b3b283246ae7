"""Plan: which byte ranges of which files fill which targets. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from safepoint.errors import InternalError
from safepoint.restoring.validate import SavedState
from safepoint.state.item import ShardedTarget, Target, TensorTarget


@dataclass(frozen=True, slots=True)
class ChunkRead:
    """Name one chunk: where it lies, and which bytes of its target it fills (half-open, from `begin`)."""

    path: str
    offset_bytes: int
    size_bytes: int
    begin: int
    rows: tuple[int, int]
    digest: str


@dataclass(frozen=True, slots=True)
class TensorRead:
    """Name all chunks of one tensor, in the order of its bytes."""

    item: str
    name: str
    target: Target
    chunks: tuple[ChunkRead, ...]


def plan_reads(saved: SavedState, targets: Mapping[str, Mapping[str, TensorTarget]]) -> tuple[TensorRead, ...]:
    """Return what to read, in the order in which it lies on disk.

    Args:
        targets: For each item, its targets by tensor name; tensors without a target are not read.
    """
    reads = []
    for item, by_name in targets.items():
        for name, target in by_name.items():
            tensor = saved.tensors.get((item, name))
            if tensor is None:
                raise InternalError("an item asks for a tensor that is not stored", where=f"{item}/{name}")
            if isinstance(target, ShardedTarget):
                raise InternalError("a tensor that is held in parts has no plan", where=f"{item}/{name}")
            begin, chunks = 0, []
            for chunk in tensor.chunks:
                path = saved.object_path(chunk.object)
                chunks.append(ChunkRead(path, chunk.offset_bytes, chunk.size_bytes, begin, chunk.rows, chunk.digest))
                begin += chunk.size_bytes
            if begin != target.nbytes:
                raise InternalError(
                    "a target has another size than its tensor",
                    where=f"{item}/{name}",
                    expected=begin,
                    found=target.nbytes,
                )
            reads.append(TensorRead(item, name, target, tuple(chunks)))
    reads.sort(key=lambda read: [(chunk.path, chunk.offset_bytes) for chunk in read.chunks[:1]])
    return tuple(reads)
