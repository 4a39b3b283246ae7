"""Damage a checkpoint on purpose, from outside, as a disk or a hasty person does."""

from __future__ import annotations

from pathlib import Path

from safepoint.errors import NotFoundError
from safepoint.format.names import GENERATIONS, MANIFEST, data_name


def newest_generation(run: Path, *, step: int | None = None) -> Path:
    """Return the folder of a run's newest generation, or of the newest one of a step.

    Raises:
        NotFoundError: There is none.
    """
    # Names of generations begin with the step in twelve digits, so their order is that of the steps.
    found = sorted((run / GENERATIONS).glob("step-*" if step is None else f"step-{step:012d}-*"))
    if not found:
        raise NotFoundError("there is no generation to damage", where=str(run), found=f"step {step}")
    return found[-1]


def data_file(generation: Path) -> Path:
    """Return the file that holds the tensors of a run of one process."""
    return generation / data_name(0, 1)


def flip_bit(path: Path, offset_bytes: int) -> None:
    """Turn over the lowest bit of one byte; the file keeps its size and its time of change means nothing."""
    data = bytearray(path.read_bytes())
    data[offset_bytes] ^= 1
    path.write_bytes(data)


def remove(path: Path) -> None:
    """Delete a file."""
    path.unlink()


def empty(path: Path) -> None:
    """Leave a file of no bytes, as a full disk or a power cut does."""
    path.write_bytes(b"")


def manifest_file(generation: Path) -> Path:
    """Return the file whose existence makes the generation a checkpoint."""
    return generation / MANIFEST
