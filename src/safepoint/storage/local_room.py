"""How much more a file system takes, asked in one call."""

from __future__ import annotations

import os


def free_bytes(folder: str) -> int | None:
    """Return the free bytes of the file system that a folder lies on, or would; None where it does not tell.

    A file system that a quota of a project or of a data set divides tells what is left of that. A quota of a user is
    not seen here. What only the super-user may use counts for that user alone.
    """
    try:
        found = os.statvfs(folder)
    except (FileNotFoundError, NotADirectoryError):
        while not os.path.lexists(folder) and folder != os.path.dirname(folder):
            folder = os.path.dirname(folder)
        found = os.statvfs(folder or os.curdir)
    if not found.f_blocks:
        return None
    return found.f_frsize * (found.f_bfree if os.geteuid() == 0 else found.f_bavail)
