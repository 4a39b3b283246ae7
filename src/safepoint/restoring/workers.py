"""A few threads that carry out tasks which leave the interpreter to each other: reading, copying, digesting.

1. The first failure stops all: what has not begun never begins, what is under way looks at `is_stopped`.
2. Who waits for any task is given that first failure.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor
from types import TracebackType
from typing import TypeVar

Result = TypeVar("Result")


class Workers:
    """Carry out tasks, on threads of their own or, with a count of 0, at once by who starts them.

    A context manager: leaving it waits for the tasks under way, and with an error it stops them.
    """

    def __init__(self, count: int) -> None:
        self._pool = ThreadPoolExecutor(count, thread_name_prefix="safepoint-read") if count else None
        self._stopped = threading.Event()
        self._failures: list[BaseException] = []

    def __enter__(self) -> Workers:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if error is not None:
            self._stopped.set()
        if self._pool is not None:
            self._pool.shutdown(cancel_futures=True)

    @property
    def is_stopped(self) -> bool:
        """Return whether the result of a task under way will not be looked at."""
        return self._stopped.is_set()

    def start(self, task: Callable[[], Result]) -> Future[Result]:
        """Begin a task, or put it behind those that are waiting."""
        if self._pool is not None:
            return self._pool.submit(self._carry_out, task)
        done: Future[Result] = Future()
        done.set_result(task())
        return done

    def result_of(self, task: Future[Result]) -> Result:
        """Wait for a task and return its result.

        Raises:
            BaseException: The first error that ended any task.
        """
        error = task.exception()
        if error is not None:
            raise next(iter(self._failures), error)
        return task.result()

    def _carry_out(self, task: Callable[[], Result]) -> Result:
        if self.is_stopped:
            raise CancelledError
        try:
            return task()
        except BaseException as exc:
            self._failures.append(exc)
            self._stopped.set()
            raise
