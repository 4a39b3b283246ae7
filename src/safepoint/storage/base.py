"""What safepoint asks of a place that keeps bytes under names.

Paths are relative to the storage's root: names of ``[A-Za-z0-9._-]``, none of them ``.`` or ``..``, joined with ``/``;
the empty path is the root itself. A path outside this grammar is a `RequestError` before anything is looked at.

Obligations that hold for every verb:

1. An object, once it has its name, never changes (`put` and `append` files are the two stated exceptions).
2. A failure raises `StorageError` (or its subclasses `ObjectExistsError`, `ObjectMissingError`) with the path; nothing
   is retried inside, and a failed sync is never reported as success by a later call.
3. Links are not followed below the root. What stands in the wrong place (a link, a device, a folder for an object or
   an object for a folder) is a `CorruptionError` for the verbs that read (`read`, `read_into`, `size`, `list`): a
   reader can then fall back. It is a `StorageError` for the others.
4. Verbs may be called from several threads at once. One writer (but see `Placing`) or appender belongs to one thread
   at a time, and one file has one appender at a time.
5. Nothing but `make_root` and `make_folder` makes folders: to create, publish, put or append in an absent one, or to
   sync it, is an `ObjectMissingError`.
6. `list` shows a name as soon as the verb that gave it has returned; ``.tmp-`` objects that a dead process left behind
   are shown like all others.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Collection
from dataclasses import dataclass
from typing import Literal, Protocol, runtime_checkable

from safepoint.errors import RequestError

Durability = Literal["process", "power", "replicated"]

_NAME = re.compile(r"[A-Za-z0-9._-]+")
_WELL_FORMED = re.compile(r"[A-Za-z0-9._-]+(?:/[A-Za-z0-9._-]+)*")
_ALLOWED = frozenset("ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789._-")
_LONGEST_PATH = 1024
# A save asks for some ten paths, most of them more than once.
_MOST_CHECKED = 64


@dataclass(frozen=True, slots=True)
class Entry:
    """Name one object or folder found in a folder; `size_bytes` is 0 for folders."""

    name: str
    is_folder: bool
    size_bytes: int


class ObjectWriter(Protocol):
    """Write one new object from front to back.

    The object may be visible to others before `finish`; nothing relies on it until a manifest names it.
    """

    def write(self, data: memoryview) -> None:
        """Append all bytes of `data`; a short write is completed or raises `StorageError`.

        `data` is read before this returns. Large pieces of whole 4,096-byte blocks, in memory that begins on such a
        line, cost least.
        """

    def finish(self) -> None:
        """Make the bytes durable (not yet the name: see `Storage.sync_folder`) and close.

        Called at most once: a second call, or one after `abandon`, is a `RequestError`. After a failed `write` or
        `finish` it raises `StorageError`: the object never counts as durable again.
        """

    def abandon(self) -> None:
        """Close without any claim about the bytes. The object may remain, as garbage.

        Idempotent, also after `finish`. Never raises `StorageError`.
        """


@runtime_checkable
class Placing(ObjectWriter, Protocol):
    """A writer that takes the parts of an object in any order, from several threads at once."""

    def write_at(self, data: memoryview, offset_bytes: int) -> None:
        """Write all bytes of `data` at their place in the object; otherwise as `write`, beside which it is not used.

        Every part is written once, none over another. `finish` raises `StorageError` where one is missing.
        """


class Appender(Protocol):
    """Keep a text file of lines at low cost, without any durability; used for the journal.

    After a crash any suffix of the lines may be missing or torn. Opening a file whose last line is torn ends that line
    first, so that what follows stands on lines of its own.
    """

    def append(self, line: bytes) -> None:
        """Add a line that stays. A newline within `line` is a `RequestError`."""

    def replace_last(self, line: bytes) -> None:
        """Put `line` in the place of the line that the previous `replace_last` wrote, else add it.

        A later `append` keeps the replaced line.
        """

    def close(self) -> None:
        """Close the file. Idempotent."""


class Storage(Protocol):
    """Keep bytes under names, with exclusive creation and explicit durability."""

    @property
    def url(self) -> str:
        """Return the root in the form a user would type."""

    @property
    def durability(self) -> Durability:
        """Return what a fully synced object survives: ``process`` death, ``power`` loss, or loss of a disk."""

    def free_bytes(self) -> int | None:
        """Return how many more bytes it takes, in one cheap call; None where there is no such number, or nobody tells.

        A save that needs more is refused before it begins, so the number must not be too small.
        """

    def root_exists(self) -> bool:
        """Return whether the root is there, without creating it."""

    def make_root(self) -> None:
        """Create the root and the missing folders above it, durably (each parent is synced). Idempotent."""

    def make_folder(self, path: str) -> None:
        """Create one folder and the missing ones above it, below the root. Idempotent.

        The new names are durable only after `sync_folder` of their parents.
        """

    def sync_folder(self, path: str) -> None:
        """Make the names in a folder durable: creations, publications and deletions made before the call."""

    def create(self, path: str, *, size_bytes: int = 0) -> ObjectWriter:
        """Create a new object exclusively. Raises `ObjectExistsError` when the name is taken.

        Args:
            path: Its name.
            size_bytes: How much will be written, 0 if that is not known. It binds neither side; a storage may set room
                aside, and the first `write` then fails where there is not so much.
        """

    def publish(self, path: str, data: bytes) -> None:
        """Give complete, already durable bytes their name in one atomic, exclusive step.

        Others see either nothing or all of `data`. If we die inside, an unnamed or temporary object may be left behind
        (its name starts with ``.tmp-``). The name itself is durable after `sync_folder` of its parent.
        Raises `ObjectExistsError` when the name is taken; `OutcomeUnknownError` when the name may have been given.
        """

    def put(self, path: str, data: bytes) -> None:
        """Replace or create a small object atomically, without durability; used for heartbeats."""

    def append(self, path: str) -> Appender:
        """Open a text file for `Appender`, creating it."""

    def read(self, path: str, *, limit_bytes: int) -> bytes:
        """Return the whole object. Larger than `limit_bytes` is a `CorruptionError`, before anything is allocated."""

    def read_into(self, path: str, offset_bytes: int, buffer: memoryview) -> None:
        """Fill `buffer` from the object, beginning at an offset. A shorter object is a `CorruptionError`."""

    def size(self, path: str) -> int:
        """Return an object's size in bytes, having opened it (a name alone is no proof on network file systems)."""

    def list(self, path: str) -> list[Entry]:
        """Return what is in a folder, sorted by name; an absent folder is empty.

        Links, special files and names outside the grammar are left out: no verb could reach them.
        """

    def delete(self, path: str) -> None:
        """Remove an object; an absent one is fine. Never a folder."""

    def delete_folder(self, path: str) -> None:
        """Remove a folder if it is empty; an absent one is fine. One that is not empty is a `StorageError`.

        The root is never removed: the empty path is a `RequestError`.
        """


@functools.lru_cache(maxsize=_MOST_CHECKED)
def check_path(path: str) -> tuple[str, ...]:
    """Return the names that make up a path, or raise `RequestError` when it is outside the grammar."""
    if path == "":
        return ()
    if len(path) > _LONGEST_PATH:
        raise RequestError("a storage path is too long", where=path[:80] + "…", expected=f"at most {_LONGEST_PATH}")
    names = tuple(path.split("/"))
    if _WELL_FORMED.fullmatch(path) and "." not in names and ".." not in names:
        return names
    for name in names:
        if not name or name in (".", "..") or not _ALLOWED.issuperset(name):
            raise RequestError(
                "a storage path holds a name that is not allowed",
                where=repr(path),
                expected="names of letters, digits, '.', '_' and '-', joined with '/'",
                found=repr(name),
            )
    return names


@functools.lru_cache(maxsize=_MOST_CHECKED)
def split_path(path: str) -> tuple[tuple[str, ...], str]:
    """Return the folder's names and the object's own name; the root is a `RequestError`, for it is no object."""
    names = check_path(path)
    if not names:
        raise RequestError("the root of a storage is not an object", where=repr(path), expected="a path with a name")
    return names[:-1], names[-1]


def names_among(listed: Collection[str]) -> Collection[str]:
    """Return those of the names that a folder lists which can be part of a path; none of them holds a slash."""
    if _WELL_FORMED.fullmatch("/".join(listed)):
        return listed
    return [name for name in listed if _NAME.fullmatch(name)]


def byte_view(data: memoryview) -> memoryview:
    """Return a flat view of the bytes of a contiguous buffer, which may also be an empty one of any shape."""
    # memoryview.cast refuses a shape that holds a zero.
    view = memoryview(data)
    return view.cast("B") if view.nbytes else memoryview(bytearray())


def check_line(line: bytes) -> None:
    """Raise `RequestError` when a line for an `Appender` holds a newline."""
    if b"\n" in line:
        raise RequestError("a line holds a newline", found=repr(bytes(line[:60])), expected="one line without its end")
