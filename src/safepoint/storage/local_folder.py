"""Open folders below a root, one component after the other, without following links."""

from __future__ import annotations

import os
from types import TracebackType

FOLDER_FLAGS = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC


class OpenFolder:
    """Hold a folder open within a block, and give its descriptor.

    A class, for a generator takes three times as long, and this is on the way of every verb.

    Args:
        root: The path of the root, which may be a link.
        names: The folders below it, of which none may be.
    """

    __slots__ = ("_names", "_root", "descriptor")

    def __init__(self, root: str, names: tuple[str, ...]) -> None:
        self._root, self._names, self.descriptor = root, names, -1

    def __enter__(self) -> int:
        self.descriptor = os.open(self._root, FOLDER_FLAGS)
        try:
            for name in self._names:
                self.step_into(name)
        except BaseException:
            os.close(self.descriptor)
            raise
        return self.descriptor

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        os.close(self.descriptor)

    def step_into(self, name: str) -> None:
        """Hold a folder within this one instead; where it cannot be opened, this one stays open."""
        below = os.open(name, FOLDER_FLAGS | os.O_NOFOLLOW, dir_fd=self.descriptor)
        # Noted before the outer one is closed: behind an interrupt its number may be that of another file.
        above, self.descriptor = self.descriptor, below
        os.close(above)
