"""Real file systems in image files: made, mounted through a loop device, filled up, cut off from their device.

What this machine does not offer skips the test with the reason; a mount that fails later is a failure of the test.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import struct
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

MIB = 1 << 20
# The smallest that mkfs.xfs makes.
XFS_BYTES = 300 * MIB
SIZES = {"ext4": 8 * MIB, "xfs": XFS_BYTES}
# No room for the super-user alone: else the disk is not full for these tests.
MAKERS = {"ext4": ("mkfs.ext4", "-q", "-F", "-m", "0"), "xfs": ("mkfs.xfs", "-q", "-f")}
OPTIONS = {"ext4": "loop,errors=remount-ro", "xfs": "loop,nouuid"}

_CLONE = 0x40049409
_SHUT_DOWN = 0x8004587D
_WITHOUT_LOG = 2


@dataclass(frozen=True, slots=True)
class Image:
    """A file system of a kind in a file."""

    kind: str
    file: Path

    @contextmanager
    def mounted(self, *, skips: bool = False) -> Iterator[Path]:
        """Mount it beside its file, and unmount it at the end, which also frees the loop device."""
        folder = self.file.with_suffix(".mounted")
        folder.mkdir(exist_ok=True)
        answer = _run(["mount", "-t", self.kind, "-o", OPTIONS[self.kind], str(self.file), str(folder)])
        if skips and answer.returncode:
            pytest.skip(f"may not mount an image of {self.kind} here: {answer.stderr.strip()}")
        assert answer.returncode == 0, answer.stderr
        try:
            yield folder
        finally:
            answer = _run(["umount", str(folder)])
            if answer.returncode:
                # Whatever still has a file open there: nothing may stay mounted.
                _run(["umount", "--lazy", str(folder)])
        assert answer.returncode == 0, answer.stderr

    @contextmanager
    def read_only(self) -> Iterator[None]:
        """Mount the file system read-only where it is, and writable again at the end; no file may be open to write."""
        folder = str(self.file.with_suffix(".mounted"))
        answer = _run(["mount", "-o", "remount,ro", folder])
        assert answer.returncode == 0, answer.stderr
        try:
            yield
        finally:
            answer = _run(["mount", "-o", "remount,rw", folder])
        assert answer.returncode == 0, answer.stderr

    def repair(self) -> None:
        """Let the file system's own tool correct what an abort left."""
        if self.kind == "ext4":
            answer = _run(["e2fsck", "-f", "-y", str(self.file)])
            assert answer.returncode in (0, 1), answer.stdout

    def clone(self, file: Path) -> Image:
        """Copy the image in one atomic step, while its file system is in use.

        The file below must lie on a file system that shares blocks. The system holds off every write to the image
        for as long as it takes, so that the copy has all writes that the image had at one instant, and no others.
        """
        with self.file.open("rb") as source, file.open("wb") as target:
            fcntl.ioctl(target.fileno(), _CLONE, source.fileno())
        return Image(self.kind, file)


def make_image(kind: str, file: Path, *, size_bytes: int = 0) -> Image:
    """Make an empty file system, or skip the test where that cannot be."""
    if os.geteuid() != 0:
        pytest.skip("mounting needs root")
    for tool in (MAKERS[kind][0], "mount"):
        if shutil.which(tool) is None:
            pytest.skip(f"needs {tool}")
    with file.open("wb") as opened:
        opened.truncate(size_bytes or SIZES[kind])
    answer = _run([*MAKERS[kind], str(file)])
    assert answer.returncode == 0, answer.stderr
    return Image(kind, file)


@contextmanager
def filled(folder: Path, *, leave_bytes: int) -> Iterator[None]:
    """Take all room of a file system but so many bytes, and give it back at the end."""
    filler = folder / "filler"
    descriptor = os.open(filler, os.O_RDWR | os.O_CREAT, 0o600)
    try:
        size_bytes = 0
        for piece_bytes in (64 * MIB, MIB, 64 << 10, 4 << 10, 1 << 10):
            size_bytes = _grow(descriptor, size_bytes, piece_bytes)
        os.ftruncate(descriptor, max(0, size_bytes - leave_bytes))
        os.fsync(descriptor)
        yield
    finally:
        os.ftruncate(descriptor, 0)
        os.fsync(descriptor)
        os.close(descriptor)
        filler.unlink()


def fail_as_ext4_does(folder: Path) -> None:
    """Let ext4 find an error in itself, at which it becomes read-only."""
    device = os.stat(folder).st_dev
    name = os.path.basename(os.readlink(f"/sys/dev/block/{os.major(device)}:{os.minor(device)}"))
    Path(f"/sys/fs/ext4/{name}/trigger_fs_error").write_text("1")


def lose_the_device(folder: Path) -> None:
    """Let no write reach the device any more, those that wait and the journal's included."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        fcntl.ioctl(descriptor, _SHUT_DOWN, struct.pack("I", _WITHOUT_LOG))
    finally:
        os.close(descriptor)


def _grow(descriptor: int, size_bytes: int, piece_bytes: int) -> int:
    while True:
        try:
            os.posix_fallocate(descriptor, size_bytes, piece_bytes)
        except OSError:
            return size_bytes
        size_bytes += piece_bytes


def _run(command: Sequence[str]) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command, capture_output=True, text=True, timeout=60)
