"""Files and what the kernel keeps of them: sync, drop, count, remove."""

from __future__ import annotations

import contextlib
import ctypes
import os
import shutil
import struct
import tempfile
from collections.abc import Iterator
from pathlib import Path

_libc = ctypes.CDLL(None, use_errno=True)
# The same number on every architecture that Linux has; answers since Linux 6.5.
_CACHESTAT = 451


def sync_path(path: Path) -> None:
    """Sync one file or folder."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def sync_tree(root: Path) -> None:
    """Sync every file below a path, and every folder, the one that holds it included."""
    if root.is_file():
        sync_path(root)
    for folder, _, names in os.walk(root, topdown=False):
        for name in names:
            sync_path(Path(folder, name))
        sync_path(Path(folder))
    sync_path(root.parent)


def files_below(root: Path) -> Iterator[Path]:
    """Yield the files below a path, or the path itself if it is one."""
    if root.is_file():
        yield root
    for folder, _, names in os.walk(root):
        yield from (Path(folder, name) for name in names)


def size_below(root: Path) -> int:
    """Return the bytes of all files below a path."""
    return sum(path.stat().st_size for path in files_below(root))


def drop_cache(root: Path) -> None:
    """Make the kernel forget the pages of every file below a path."""
    for path in files_below(root):
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(descriptor)


def warm_cache(root: Path) -> None:
    """Read every file below a path once, so that the kernel holds its pages."""
    piece = bytearray(8 << 20)
    for path in files_below(root):
        with path.open("rb", buffering=0) as file:
            while file.readinto(piece):
                pass


def cached_share(root: Path) -> float | None:
    """Return which share of the bytes below a path the kernel holds; None where it does not tell."""
    pages, total = 0, 0
    for path in files_below(root):
        descriptor = os.open(path, os.O_RDONLY)
        try:
            found = ctypes.create_string_buffer(40)
            answer = _libc.syscall(_CACHESTAT, descriptor, ctypes.byref(ctypes.create_string_buffer(16)), found, 0)
        finally:
            os.close(descriptor)
        if answer != 0:
            return None
        pages += struct.unpack("5Q", found.raw)[0]
        total += path.stat().st_size
    return pages * os.sysconf("SC_PAGE_SIZE") / total if total else 0.0


def remove(path: Path) -> None:
    """Delete a file or a folder."""
    if path.is_dir():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def come_to_rest() -> None:
    """Wait until nothing is left to be written, deletions included, so that no candidate pays for another's."""
    os.sync()


@contextlib.contextmanager
def workplace(folder: Path, *, needed_bytes: int) -> Iterator[Path]:
    """Make a folder on the disk that is measured, and remove it with all that lies in it.

    Raises:
        SystemExit: The disk has no room for it.
    """
    folder.mkdir(parents=True, exist_ok=True)
    free = shutil.disk_usage(folder).free
    if free < needed_bytes:
        raise SystemExit(f"{needed_bytes / 1e9:.1f} GB are needed below {folder} and {free / 1e9:.1f} GB are free")
    made = Path(tempfile.mkdtemp(prefix="measured-", dir=folder))
    try:
        yield made
    finally:
        shutil.rmtree(made, ignore_errors=True)
