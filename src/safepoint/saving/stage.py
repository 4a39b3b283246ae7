"""Stage: copy the state into memory of our own, laid out as the data file will lie on disk.

1. After this phase nothing of the checkpoint refers to live memory.
2. One buffer serves all saves of a manager: it grows to the largest file and is used again.

Spec: F3.
"""

from __future__ import annotations

import mmap
from collections.abc import Sequence

from safepoint.saving.form import ALIGNMENT_BYTES, FileForm
from safepoint.state.item import Source

# Below this size, asking for a faster copy costs more than the copy.
_SMALL_BYTES = 64 << 10


class StagingBuffer:
    """Keep page-aligned memory that grows to what is asked for and is reused; owned by one save at a time."""

    def __init__(self) -> None:
        self._memory: mmap.mmap | None = None

    def view(self, size_bytes: int) -> memoryview:
        """Return writable memory of this size; its former content is void."""
        if self._memory is None or len(self._memory) < size_bytes:
            # The smaller one is let go first, so that there are never two.
            self._memory = None
            self._memory = mmap.mmap(-1, max(size_bytes, ALIGNMENT_BYTES))
        return memoryview(self._memory)[:size_bytes]


class ImageOrigin:
    """Give the bytes of a data file from its image in memory.

    Args:
        image: The whole file; it must stay as it is until the file is written.
        piece_bytes: How much is written at once.
    """

    depth = 2

    def __init__(self, image: memoryview, *, piece_bytes: int) -> None:
        self.piece_bytes = piece_bytes
        self._image = image

    def piece(self, begin: int, end: int) -> memoryview:
        """Return a part of the image."""
        return self._image[begin:end]

    def fill(self, view: memoryview) -> None:
        """Do nothing: the bytes are there."""


def stage(form: FileForm, sources: Sequence[Source], buffer: StagingBuffer) -> memoryview:
    """Return the image of a data file.

    Args:
        form: What the file looks like.
        sources: Where its boxes come from, in the order in which the form was given them; they are read here.
        buffer: Where to copy to; it must not be used until the image is done with.

    Raises:
        TornSnapshotError: A tensor was written to since the boundary.
    """
    image = buffer.view(form.size_bytes)
    image[: len(form.header)] = form.header
    for entry in form.entries:
        end = entry.offset_bytes + entry.size_bytes
        _copy(sources[entry.number], image[entry.offset_bytes : end])
    return image


def _copy(source: Source, room: memoryview) -> None:
    memory = source.in_place() if len(room) <= _SMALL_BYTES else None
    if memory is None:
        source.copy_into(room)
    else:
        room[:] = memory
        source.check()
