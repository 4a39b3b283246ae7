"""A storage that asks once more where the answer may have been lost on the way, with bounds.

1. Only what may be done twice is done twice: to read, to look, to make a folder, to delete. A sync that failed is
   final, and no object is created or published a second time: that is for the next save to do.
2. Only errors that are marked as passing (`StorageError.retryable`: a stale handle, a time-out, a busy device) are met
   so, at most three times for one call, with 2.1 seconds of waiting in all.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Generator, Iterator
from functools import partial
from typing import TypeVar

from safepoint.ambient import Ambient
from safepoint.errors import StorageError
from safepoint.storage.base import Appender, Durability, Entry, ObjectWriter, Storage
from safepoint.storage.naming import names_in
from safepoint.storage.reading import Foreseeing, ObjectReader, opened

WAITS_S = (0.1, 0.4, 1.6)

_Result = TypeVar("_Result")

_log = logging.getLogger(__name__)


class PatientStorage:
    """Pass every verb on to another storage, and some of them again after a passing failure.

    Args:
        inner: Where the bytes lie.
        ambient: Waits between two tries.
    """

    def __init__(self, inner: Storage, ambient: Ambient) -> None:
        self._inner = inner
        self._ambient = ambient

    @property
    def url(self) -> str:
        """Return the inner storage's URL."""
        return self._inner.url

    @property
    def durability(self) -> Durability:
        """Return the inner storage's durability."""
        return self._inner.durability

    def free_bytes(self) -> int | None:
        """Pass on; nothing depends on the answer."""
        return self._inner.free_bytes()

    def root_exists(self) -> bool:
        """Look, again if need be."""
        return self._patiently(self._inner.root_exists)

    def make_root(self) -> None:
        """Pass on, once: to make a root is to sync its name too."""
        self._inner.make_root()

    def make_folder(self, path: str) -> None:
        """Make a folder, again if need be."""
        self._patiently(lambda: self._inner.make_folder(path))

    def sync_folder(self, path: str) -> None:
        """Pass on, once: after a failed sync a second one that succeeds proves nothing."""
        self._inner.sync_folder(path)

    def create(self, path: str, *, size_bytes: int = 0) -> ObjectWriter:
        """Pass on, once: a lost answer leaves the name taken."""
        return self._inner.create(path, size_bytes=size_bytes)

    def publish(self, path: str, data: bytes) -> None:
        """Pass on, once: a lost answer is settled by reading."""
        self._inner.publish(path, data)

    def put(self, path: str, data: bytes) -> None:
        """Pass on, once: the next beat comes soon."""
        self._inner.put(path, data)

    def append(self, path: str) -> Appender:
        """Pass on, once: nothing needs a journal."""
        return self._inner.append(path)

    def read(self, path: str, *, limit_bytes: int) -> bytes:
        """Read, again if need be."""
        return self._patiently(lambda: self._inner.read(path, limit_bytes=limit_bytes))

    def read_into(self, path: str, offset_bytes: int, buffer: memoryview) -> None:
        """Fill the buffer, from its beginning again if need be."""
        self._patiently(lambda: self._inner.read_into(path, offset_bytes, buffer))

    @contextlib.contextmanager
    def opened(self, path: str, buffer: memoryview, *, is_past_cache: bool = False) -> Iterator[ObjectReader]:
        """Open an object in the inner storage's own way, again if need be; what fails within a run is raised."""
        with contextlib.ExitStack() as stack:
            inner = partial(opened, self._inner, path, buffer, is_past_cache=is_past_cache)
            yield self._patiently(lambda: stack.enter_context(inner()))

    def foresee(self, path: str, step_bytes: int) -> Generator[int, None, None]:
        """Pass on, once, where the inner storage can be told; nothing depends on what it does."""
        if isinstance(self._inner, Foreseeing):
            yield from self._inner.foresee(path, step_bytes)

    def size(self, path: str) -> int:
        """Look, again if need be."""
        return self._patiently(lambda: self._inner.size(path))

    def list(self, path: str) -> list[Entry]:
        """List, again if need be."""
        return self._patiently(lambda: self._inner.list(path))

    def names(self, path: str) -> dict[str, bool]:
        """List without sizes, again if need be."""
        return self._patiently(lambda: names_in(self._inner, path))

    def delete(self, path: str) -> None:
        """Delete, again if need be: an object that is gone is fine."""
        self._patiently(lambda: self._inner.delete(path))

    def delete_folder(self, path: str) -> None:
        """Delete an empty folder, again if need be: one that is gone is fine."""
        self._patiently(lambda: self._inner.delete_folder(path))

    def _patiently(self, act: Callable[[], _Result]) -> _Result:
        for wait_s in WAITS_S:
            try:
                return act()
            except StorageError as exc:
                if not exc.retryable:
                    raise
                _log.info("trying once more in %.1f s: %s", wait_s, exc)
                self._ambient.sleep(wait_s)
        return act()
