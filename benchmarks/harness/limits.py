"""The raw limits: what memory and disk do when nothing but the bytes themselves has to be moved.

Python hands out pieces of 8 MiB; every call in the loops below leaves the interpreter's lock. Buffers are page-aligned,
of huge pages where the system has some, and were written to before they are measured.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import mmap
import os
import threading
from collections.abc import Callable
from pathlib import Path

import numpy
import xxhash

from harness.files import drop_cache, remove, sync_path, warm_cache
from harness.rounds import Candidate, timed

PIECE_BYTES = 8 << 20
_PATTERN_BYTES = 32 << 20
# SYNC_FILE_RANGE_WRITE: begin to write, and wait for nothing.
_BEGIN_WRITING = 2

_libc = ctypes.CDLL(None, use_errno=True)


def touched(size_bytes: int, *, seed: int = 0) -> numpy.ndarray:
    """Return page-aligned memory of random bytes, a multiple of 4,096; a repeated pattern of 32 MiB."""
    size = -(-size_bytes // 4096) * 4096
    mapped = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with contextlib.suppress(OSError):
        mapped.madvise(mmap.MADV_HUGEPAGE)
    memory = numpy.frombuffer(mapped, dtype=numpy.uint8)
    pattern = numpy.random.default_rng(seed).integers(0, 256, _PATTERN_BYTES, dtype=numpy.uint8)
    for start in range(0, size, _PATTERN_BYTES):
        memory[start : start + _PATTERN_BYTES] = pattern[: min(_PATTERN_BYTES, size - start)]
    return memory


def supports_direct(folder: Path) -> bool:
    """Return whether files of this folder open with O_DIRECT."""
    probe = folder / "probe"
    try:
        os.close(os.open(probe, os.O_WRONLY | os.O_CREAT | os.O_DIRECT, 0o600))
    except OSError as exc:
        if exc.errno not in (errno.EINVAL, errno.ENOTSUP):
            raise
        return False
    finally:
        probe.unlink(missing_ok=True)
    return True


def copy_memory(target: numpy.ndarray, source: numpy.ndarray, *, threads: int) -> None:
    """Copy one buffer into another."""
    _in_pieces(len(source), threads, lambda begin, end: numpy.copyto(target[begin:end], source[begin:end]))


def take_digests(source: numpy.ndarray, *, threads: int) -> None:
    """Take the xxh3-128 of each MiB."""
    view = memoryview(source)
    _in_pieces(len(view), threads, lambda begin, end: xxhash.xxh3_128_digest(view[begin:end]), piece=1 << 20)


def write_direct(path: Path, source: numpy.ndarray, *, threads: int) -> None:
    """Write a new file past the page cache, and sync it and its folder."""
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_DIRECT, 0o600)
    view = memoryview(source)
    try:
        os.posix_fallocate(descriptor, 0, len(view))
        _in_pieces(len(view), threads, lambda begin, end: _write(descriptor, view[begin:end], begin))
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
    sync_path(path.parent)


def write_buffered(path: Path, source: numpy.ndarray, *, by_range: bool) -> None:
    """Write a new file through the page cache, and sync it and its folder.

    Args:
        path: The file.
        source: Its bytes.
        by_range: Start the writing of each piece as soon as it is handed over (`sync_file_range`).
    """
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    view = memoryview(source)

    def write_piece(begin: int, end: int) -> None:
        _write(descriptor, view[begin:end], begin)
        if by_range:
            _start_writing(descriptor, begin, end)

    try:
        os.posix_fallocate(descriptor, 0, len(view))
        _in_pieces(len(view), 1, write_piece)
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
    sync_path(path.parent)


def read_file(path: Path, target: numpy.ndarray, *, threads: int, direct: bool) -> None:
    """Read a file into memory, past the page cache or through it."""
    descriptor = os.open(path, os.O_RDONLY | (os.O_DIRECT if direct else 0))
    view = memoryview(target)
    try:
        _in_pieces(len(view), threads, lambda begin, end: _read(descriptor, view[begin:end], begin))
    finally:
        os.close(descriptor)


def write_limits(folder: Path, source: numpy.ndarray, *, buffered: bool = False) -> list[Candidate]:
    """Return the ways to write these bytes durably with nothing else to do.

    Args:
        folder: Where to write.
        source: The bytes.
        buffered: Whether the page cache's ways are wanted too where O_DIRECT works; elsewhere there are no others.
    """
    path = folder / "raw"

    def made(name: str, write: Callable[[], None]) -> Candidate:
        return Candidate(name, lambda: timed(write), after=lambda: remove(path))

    by_cache = [
        made("raw_buffered_fsync", lambda: write_buffered(path, source, by_range=False)),
        made("raw_sync_file_range", lambda: write_buffered(path, source, by_range=True)),
    ]
    if not supports_direct(folder):
        return by_cache
    past_it = [
        made("raw_direct_1", lambda: write_direct(path, source, threads=1)),
        made("raw_direct_2", lambda: write_direct(path, source, threads=2)),
    ]
    return [*(by_cache if buffered else []), *past_it]


def read_limits(path: Path, target: numpy.ndarray, *, cold: bool) -> list[Candidate]:
    """Return the ways to read a file that lies on the disk (`cold`) or in the page cache, with nothing else to do."""
    prepare = drop_cache if cold else warm_cache

    def made(name: str, *, threads: int, direct: bool) -> Candidate:
        return Candidate(
            name,
            lambda: timed(lambda: read_file(path, target, threads=threads, direct=direct)),
            before=lambda: prepare(path),
        )

    ways = [made(f"raw_buffered_{threads}", threads=threads, direct=False) for threads in (1, 2)]
    if cold and supports_direct(path.parent):
        ways += [made(f"raw_direct_{threads}", threads=threads, direct=True) for threads in (1, 2)]
    return ways


def _in_pieces(size: int, threads: int, act: Callable[[int, int], object], *, piece: int = PIECE_BYTES) -> None:
    """Call `act` for each piece, spread over threads; raise what any of them raised."""
    begins = iter(range(0, size, piece))
    failures: list[BaseException] = []

    def work() -> None:
        try:
            # A range's iterator is advanced under the interpreter's lock, so that no piece is handed out twice.
            for begin in begins:
                act(begin, min(begin + piece, size))
        except BaseException as exc:  # noqa: BLE001 (the top of a thread hands everything on)
            failures.append(exc)

    others = [threading.Thread(target=work) for _ in range(threads - 1)]
    for other in others:
        other.start()
    work()
    for other in others:
        other.join()
    if failures:
        raise failures[0]


def _write(descriptor: int, view: memoryview, offset: int) -> None:
    done = 0
    while done < len(view):
        done += os.pwrite(descriptor, view[done:], offset + done)


def _read(descriptor: int, view: memoryview, offset: int) -> None:
    done = 0
    while done < len(view):
        count = os.preadv(descriptor, [view[done:]], offset + done)
        if count == 0:
            raise OSError(errno.EIO, "the file is shorter than it was")
        done += count


def _start_writing(descriptor: int, begin: int, end: int) -> None:
    answer = _libc.sync_file_range(descriptor, ctypes.c_int64(begin), ctypes.c_int64(end - begin), _BEGIN_WRITING)
    if answer != 0:
        raise OSError(ctypes.get_errno(), "sync_file_range")
