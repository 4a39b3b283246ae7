"""The sizes of many objects, which a storage that takes its time to answer is asked for at once."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

from safepoint.errors import CorruptionError, ObjectMissingError
from safepoint.storage.base import Storage

AT_ONCE = 64


def sizes_of(storage: Storage, paths: Sequence[str]) -> list[int | ObjectMissingError | CorruptionError]:
    """Return the size of each object, or why it is none; each is opened.

    Raises:
        StorageError: The storage does not answer.
    """

    def size(path: str) -> int | ObjectMissingError | CorruptionError:
        try:
            return storage.size(path)
        except (ObjectMissingError, CorruptionError) as exc:
            return exc

    if len(paths) < AT_ONCE:
        return [size(path) for path in paths]
    try:
        with ThreadPoolExecutor(AT_ONCE) as pool:
            return list(pool.map(size, paths))
    except RuntimeError:
        # At a limit of the system they are asked for one after the other.
        return [size(path) for path in paths]
