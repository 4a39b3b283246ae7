"""Keep bytes in files of a local or mounted file system.

1. Every folder below the root is opened component by component without following links, and every verb acts relative to
   the folder it has opened; the root itself may be a link.
2. A file is synced before it gets a name that counts; a sync that failed once is final for that file.
3. An object gets its final name by `link`, else by a rename that replaces nothing; both are atomic and exclusive. On a
   file system that offers neither it is created exclusively and then written, so that a reader may see a beginning of
   the bytes: the digest that each published record carries tells it.

Source: the order of steps is that of Pillai et al., "All File Systems Are Not Created Equal", OSDI 2014.
"""

from __future__ import annotations

import contextlib
import errno
import os
import stat
from collections.abc import Generator, Iterator

from safepoint.ambient import Ambient, SystemAmbient
from safepoint.errors import CorruptionError, OutcomeUnknownError, RequestError, StorageError
from safepoint.storage.base import Durability, Entry, byte_view, check_path, names_among, split_path
from safepoint.storage.failures import Translation, not_a_run, storage_error, translated, translated_for_reader
from safepoint.storage.local_files import LocalAppender, LocalWriter, sync_descriptor, write_all
from safepoint.storage.local_naming import name_exclusively
from safepoint.storage.local_open import FOLDER_FLAGS, OpenFile, OpenFolder
from safepoint.storage.local_reads import LocalReader, bring_near, fill_from, read_whole
from safepoint.storage.local_room import free_bytes

_CREATE_FLAGS = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
_APPEND_FLAGS = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOCTTY
_TOKEN_BYTES = 8

# After these a name was certainly not given; any other failure while naming leaves it open.
_REFUSALS = frozenset(
    {
        errno.ENOENT,
        errno.EEXIST,
        errno.ENOTDIR,
        errno.ENAMETOOLONG,
        errno.ENOSPC,
        errno.EDQUOT,
        errno.EACCES,
        errno.EPERM,
        errno.EROFS,
        errno.EINVAL,
    }
)

_NOT_OURS = frozenset({errno.EACCES, errno.EPERM, errno.EINVAL, errno.EROFS, errno.ENOTSUP})


class LocalStorage:
    """Keep objects as files below a root folder, which need not exist.

    Files and folders are made with the permissions that the job's umask leaves.
    """

    def __init__(self, root: str | os.PathLike[str], *, ambient: Ambient | None = None) -> None:
        self._url = os.fspath(root)
        # Joined, not normalised: "link/.." is not what lies above the link's name. Fixed here, because a training
        # script may change its working folder later.
        self._root = os.path.join(os.getcwd(), self._url)
        self._prefix = os.path.join(self._url, "")
        self._ambient = ambient if ambient is not None else SystemAmbient()

    @property
    def url(self) -> str:
        """Return the root as it was given."""
        return self._url

    @property
    def durability(self) -> Durability:
        """Return ``power``: synced files and folders survive the loss of power, as far as the device keeps its word."""
        return "power"

    def free_bytes(self) -> int | None:
        """Return the free bytes of the file system that the root lies on, or would."""
        with translated("look for free room", self._url):
            return free_bytes(self._root)

    def root_exists(self) -> bool:
        """Return whether the root is a folder; something else in its place is a `RequestError`."""
        with translated("look at the root", self._url):
            try:
                mode = os.stat(self._root).st_mode
            except FileNotFoundError:
                return False
            except NotADirectoryError as exc:
                raise not_a_run(self._url) from exc
        if not stat.S_ISDIR(mode):
            raise not_a_run(self._url)
        return True

    def make_root(self) -> None:
        """Create the root and the missing folders above it, and sync the parent of each."""
        missing = [self._root.rstrip("/") or "/"]
        with translated("make the root", self._url):
            while not os.path.isdir(missing[-1]) and os.path.dirname(missing[-1]) != missing[-1]:
                missing.append(os.path.dirname(missing[-1]))
            # The deepest folder that was there already is synced too: an earlier process may have made it and died
            # before it could.
            for folder in reversed(missing):
                is_made = self._make(folder)
                _sync_parent(folder, is_made=is_made)

    def make_folder(self, path: str) -> None:
        """Create a folder and those above it, below the root."""
        names = check_path(path)
        with translated("make a folder", self._where(path)):
            # Most often the folders above it are there, and it is not.
            with contextlib.suppress(FileNotFoundError, FileExistsError), self._folder(names[:-1]) as above:
                os.mkdir(names[-1] if names else ".", dir_fd=above)
                return
            with (folder := self._folder(())):
                for name in names:
                    with contextlib.suppress(FileExistsError):
                        os.mkdir(name, dir_fd=folder.descriptor)
                    folder.step_into(name)

    def sync_folder(self, path: str) -> None:
        """Sync a folder's names to the device."""
        names = check_path(path)
        with translated("sync the folder", self._where(path)), self._folder(names) as folder:
            sync_descriptor(folder)

    def create(self, path: str, *, size_bytes: int = 0) -> LocalWriter:
        """Create a file exclusively and open it for writing."""
        names, name = split_path(path)
        with translated("create", self._where(path)), self._folder(names) as folder:
            descriptor = os.open(name, _CREATE_FLAGS, 0o666, dir_fd=folder)
            return LocalWriter(descriptor, self._where(path), size_bytes=size_bytes)

    def publish(self, path: str, data: bytes) -> None:
        """Write and sync a temporary file, then give it the name exclusively."""
        names, name = split_path(path)
        with contextlib.ExitStack() as stack:
            with translated("publish", self._where(path)):
                folder = stack.enter_context(self._folder(names))
                temporary, identity = self._write_temporary(folder, data, is_synced=True)
            # If we die here, the temporary file remains as garbage and the name is still free.
            try:
                is_named = name_exclusively(folder, temporary, name)
            except OSError as exc:
                if exc.errno == errno.EEXIST and _identity_of(folder, name) == identity:
                    # The first answer of a network file system was lost, and its repetition met our own file.
                    return
                self._raise_unless_refused(exc, path)
            finally:
                _remove(folder, temporary)
            if not is_named:
                self._publish_in_place(folder, name, path, data)

    def put(self, path: str, data: bytes) -> None:
        """Write a temporary file and rename it over the name; nothing is synced."""
        names, name = split_path(path)
        with translated("put", self._where(path)), self._folder(names) as folder:
            temporary, _identity = self._write_temporary(folder, data, is_synced=False)
            try:
                os.replace(temporary, name, src_dir_fd=folder, dst_dir_fd=folder)
            except OSError:
                _remove(folder, temporary)
                raise

    def append(self, path: str) -> LocalAppender:
        """Open a file of lines, creating it."""
        names, name = split_path(path)
        with translated("append", self._where(path)), self._folder(names) as folder:
            descriptor = os.open(name, _APPEND_FLAGS, 0o666, dir_fd=folder)
            if not stat.S_ISREG(os.fstat(descriptor).st_mode):
                os.close(descriptor)
                raise OSError(errno.ENOTDIR, "not a regular file")
            return LocalAppender(descriptor, self._where(path))

    def read(self, path: str, *, limit_bytes: int) -> bytes:
        """Return the whole file; its size is looked at before memory is taken."""
        with self._reading(path), self._opened(path) as (descriptor, size_bytes):
            if size_bytes > limit_bytes:
                raise CorruptionError(
                    "an object is larger than its kind may be",
                    where=self._where(path),
                    expected=f"at most {limit_bytes} bytes",
                    found=f"{size_bytes} bytes",
                )
            return read_whole(descriptor, size_bytes)

    def read_into(self, path: str, offset_bytes: int, buffer: memoryview) -> None:
        """Fill the buffer from a range of the file."""
        if offset_bytes < 0:
            raise RequestError("an offset is negative", where=path, found=offset_bytes)
        view = byte_view(buffer)
        with self._reading(path), self._opened(path) as (descriptor, size_bytes):
            if offset_bytes + len(view) > size_bytes or fill_from(descriptor, view, offset_bytes) < len(view):
                raise CorruptionError(
                    "an object ends too early",
                    where=self._where(path),
                    expected=f"at least {offset_bytes + len(view)} bytes",
                    found=f"{size_bytes} bytes",
                )

    def foresee(self, path: str, step_bytes: int) -> Generator[int, None, None]:
        """Bring the file into the system's cache; see `safepoint.storage.reading.Foreseeing`."""
        with self._reading(path), self._opened(path) as (descriptor, size_bytes):
            for begin in range(0, size_bytes, step_bytes):
                end = min(begin + step_bytes, size_bytes)
                yield end
                bring_near(descriptor, begin, end - begin)

    @contextlib.contextmanager
    def opened(self, path: str, buffer: memoryview, *, is_past_cache: bool = False) -> Iterator[LocalReader]:
        """Open a file for reading in runs; see `safepoint.storage.reading.Streaming`."""
        with self._reading(path), self._opened(path) as (descriptor, size_bytes):
            yield LocalReader(descriptor, size_bytes, buffer, self._where(path), is_past_cache=is_past_cache)

    def size(self, path: str) -> int:
        """Return the size of the opened file."""
        with self._reading(path), self._opened(path) as (_descriptor, size_bytes):
            return size_bytes

    def list(self, path: str) -> list[Entry]:
        """Return the regular files and folders in a folder, sorted by name."""
        names = check_path(path)
        found: list[Entry] = []
        with translated_for_reader("list", self._where(path)):
            try:
                with self._folder(names) as folder, os.scandir(folder) as entries:
                    found = [entry for entry in map(_entry_of, entries) if entry is not None]
            except FileNotFoundError:
                return []
        return sorted(found, key=lambda entry: entry.name)

    def names(self, path: str) -> dict[str, bool]:
        """Return what `list` does, asking no file for its size; see `safepoint.storage.naming.Naming`."""
        names = check_path(path)
        with translated_for_reader("list", self._where(path)):
            try:
                with self._folder(names) as folder, os.scandir(folder) as entries:
                    found = {one.name: one.is_dir(follow_symlinks=False) for one in entries if _is_plain(one)}
            except FileNotFoundError:
                return {}
        return {name: found[name] for name in sorted(names_among(found))}

    def delete(self, path: str) -> None:
        """Unlink a file."""
        names, name = split_path(path)
        with (
            translated("delete", self._where(path)),
            contextlib.suppress(FileNotFoundError),
            self._folder(names) as folder,
        ):
            os.unlink(name, dir_fd=folder)

    def delete_folder(self, path: str) -> None:
        """Remove an empty folder."""
        names, name = split_path(path)
        with (
            translated("delete the folder", self._where(path)),
            contextlib.suppress(FileNotFoundError),
            self._folder(names) as folder,
        ):
            os.rmdir(name, dir_fd=folder)

    def _where(self, path: str) -> str:
        return self._prefix + path

    def _folder(self, names: tuple[str, ...]) -> OpenFolder:
        return OpenFolder(self._root, names)

    def _make(self, folder: str) -> bool:
        """Make the root or a folder above it, and return whether it was not there."""
        try:
            os.mkdir(folder)
        except (FileExistsError, NotADirectoryError) as exc:
            if not os.path.isdir(folder):
                raise not_a_run(self._url) from exc
            return False
        except FileNotFoundError as exc:
            # The folder above it stands: some file systems let nobody make one, and say so by this.
            raise StorageError(
                "could not make the run's folder: the file system makes none there",
                where=self._url,
                found=f"ENOENT (no folder {folder} could be made)",
                remedy="Choose a place where folders can be made and written to.",
                errno=exc.errno,
            ) from exc
        return True

    def _reading(self, path: str) -> Translation:
        return translated_for_reader("read", self._where(path))

    def _opened(self, path: str) -> OpenFile:
        names, name = split_path(path)
        return OpenFile(self._folder(names), name, self._where(path))

    def _write_temporary(self, folder: int, data: bytes, *, is_synced: bool) -> tuple[str, tuple[int, int]]:
        """Write a temporary file; return its name and identity. A failure leaves no file."""
        temporary = f".tmp-{self._ambient.token(_TOKEN_BYTES)}"
        descriptor = os.open(temporary, _CREATE_FLAGS, 0o666, dir_fd=folder)
        try:
            try:
                write_all(descriptor, memoryview(data))
                if is_synced:
                    sync_descriptor(descriptor)
                status = os.fstat(descriptor)
            finally:
                os.close(descriptor)
        except BaseException:
            _remove(folder, temporary)
            raise
        return temporary, (status.st_dev, status.st_ino)

    def _publish_in_place(self, folder: int, name: str, path: str, data: bytes) -> None:
        with translated("publish", self._where(path)):
            descriptor = os.open(name, _CREATE_FLAGS, 0o666, dir_fd=folder)
        try:
            try:
                write_all(descriptor, memoryview(data))
                sync_descriptor(descriptor)
            finally:
                os.close(descriptor)
        except OSError as exc:
            # Not removed: a reader may have seen it complete already.
            raise self._unknown(path, exc) from exc

    def _raise_unless_refused(self, exc: OSError, path: str) -> None:
        if exc.errno in _REFUSALS:
            raise storage_error(exc.errno, doing="publish", where=self._where(path)) from exc
        raise self._unknown(path, exc) from exc

    def _unknown(self, path: str, exc: OSError) -> OutcomeUnknownError:
        return OutcomeUnknownError(
            "an error came while an object was given its name; it may be there or not",
            where=self._where(path),
            found=str(exc),
            remedy="Look whether it is there, and whether it is ours, before trying again.",
        )


def _sync_parent(folder: str, *, is_made: bool) -> None:
    try:
        descriptor = os.open(os.path.dirname(folder) or "/", FOLDER_FLAGS)
        try:
            sync_descriptor(descriptor)
        finally:
            os.close(descriptor)
    except OSError as exc:
        # Above a root that was there already lies what is not ours: another owner's folder, a file system of its kind.
        if is_made or exc.errno not in _NOT_OURS:
            raise


def _entry_of(entry: os.DirEntry[str]) -> Entry | None:
    try:
        check_path(entry.name)
        status = entry.stat(follow_symlinks=False)
    except (RequestError, FileNotFoundError):
        # Another process removed it while we were listing, or no path of a storage can name it.
        return None
    if stat.S_ISDIR(status.st_mode):
        return Entry(entry.name, is_folder=True, size_bytes=0)
    if stat.S_ISREG(status.st_mode):
        return Entry(entry.name, is_folder=False, size_bytes=status.st_size)
    return None


def _is_plain(entry: os.DirEntry[str]) -> bool:
    """Return whether a name is that of a file or a folder, and no link; the system has told when it listed."""
    return entry.is_file(follow_symlinks=False) or entry.is_dir(follow_symlinks=False)


def _identity_of(folder: int, name: str) -> tuple[int, int] | None:
    try:
        status = os.stat(name, dir_fd=folder, follow_symlinks=False)
    except OSError:
        return None
    return status.st_dev, status.st_ino


def _remove(folder: int, name: str) -> None:
    # Best effort: what remains is a temporary object, which no reader takes for anything else.
    with contextlib.suppress(OSError):
        os.unlink(name, dir_fd=folder)
