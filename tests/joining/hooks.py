"""Let something happen at a chosen call to a storage, or whenever a process lets time pass."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from safepoint.storage.base import Storage
from safepoint.testing.ambient import FakeAmbient, FakeWorld


class HookedStorage:
    """Pass every verb on; call `before` (once) at the first call of a verb on a path that ends so."""

    def __init__(self, inner: Storage, verb: str, ending: str, before: Callable[[], None]) -> None:
        self._inner = inner
        self._verb = verb
        self._ending = ending
        self._before: Callable[[], None] | None = before

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._inner, name)
        if name != self._verb:
            return found

        def call(path: str, *arguments: Any, **options: Any) -> Any:
            if self._before is not None and path.endswith(self._ending):
                before, self._before = self._before, None
                before()
            return found(path, *arguments, **options)

        return call


class RestlessAmbient(FakeAmbient):
    """A process during whose waits something happens: called with the seconds that passed since it was made."""

    def __init__(self, world: FakeWorld, happens: Callable[[float], None], *, pid: int, host: str = "host") -> None:
        super().__init__(world, pid=pid, host=host)
        self._happens = happens
        self._began = world.seconds

    def sleep(self, seconds: float) -> None:
        super().sleep(seconds)
        self._happens(self.world.seconds - self._began)
