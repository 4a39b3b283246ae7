"""Ahead: have the system begin to read a data file while it is found out whether and where its bytes belong.

1. Bytes come into the system's cache of files and nowhere else. Nothing is decided by them, and no failure is told: the
   reading that follows meets the same one.
2. It ends when the reading begins, and goes no further than `_MOST_BYTES`, for the cache's room is not ours alone.

Spec: C11.1.
"""

from __future__ import annotations

import contextlib
import threading
from types import TracebackType

from safepoint.errors import SafepointError
from safepoint.storage.base import Storage
from safepoint.storage.reading import Foreseeing

# As much as a disk reads while a thousand tensors are planned.
_MOST_BYTES = 512 << 20
# What is asked for at a time: large enough that the interpreter is seldom needed, small enough to end soon.
_STEP_BYTES = 16 << 20


class Ahead:
    """Read one file ahead, in a thread that ends with the block; a storage that offers no way to is left alone.

    Args:
        storage: Where the run lies.
        path: The file; it need not be there.
    """

    def __init__(self, storage: Storage, path: str) -> None:
        self._storage = storage
        self._path = path
        self._is_over = threading.Event()
        self._asked_bytes = 0
        self._thread: threading.Thread | None = None

    def __enter__(self) -> Ahead:
        if isinstance(self._storage, Foreseeing):
            thread = threading.Thread(target=self._ask, args=(self._storage,), name="safepoint-ahead", daemon=True)
            # At a limit of the system nothing is read ahead, and all is restored.
            with contextlib.suppress(RuntimeError):
                thread.start()
                self._thread = thread
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._is_over.set()
        if self._thread is not None:
            self._thread.join()

    def end(self) -> dict[str, int]:
        """Ask for no more, and return up to which byte the file was asked for, by its path."""
        self._is_over.set()
        return {self._path: self._asked_bytes}

    def _ask(self, storage: Foreseeing) -> None:
        try:
            for begin in range(0, _MOST_BYTES, _STEP_BYTES):
                if self._is_over.is_set() or not storage.foresee(self._path, begin, _STEP_BYTES):
                    return
                self._asked_bytes = begin + _STEP_BYTES
        except SafepointError:
            # Whoever reads the file is told.
            return
