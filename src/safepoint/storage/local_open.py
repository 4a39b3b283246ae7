"""Open folders and files below a root, one component after the other, without following links."""

from __future__ import annotations

import os
import stat
from types import TracebackType

from safepoint.storage.failures import not_an_object

FOLDER_FLAGS = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC
_BELOW_FLAGS = FOLDER_FLAGS | os.O_NOFOLLOW
_READ_FLAGS = os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOCTTY


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
        below = os.open(name, _BELOW_FLAGS, dir_fd=self.descriptor)
        # Noted before the outer one is closed: behind an interrupt its number may be that of another file.
        above, self.descriptor = self.descriptor, below
        os.close(above)


class OpenFile:
    """Hold a file open for reading within a block, and give its descriptor and its size.

    Args:
        folder: The folder that it lies in.
        name: Its name there.
        where: Its name for messages.

    Raises:
        CorruptionError: What stands there is no regular file.
    """

    __slots__ = ("_folder", "_name", "_where", "descriptor")

    def __init__(self, folder: OpenFolder, name: str, where: str) -> None:
        self._folder, self._name, self._where, self.descriptor = folder, name, where, -1

    def __enter__(self) -> tuple[int, int]:
        try:
            with self._folder as folder:
                self.descriptor = os.open(self._name, _READ_FLAGS, dir_fd=folder)
            status = os.fstat(self.descriptor)
            if not stat.S_ISREG(status.st_mode):
                raise not_an_object(self._where, f"file mode {stat.filemode(status.st_mode)}")
        except BaseException:
            if self.descriptor >= 0:
                os.close(self.descriptor)
            raise
        return self.descriptor, status.st_size

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        os.close(self.descriptor)
