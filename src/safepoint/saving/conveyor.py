"""The conveyor: pieces of a file are written in a thread of its own while the next ones are made.

1. Pieces are written in the order in which they were put, by one thread, and so the storage sees one writer.
2. The first failure, on whichever side, is final: nothing more is written, and it is raised where the pieces are put.
3. When the block is left, no piece is on its way and the thread has ended; the writer is finished or abandoned.
"""

from __future__ import annotations

import queue
import threading
from types import TracebackType

from safepoint.storage.base import ObjectWriter


class Conveyor:
    """Write one object; to be used in a ``with`` block, which ends with the object durable or with an error.

    Args:
        writer: What writes it. No one else may use it.
        depth: How many pieces may be on their way, the one that is being written among them. Their memory must stay as
            it is. With 0 each piece is written before `put` returns.
    """

    def __init__(self, writer: ObjectWriter, *, depth: int) -> None:
        self._writer = writer
        self._error: BaseException | None = None
        self._waiting: queue.Queue[memoryview | None] = queue.Queue(max(1, depth - 1))
        self._thread = self._start() if depth else None

    def put(self, piece: memoryview) -> None:
        """Let a piece be written; wait for room.

        Raises:
            StorageError: This piece or one before it could not be written.
        """
        self._raise_failure()
        if self._thread is None:
            self._writer.write(piece)
        else:
            self._waiting.put(piece)

    def __enter__(self) -> Conveyor:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        is_durable = False
        self._error = self._error or error
        try:
            self._join()
            self._raise_failure()
            self._writer.finish()
            is_durable = True
        finally:
            # Closed under a thread that still writes, its descriptor might be that of another file by then.
            if not is_durable and not (self._thread is not None and self._thread.is_alive()):
                self._writer.abandon()

    def _start(self) -> threading.Thread | None:
        thread = threading.Thread(target=self._run, name="safepoint-write", daemon=True)
        try:
            thread.start()
        except RuntimeError:
            # At a limit of the system, or at the end of the interpreter, a save in flight completes all the same.
            return None
        return thread

    def _run(self) -> None:
        while (piece := self._waiting.get()) is not None:
            if self._error is not None:
                # Whoever puts must never wait for room that nobody makes.
                continue
            try:
                self._writer.write(piece)
            except BaseException as exc:  # noqa: BLE001 (the top of a thread hands everything on)
                self._error = exc

    def _join(self) -> None:
        if self._thread is not None:
            self._waiting.put(None)
            self._thread.join()

    def _raise_failure(self) -> None:
        if self._error is not None:
            raise self._error
