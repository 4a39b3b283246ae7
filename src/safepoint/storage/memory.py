"""Keep bytes in the memory of this process: for tests, for examples, and for runs that shall leave nothing behind.

1. Folders are real: an object needs its folder, as on a file system.
2. A published object is complete before it has its name; both happen under one lock.
"""

from __future__ import annotations

import errno
import threading

from safepoint.errors import CorruptionError, ObjectMissingError, RequestError, StorageError
from safepoint.storage.base import Durability, Entry, byte_view, check_line, check_path, split_path
from safepoint.storage.failures import not_an_object, storage_error


class MemoryStorage:
    """Keep objects in a dictionary. Two storages never share anything, whatever their URLs."""

    def __init__(self, url: str = "memory://") -> None:
        self._url = url
        self._lock = threading.Lock()
        # None stands for a folder; the root is the empty path, and absent until it is made.
        self._entries: dict[str, bytearray | None] = {}

    @property
    def url(self) -> str:
        """Return the URL given at construction; it names nothing."""
        return self._url

    @property
    def durability(self) -> Durability:
        """Return ``process``: nothing outlives this process."""
        return "process"

    def free_bytes(self) -> int | None:
        """Return None: the memory of this process has no number of its own."""
        return None

    def root_exists(self) -> bool:
        """Return whether `make_root` was called."""
        with self._lock:
            return "" in self._entries

    def make_root(self) -> None:
        """Create the root."""
        with self._lock:
            self._entries.setdefault("", None)

    def make_folder(self, path: str) -> None:
        """Create a folder and those above it."""
        names = check_path(path)
        with self._lock:
            self._folder((), "make a folder", path)
            for count in range(1, len(names) + 1):
                if self._entries.setdefault("/".join(names[:count]), None) is not None:
                    raise storage_error(errno.ENOTDIR, doing="make a folder", where=self._where(path))

    def sync_folder(self, path: str) -> None:
        """Check that the folder is there; there is nothing to sync."""
        with self._lock:
            self._folder(check_path(path), "sync the folder", path)

    def create(self, path: str, *, size_bytes: int = 0) -> MemoryWriter:
        """Create an empty object, which the writer fills."""
        data = bytearray()
        self._name(path, data, "create")
        return MemoryWriter(data, self._lock, self._where(path))

    def publish(self, path: str, data: bytes) -> None:
        """Name a copy of `data`."""
        self._name(path, bytearray(data), "publish")

    def put(self, path: str, data: bytes) -> None:
        """Name a copy of `data`, in the place of what had the name."""
        folder, _name = split_path(path)
        with self._lock:
            self._folder(folder, "put", path)
            if path in self._entries and self._entries[path] is None:
                raise storage_error(errno.EISDIR, doing="put", where=self._where(path))
            self._entries[path] = bytearray(data)

    def append(self, path: str) -> MemoryAppender:
        """Open a file of lines, creating it."""
        folder, _name = split_path(path)
        with self._lock:
            self._folder(folder, "append", path)
            data = self._entries.setdefault(path, bytearray())
            if data is None:
                raise storage_error(errno.EISDIR, doing="append", where=self._where(path))
            if data and not data.endswith(b"\n"):
                data += b"\n"
        return MemoryAppender(data, self._lock, self._where(path))

    def read(self, path: str, *, limit_bytes: int) -> bytes:
        """Return a copy of the object."""
        with self._lock:
            data = self._object(path, "read")
            if len(data) > limit_bytes:
                raise CorruptionError(
                    "an object is larger than its kind may be",
                    where=self._where(path),
                    expected=f"at most {limit_bytes} bytes",
                    found=f"{len(data)} bytes",
                )
            return bytes(data)

    def read_into(self, path: str, offset_bytes: int, buffer: memoryview) -> None:
        """Copy a range of the object into the buffer."""
        if offset_bytes < 0:
            raise RequestError("an offset is negative", where=path, found=offset_bytes)
        view = byte_view(buffer)
        with self._lock:
            data = self._object(path, "read")
            if len(data) < offset_bytes + len(view):
                raise CorruptionError(
                    "an object ends too early",
                    where=self._where(path),
                    expected=f"at least {offset_bytes + len(view)} bytes",
                    found=f"{len(data)} bytes",
                )
            view[:] = memoryview(data)[offset_bytes : offset_bytes + len(view)]

    def size(self, path: str) -> int:
        """Return the object's size."""
        with self._lock:
            return len(self._object(path, "open"))

    def list(self, path: str) -> list[Entry]:
        """Return what is in a folder, sorted by name."""
        names = check_path(path)
        prefix = path + "/" if path else ""
        with self._lock:
            try:
                self._folder(names, "list", path)
            except ObjectMissingError:
                return []
            except StorageError as exc:
                raise not_an_object(self._where(path), "an object") from exc
            found = [
                Entry(key[len(prefix) :], is_folder=data is None, size_bytes=len(data or b""))
                for key, data in self._entries.items()
                if key and key.startswith(prefix) and "/" not in key[len(prefix) :]
            ]
        return sorted(found, key=lambda entry: entry.name)

    def delete(self, path: str) -> None:
        """Remove an object."""
        folder, _name = split_path(path)
        with self._lock:
            try:
                self._folder(folder, "delete", path)
            except ObjectMissingError:
                return
            if path in self._entries and self._entries[path] is None:
                raise storage_error(errno.EISDIR, doing="delete", where=self._where(path))
            self._entries.pop(path, None)

    def delete_folder(self, path: str) -> None:
        """Remove an empty folder."""
        names = check_path(path)
        split_path(path)
        with self._lock:
            try:
                self._folder(names, "delete the folder", path)
            except ObjectMissingError:
                return
            if any(key.startswith(path + "/") for key in self._entries):
                raise storage_error(errno.ENOTEMPTY, doing="delete the folder", where=self._where(path))
            del self._entries[path]

    def _where(self, path: str) -> str:
        return f"{self._url.rstrip('/')}/{path}"

    def _name(self, path: str, data: bytearray, doing: str) -> None:
        folder, _name = split_path(path)
        with self._lock:
            self._folder(folder, doing, path)
            if path in self._entries:
                raise storage_error(errno.EEXIST, doing=doing, where=self._where(path))
            self._entries[path] = data

    def _folder(self, names: tuple[str, ...], doing: str, path: str) -> None:
        for count in range(len(names) + 1):
            key = "/".join(names[:count])
            if key not in self._entries:
                raise storage_error(errno.ENOENT, doing=doing, where=self._where(path))
            if self._entries[key] is not None:
                raise storage_error(errno.ENOTDIR, doing=doing, where=self._where(path))

    def _object(self, path: str, doing: str) -> bytearray:
        folder, _name = split_path(path)
        try:
            self._folder(folder, doing, path)
        except ObjectMissingError:
            raise
        except StorageError as exc:
            raise not_an_object(self._where(path), "an object in the place of a folder") from exc
        if path not in self._entries:
            raise storage_error(errno.ENOENT, doing=doing, where=self._where(path))
        data = self._entries[path]
        if data is None:
            raise not_an_object(self._where(path), "a folder")
        return data


class MemoryWriter:
    """Fill one object."""

    def __init__(self, data: bytearray, lock: threading.Lock, where: str) -> None:
        self._data = data
        self._lock = lock
        self._where = where
        self._is_open = True

    def write(self, data: memoryview) -> None:
        """Append all bytes."""
        self._require_open("write")
        with self._lock:
            self._data += byte_view(data)

    def finish(self) -> None:
        """Close."""
        self._require_open("finish")
        self._is_open = False

    def abandon(self) -> None:
        """Close; what was written remains."""
        self._is_open = False

    def _require_open(self, doing: str) -> None:
        if not self._is_open:
            raise RequestError(f"could not {doing}: the writer is closed", where=self._where)


class MemoryAppender:
    """Keep lines in an object of a `MemoryStorage`."""

    def __init__(self, data: bytearray, lock: threading.Lock, where: str) -> None:
        self._data = data
        self._lock = lock
        self._where = where
        self._last_offset: int | None = None
        self._is_open = True

    def append(self, line: bytes) -> None:
        """Add a line."""
        self._add(line)
        self._last_offset = None

    def replace_last(self, line: bytes) -> None:
        """Put a line in the place of the one that this method wrote before."""
        self._last_offset = self._add(line, self._last_offset)

    def close(self) -> None:
        """Close."""
        self._is_open = False

    def _add(self, line: bytes, offset: int | None = None) -> int:
        check_line(line)
        if not self._is_open:
            raise RequestError("could not append: the file is closed", where=self._where)
        with self._lock:
            if offset is not None:
                del self._data[offset:]
            start = len(self._data)
            self._data += line + b"\n"
        return start
