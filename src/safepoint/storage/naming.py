"""The names in a folder, where nobody asks for sizes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from safepoint.storage.base import Storage


class Naming(Protocol):
    """A storage that tells the names in a folder at less cost than their sizes, for which it has to ask one by one."""

    def names(self, path: str) -> dict[str, bool]:
        """Return the names that `Storage.list` would return, in its order, each with whether it is that of a folder."""


def names_in(storage: Storage, path: str) -> dict[str, bool]:
    """Return the names in a folder, sorted, each with whether it is that of a folder; see `safepoint.storage.base`."""
    # To ask isinstance() of a protocol takes as long as to list a small folder.
    names: Callable[[str], dict[str, bool]] | None = getattr(storage, "names", None)
    return {entry.name: entry.is_folder for entry in storage.list(path)} if names is None else names(path)
