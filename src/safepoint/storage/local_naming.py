"""Give a file its name in one atomic step that replaces nothing."""

from __future__ import annotations

import ctypes
import errno
import os
import sys

# What file systems and kernels answer that know no hard links, or no rename that replaces nothing.
_UNSUPPORTED = frozenset(
    {errno.EPERM, errno.EOPNOTSUPP, errno.ENOTSUP, errno.EMLINK, errno.ENOSYS, errno.EINVAL, errno.EXDEV}
)
_RENAME_NOREPLACE = 1
_RENAME_EXCL = 4


def name_exclusively(folder: int, temporary: str, name: str) -> bool:
    """Name a file within an open folder; return False where the file system offers no such step.

    The temporary name may remain or be gone. Raises `FileExistsError` when the name is taken, and other `OSError`.
    """
    try:
        os.link(temporary, name, src_dir_fd=folder, dst_dir_fd=folder, follow_symlinks=False)
        return True
    except OSError as exc:
        if exc.errno not in _UNSUPPORTED:
            raise
    try:
        rename_exclusively(folder, temporary, name)
        return True
    except OSError as exc:
        if exc.errno not in _UNSUPPORTED:
            raise
    return False


def rename_exclusively(folder: int, temporary: str, name: str) -> None:
    """Rename within an open folder without replacing anything; raises `OSError`, with ENOSYS where there is no call."""
    call_name, flag = ("renameatx_np", _RENAME_EXCL) if sys.platform == "darwin" else ("renameat2", _RENAME_NOREPLACE)
    call = getattr(ctypes.CDLL(None, use_errno=True), call_name, None)
    if call is None:
        raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))
    call.argtypes = [ctypes.c_int, ctypes.c_char_p, ctypes.c_int, ctypes.c_char_p, ctypes.c_uint]
    if call(folder, os.fsencode(temporary), folder, os.fsencode(name), flag) != 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
