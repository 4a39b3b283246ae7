"""Calls that the conformance suites share: every verb, at once, until it is there."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from safepoint.errors import ObjectMissingError
from safepoint.storage.base import Storage

_WAIT_S = 60.0
_MOST_LOOKS = 10_000_000


def verbs_of_an_object(storage: Storage) -> list[Callable[[str], object]]:
    """Return a call of each verb that takes the path of an object."""
    return [
        storage.create,
        storage.append,
        storage.delete,
        lambda path: storage.publish(path, b""),
        lambda path: storage.put(path, b""),
        *reading_verbs(storage),
    ]


def verbs_of_a_path(storage: Storage) -> list[Callable[[str], object]]:
    """Return a call of each verb that takes a path."""
    folder_verbs = [storage.make_folder, storage.sync_folder, storage.list, storage.delete_folder]
    return [*verbs_of_an_object(storage), *folder_verbs]


def reading_verbs(storage: Storage) -> list[Callable[[str], object]]:
    """Return a call of each verb that reads an object."""
    return [
        storage.size,
        lambda path: storage.read(path, limit_bytes=100),
        lambda path: storage.read_into(path, 0, memoryview(bytearray(1))),
    ]


@contextmanager
def raises(error_class: type[Exception]) -> Iterator[None]:
    """Fail unless the block raises this error; as `pytest.raises`, for suites that shall not import pytest."""
    try:
        yield
    except error_class:
        return
    raise AssertionError(f"expected {error_class.__name__}, and nothing was raised")


def read_when_there(storage: Storage, path: str, limit_bytes: int) -> bytes:
    """Look for an object until it is there, and return what the first successful read gives."""
    for _ in range(_MOST_LOOKS):
        try:
            return storage.read(path, limit_bytes=limit_bytes)
        except ObjectMissingError:
            continue
    raise AssertionError(f"{path} did not appear")


def create_only(storage: Storage, path: str) -> None:
    """Create an object and leave it without bytes."""
    storage.create(path).abandon()


def at_once(calls: list[Callable[[], Any]]) -> list[Any]:
    """Run all calls at the same time, and return what each returned or raised."""
    outcomes: list[Any] = [None] * len(calls)
    start = threading.Barrier(len(calls))

    def run(number: int) -> None:
        start.wait(_WAIT_S)
        try:
            outcomes[number] = calls[number]()
        except Exception as exc:  # noqa: BLE001 (the top of a thread: handed to the caller, who compares it)
            outcomes[number] = exc

    threads = [threading.Thread(target=run, args=(number,), daemon=True) for number in range(len(calls))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(_WAIT_S)
    assert not any(thread.is_alive() for thread in threads), "a call did not return"
    return outcomes
