"""Ahead: have the system begin to read a data file while it is found out whether and where its bytes belong.

1. Bytes come into the system's cache of files and nowhere else. Nothing is decided by them, and no failure is told: the
   reading that follows meets the same one.
2. It ends when the reading begins, and goes no further than `_MOST_BYTES`, for the cache's room is not ours alone.
3. What is wanted first, to find out, comes before the file: behind it, it would wait for the disk.

Spec: C11.1.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from contextlib import AbstractContextManager, closing, nullcontext, suppress
from types import TracebackType

from safepoint.catalog import list_generations
from safepoint.errors import SafepointError
from safepoint.format.manifest import Manifest
from safepoint.format.names import data_name, generation_path, index_name
from safepoint.storage.base import Storage
from safepoint.storage.reading import Foreseeing

# As much as a disk reads while a thousand tensors are planned.
_MOST_BYTES = 512 << 20
# What is asked for at a time: large enough that the interpreter is seldom needed, small enough to end soon.
_STEP_BYTES = 16 << 20
_PATIENCE_S = 1.0


class Ahead:
    """Read one file ahead, in a thread that ends with the block; a storage that offers no way to is left alone.

    Args:
        storage: Where the run lies.
        path: The file; it need not be there. Empty for none.
        before: Small files that are wanted before it.
    """

    def __init__(self, storage: Storage, path: str, *, before: Sequence[str] = ()) -> None:
        self.path = path
        self._before = tuple(before)
        self._storage = storage
        self._is_over = threading.Event()
        self._asked_bytes = 0
        self._thread: threading.Thread | None = None

    def __enter__(self) -> Ahead:
        if self.path and isinstance(self._storage, Foreseeing):
            thread = threading.Thread(target=self._ask, args=(self._storage,), name="safepoint-ahead", daemon=True)
            # At a limit of the system nothing is read ahead, and all is restored.
            with suppress(RuntimeError):
                thread.start()
                self._thread = thread
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._is_over.set()
        if self._thread is not None:
            # What went wrong is not to wait for a disk that may hang.
            self._thread.join(None if error is None else _PATIENCE_S)

    def end(self) -> dict[str, int]:
        """Ask for no more, and return up to which byte the file was asked for, by its path."""
        self._is_over.set()
        return {self.path: self._asked_bytes}

    def _ask(self, storage: Foreseeing) -> None:
        # Whoever reads a file is told what went wrong with it.
        with suppress(SafepointError):
            for path in (*self._before, self.path):
                if not self._ask_for(storage, path):
                    return

    def _ask_for(self, storage: Foreseeing, path: str) -> bool:
        """Ask for one file, step by step, and return whether there is reason to ask for more."""
        with closing(storage.foresee(path, _STEP_BYTES)) as steps:
            for end_bytes in steps:
                if self._is_over.is_set() or end_bytes > _MOST_BYTES:
                    return False
                # A step under way counts as well: to read its bytes a second time would take longer.
                self._asked_bytes = end_bytes if path == self.path else 0
        return True


def likely_ahead(storage: Storage) -> Ahead:
    """Return what reads ahead the file that a restore of one process will most likely read, and its index before it.

    They are those of the newest generation, whatever that turns out to be.
    """
    names = []
    # Whoever looks for a checkpoint is told.
    with suppress(SafepointError):
        names = list_generations(storage)[:1] if isinstance(storage, Foreseeing) else []
    if not names:
        return Ahead(storage, "")
    index, data = (generation_path(str(names[0]), name) for name in (index_name(0, 1), data_name(0, 1)))
    return Ahead(storage, data, before=[index])


def own_file(manifest: Manifest, rank: int) -> str:
    """Return the data file that a rank reads most of, if it is there and the ranks are the same."""
    return generation_path(manifest.generation, data_name(rank, max(manifest.world_size, rank + 1)))


def reading_ahead(storage: Storage, path: str, *, begun: Ahead | None) -> AbstractContextManager[Ahead]:
    """Return what reads a file ahead: what was begun with it before it was known to be the one, or else another one."""
    if begun is not None and begun.path == path:
        return nullcontext(begun)
    if begun is not None:
        begun.end()
    return Ahead(storage, path)
