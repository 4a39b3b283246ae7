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

    __slots__ = ("_descriptor", "_names", "_root")

    def __init__(self, root: str, names: tuple[str, ...]) -> None:
        self._root, self._names, self._descriptor = root, names, -1

    def __enter__(self) -> int:
        descriptor = os.open(self._root, FOLDER_FLAGS)
        try:
            for name in self._names:
                descriptor = step_into(descriptor, name)
        except BaseException:
            os.close(descriptor)
            raise
        self._descriptor = descriptor
        return descriptor

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        os.close(self._descriptor)


def step_into(descriptor: int, name: str) -> int:
    """Open a folder within an open one and close the outer one; a failure leaves the outer one open."""
    below = os.open(name, FOLDER_FLAGS | os.O_NOFOLLOW, dir_fd=descriptor)
    os.close(descriptor)
    return below
