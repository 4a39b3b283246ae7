"""A few threads that carry out tasks which leave the interpreter to each other: reading, copying, digesting.

1. The first failure stops all: what has not begun never begins, what is under way looks at `is_stopped`.
2. Who waits for any task is given that first failure.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor
from functools import partial
from types import TracebackType
from typing import TypeVar

Result = TypeVar("Result")


class Workers:
    """Carry out tasks, on threads of their own or, with a count of 0, at once by who starts them.

    So is a task for which the system gives no thread.

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
        done: Future[Result] = Future()
        if self._pool is None:
            done.set_result(task())
            return done
        once = _Once(partial(self._carry_out, task, done))
        try:
            self._pool.submit(once)
        except RuntimeError:
            # It lies in the queue all the same, and a thread that could be started before may have taken it.
            once()
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

    def _carry_out(self, task: Callable[[], Result], done: Future[Result]) -> None:
        if self.is_stopped:
            done.set_exception(CancelledError())
            return
        try:
            done.set_result(task())
        except BaseException as exc:  # noqa: BLE001 (the top of a thread hands everything on)
            self._failures.append(exc)
            self._stopped.set()
            done.set_exception(exc)


class _Once:
    """Do something at the first call alone, whichever thread makes it."""

    def __init__(self, act: Callable[[], None]) -> None:
        self._act = act
        self._free = threading.Lock()

    def __call__(self) -> None:
        if self._free.acquire(blocking=False):
            self._act()
