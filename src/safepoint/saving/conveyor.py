"""The conveyor: pieces of a file are written in threads of its own while the next ones are made.

1. Pieces are begun in the order in which they were put. Where the storage takes parts in any order, two are under way
   at a time: a disk that is handed the next piece only once it has written the last one waits in between.
2. A piece that a thread is free for is begun before `put` returns: a thread that does not let go of the interpreter
   keeps it from the others for 5 ms and more, and the storage would have nothing to do meanwhile.
3. The first failure, on whichever side, is final: nothing more is begun, and it is raised where the pieces are put.
4. When the block is left, no piece is on its way and the threads have ended; the writer is finished or abandoned.
"""

from __future__ import annotations

import queue
import threading
from collections import deque
from dataclasses import dataclass, field
from types import TracebackType

from safepoint.storage.base import ObjectWriter, Placing

_MOST_THREADS = 2


@dataclass(frozen=True, slots=True)
class _Piece:
    memory: memoryview
    offset_bytes: int
    is_begun: threading.Event = field(default_factory=threading.Event)
    is_left: threading.Event = field(default_factory=threading.Event)


class Conveyor:
    """Write one object; to be used in a ``with`` block, which ends with the object durable or with an error.

    Args:
        writer: What writes it. No one else may use it.
        depth: How many pieces may be on their way, those that are being written among them. Their memory must stay as
            it is. With 0 each piece is written before `put` returns.
    """

    def __init__(self, writer: ObjectWriter, *, depth: int) -> None:
        self._writer, self._depth = writer, depth
        self._error: BaseException | None = None
        self._end_bytes = 0
        self._waiting: queue.SimpleQueue[_Piece | None] = queue.SimpleQueue()
        self._under_way: deque[_Piece] = deque()
        self._threads: list[threading.Thread] = []
        if not depth:
            return
        try:
            self._threads = self._started(min(depth, _MOST_THREADS if isinstance(writer, Placing) else 1))
        except BaseException:
            # An interrupt came while a thread was started, which may run: it finds nothing to write.
            for _ in range(_MOST_THREADS):
                self._waiting.put(None)
            writer.abandon()
            raise

    def put(self, piece: memoryview) -> None:
        """Let a piece be written; wait for room.

        Raises:
            StorageError: This piece or one before it could not be written.
        """
        self._raise_failure()
        if not self._depth:
            self._writer.write(piece)
            return
        placed = _Piece(piece, self._end_bytes)
        self._end_bytes += len(piece)
        if not self._threads:
            self._write(placed)
            return
        self._waiting.put(placed)
        self._under_way.append(placed)
        if sum(not one.is_left.is_set() for one in self._under_way) <= len(self._threads):
            placed.is_begun.wait()
        while len(self._under_way) > self._depth:
            self._under_way.popleft().is_left.wait()

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
            if not is_durable and not any(thread.is_alive() for thread in self._threads):
                self._writer.abandon()

    def _started(self, count: int) -> list[threading.Thread]:
        threads: list[threading.Thread] = []
        for _ in range(count):
            thread = threading.Thread(target=self._run, name="safepoint-write", daemon=True)
            try:
                thread.start()
            except RuntimeError:
                # At a limit of the system, or at the end of the interpreter, a save in flight completes all the same.
                break
            threads.append(thread)
        return threads

    def _run(self) -> None:
        while (piece := self._waiting.get()) is not None:
            piece.is_begun.set()
            try:
                # Whoever puts must never wait for room that nobody makes.
                if self._error is None:
                    self._write(piece)
            except BaseException as exc:  # noqa: BLE001 (the top of a thread hands everything on)
                self._error = self._error or exc
            finally:
                piece.is_left.set()

    def _write(self, piece: _Piece) -> None:
        if isinstance(self._writer, Placing):
            self._writer.write_at(piece.memory, piece.offset_bytes)
        else:
            self._writer.write(piece.memory)

    def _join(self) -> None:
        for _ in self._threads:
            self._waiting.put(None)
        for thread in self._threads:
            thread.join()

    def _raise_failure(self) -> None:
        if self._error is not None:
            raise self._error
