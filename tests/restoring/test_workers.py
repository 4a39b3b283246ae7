"""The first task that fails stops the others, and its error is the one that is raised."""

from __future__ import annotations

import threading

import pytest

from safepoint.restoring.workers import Workers

LIMIT_S = 30


def test_results_come_back_from_threads_and_from_the_callers_own() -> None:
    for count in (0, 1, 3):
        with Workers(count) as workers:
            tasks = [workers.start(lambda n=number: (n * n, threading.get_ident())) for number in range(20)]  # type: ignore[misc]
            results = [workers.result_of(task) for task in tasks]
        assert [square for square, _ in results] == [number * number for number in range(20)]
        assert ({thread for _, thread in results} == {threading.get_ident()}) == (count == 0)


def test_the_first_failure_stops_what_is_under_way_and_what_is_waiting() -> None:
    is_waiting, begun = threading.Event(), []

    def patient(workers: Workers) -> None:
        is_waiting.set()
        for _ in range(LIMIT_S * 1000):
            if workers.is_stopped:
                raise TimeoutError("stopped while under way")
            threading.Event().wait(0.001)

    def failing() -> None:
        assert is_waiting.wait(LIMIT_S)
        raise LookupError("the first")

    with pytest.raises(LookupError, match="the first"), Workers(2) as workers:
        first = workers.start(lambda: patient(workers))
        workers.start(failing)
        for _ in range(10):
            workers.start(lambda: begun.append(1))
        workers.result_of(first)
    assert begun == []


def test_an_error_of_the_caller_stops_the_tasks() -> None:
    is_waiting, ended = threading.Event(), []

    def patient(workers: Workers) -> None:
        is_waiting.set()
        while not workers.is_stopped:
            threading.Event().wait(0.001)
        ended.append(1)

    with pytest.raises(KeyboardInterrupt), Workers(1) as workers:
        workers.start(lambda: patient(workers))
        assert is_waiting.wait(LIMIT_S)
        raise KeyboardInterrupt
    assert ended == [1]
