"""The operating system's error numbers in words that say what to do."""

from __future__ import annotations

import errno
import os
from types import TracebackType

from safepoint.errors import CorruptionError, ObjectExistsError, ObjectMissingError, RequestError, StorageError

_RETRYABLE = frozenset({errno.EAGAIN, errno.EINTR, errno.ESTALE, errno.ETIMEDOUT, errno.EBUSY})

_NOT_AN_OBJECT = frozenset({errno.ELOOP, errno.ENOTDIR, errno.EISDIR, errno.ENXIO, errno.EMLINK})

_UNTOUCHED = "what was committed before is untouched."

_WORDS: dict[int, tuple[str, str]] = {
    errno.ENOSPC: ("the disk is full", f"Free space, or keep fewer checkpoints; {_UNTOUCHED}"),
    errno.EDQUOT: ("the disk quota is used up", f"Free space, or raise the quota; {_UNTOUCHED}"),
    errno.EACCES: ("permission is denied", "Give this user the right to read and write there."),
    errno.EPERM: ("the operation is not permitted", "Check the owner and the attributes of the folder."),
    errno.EROFS: ("the file system is read-only", "Mount it writable, or choose another place."),
    errno.EIO: ("the device failed", "Look into the system's log; do not trust this device before it is repaired."),
    errno.EMFILE: ("this process has too many open files", "Raise its limit (ulimit -n)."),
    errno.ENFILE: ("the system has too many open files", "Raise its limit."),
    errno.EFBIG: ("the file is too large for the file system", "Choose a file system without this limit."),
    errno.ENAMETOOLONG: ("the name is too long for the file system", "Choose a shorter path for the run."),
    errno.ESTALE: ("the network file system lost the file", "Check the mount, then try again."),
    errno.ETIMEDOUT: ("the storage did not answer in time", "Check the connection, then try again."),
    errno.ENOTDIR: (
        "a file or a link stands where a folder belongs",
        "Links are not followed below the root of a run; move it out of the way.",
    ),
    errno.ELOOP: ("a link stands where a file belongs", "Links are not followed below the root of a run."),
    errno.EISDIR: ("a folder stands where a file belongs", "Move it out of the way."),
    errno.ENOTEMPTY: ("the folder is not empty", "Look at what is in it; only empty folders are removed."),
    errno.EINVAL: ("the file system does not offer this", "Choose a file system that can sync files and folders."),
}


def storage_error(number: int | None, *, doing: str, where: str) -> StorageError:
    """Return the error that stands for an error number of the operating system.

    Args:
        number: The `errno`; None where there is none.
        doing: What was attempted, as in "to publish".
        where: The path concerned.
    """
    if number == errno.ENOENT:
        return ObjectMissingError(f"could not {doing}: nothing has this name", where=where, errno=number)
    if number == errno.EEXIST:
        return ObjectExistsError(f"could not {doing}: the name is taken", where=where, errno=number)
    system_text = os.strerror(number) if number is not None else "no error number"
    words, remedy = _WORDS.get(number or 0, (system_text, ""))
    return StorageError(
        f"could not {doing}: {words}",
        where=where,
        found=f"{errno.errorcode.get(number or 0, 'error')} ({system_text})",
        remedy=remedy,
        errno=number,
        retryable=number in _RETRYABLE,
    )


def not_an_object(where: str, found: str) -> CorruptionError:
    """Return the error for something that a reader met in the place of a file or folder of the run."""
    return CorruptionError(
        "something else stands in the place of a part of the run",
        where=where,
        expected="a regular file in regular folders, without links",
        found=found,
    )


def not_a_run(where: str) -> RequestError:
    """Return the error for a run's path that is no folder, or goes through what is none."""
    return RequestError(
        "a run is a folder, and its path names or goes through something else",
        where=where,
        expected="a folder, or a path where one can be made",
        found="a file or another thing that is no folder",
        remedy="Check the path.",
    )


def translated(doing: str, where: str) -> Translation:
    """Turn each `OSError` of the block into the `StorageError` that says the same."""
    return Translation(doing, where, is_reader=False)


def translated_for_reader(doing: str, where: str) -> Translation:
    """Do as `translated` does, but report what is no regular file or folder as `CorruptionError`."""
    return Translation(doing, where, is_reader=True)


class Translation:
    """Be the context of a block whose `OSError` is told in our words.

    A class, for a generator takes three times as long, and this is on the way of every verb.

    Args:
        doing: What is attempted, as in "to publish".
        where: The path concerned.
        is_reader: Whether what is no regular file or folder is damage.
    """

    __slots__ = ("_doing", "_is_reader", "_where")

    def __init__(self, doing: str, where: str, *, is_reader: bool) -> None:
        self._doing, self._where, self._is_reader = doing, where, is_reader

    def __enter__(self) -> None:
        return None

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if not isinstance(error, OSError):
            return
        if self._is_reader and error.errno in _NOT_AN_OBJECT:
            raise not_an_object(self._where, os.strerror(error.errno or 0)) from error
        raise storage_error(error.errno, doing=self._doing, where=self._where) from error
