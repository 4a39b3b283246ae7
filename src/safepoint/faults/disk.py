"""A disk whose power may be cut at any time, and which tells what may then be left."""

from __future__ import annotations

import copy
import hashlib
import threading
from collections.abc import Iterator

from safepoint.errors import ObjectMissingError, RequestError
from safepoint.faults.chance import Chance
from safepoint.faults.durable import (
    FileNode,
    FolderNode,
    Image,
    extreme_state,
    numbered_state,
    state_count,
    tree_of,
)
from safepoint.storage.base import Appender, Durability, Entry, ObjectWriter, check_path, split_path
from safepoint.storage.memory import MemoryStorage

# Equal states are drawn again and again when few differ; so many draws for each state wanted, then it is enough.
_DRAWS_PER_STATE = 20
_NO_LIMIT_BYTES = 1 << 62


class SimulatedDisk:
    """Keep objects in memory, and beside them what of each is durable (see `safepoint.faults.durable`).

    A process that lives sees every change at once. `crash_states` says what the next process may find after a power
    cut;
    each state is such a disk itself, so that a recovery can be cut too.
    """

    def __init__(self, url: str = "memory://disk") -> None:
        self._memory = MemoryStorage(url)
        self._lock = threading.RLock()
        self._root: FolderNode | None = None
        self._temporary_count = 0

    def crash_states(self, seed: int, limit: int) -> Iterator[SimulatedDisk]:
        """Return what may be found after a power cut at this instant, each state once.

        All states when they are at most `limit`. Else a sample that begins with the four extremes: names lost or kept,
        each with data lost or kept. Where a file may be torn at any of many places, the seed chooses one place. The
        same seed gives the same states in the same order. Later changes of this disk do not show in them.
        """
        if limit < 4:
            raise RequestError("too few crash states are asked for", expected="at least 4", found=limit)
        with self._lock:
            root = copy.deepcopy(self._root)
        return (_disk_of(image, self.url) for image in _distinct(_images(root, seed, limit), limit))

    @property
    def url(self) -> str:
        """Return the URL given at construction."""
        return self._memory.url

    @property
    def durability(self) -> Durability:
        """Return ``power``: what was synced is in every crash state."""
        return "power"

    def free_bytes(self) -> int | None:
        """Return None: it has no size."""
        return None

    def root_exists(self) -> bool:
        """Return whether the root is there."""
        return self._memory.root_exists()

    def make_root(self) -> None:
        """Create the root, durably."""
        with self._lock:
            self._memory.make_root()
            self._root = self._root or FolderNode()

    def make_folder(self, path: str) -> None:
        """Create folders whose names are not yet durable."""
        names = check_path(path)
        with self._lock:
            self._memory.make_folder(path)
            folder = self._folder(())
            for name in names:
                below = folder.current(name)
                if not isinstance(below, FolderNode):
                    below = FolderNode()
                    folder.give(name, below)
                folder = below

    def sync_folder(self, path: str) -> None:
        """Make the names in a folder durable."""
        with self._lock:
            self._memory.sync_folder(path)
            self._folder(check_path(path)).sync()

    def create(self, path: str, *, size_bytes: int = 0) -> DiskWriter:
        """Create an object whose name and bytes are not yet durable."""
        names, name = split_path(path)
        with self._lock:
            inner = self._memory.create(path)
            node = FileNode()
            self._folder(names).give(name, node)
        return DiskWriter(inner, node, self._lock)

    def publish(self, path: str, data: bytes) -> None:
        """Name durable bytes; the name is not yet durable, and a temporary one may come back."""
        names, name = split_path(path)
        with self._lock:
            self._memory.publish(path, data)
            folder = self._folder(names)
            node = FileNode(bytes(data), is_synced=True)
            temporary = f".tmp-{self._temporary_count:016x}"
            self._temporary_count += 1
            folder.give(temporary, node)
            folder.give(name, node)
            folder.give(temporary, None)

    def put(self, path: str, data: bytes) -> None:
        """Replace an object; neither its name nor its bytes are durable."""
        names, name = split_path(path)
        with self._lock:
            self._memory.put(path, data)
            self._folder(names).give(name, FileNode(bytes(data)))

    def append(self, path: str) -> DiskAppender:
        """Open a file of lines, which never becomes durable."""
        names, name = split_path(path)
        with self._lock:
            inner = self._memory.append(path)
            folder = self._folder(names)
            node = folder.current(name)
            if not isinstance(node, FileNode):
                node = FileNode()
                folder.give(name, node)
        appender = DiskAppender(self._memory, path, inner, node, self._lock)
        appender.record()
        return appender

    def read(self, path: str, *, limit_bytes: int) -> bytes:
        """Return the whole object as a living process sees it."""
        return self._memory.read(path, limit_bytes=limit_bytes)

    def read_into(self, path: str, offset_bytes: int, buffer: memoryview) -> None:
        """Fill a buffer from the object."""
        self._memory.read_into(path, offset_bytes, buffer)

    def size(self, path: str) -> int:
        """Return the object's size."""
        return self._memory.size(path)

    def list(self, path: str) -> list[Entry]:
        """Return what is in a folder, sorted by name."""
        return self._memory.list(path)

    def delete(self, path: str) -> None:
        """Remove an object, which may come back until its folder is synced."""
        with self._lock:
            self._memory.delete(path)
            self._forget(path)

    def delete_folder(self, path: str) -> None:
        """Remove an empty folder, which may come back until the one above it is synced."""
        with self._lock:
            self._memory.delete_folder(path)
            self._forget(path)

    def _forget(self, path: str) -> None:
        names, name = split_path(path)
        try:
            folder = self._folder(names)
        except KeyError:
            # There was nothing to remove.
            return
        if folder.current(name) is not None:
            folder.give(name, None)

    def _folder(self, names: tuple[str, ...]) -> FolderNode:
        node: FileNode | FolderNode | None = self._root
        for name in names:
            node = node.current(name) if isinstance(node, FolderNode) else None
        if not isinstance(node, FolderNode):
            raise KeyError(names)
        return node

    def _load(self, image: Image) -> None:
        self._root = tree_of(image)
        self._memory.make_root()
        for path in sorted(image):
            data = image[path]
            if data is None:
                self._memory.make_folder(path)
            else:
                self._memory.publish(path, data)


class DiskWriter:
    """Fill one object; its bytes are durable after `finish`."""

    def __init__(self, inner: ObjectWriter, node: FileNode, lock: threading.RLock) -> None:
        self._inner = inner
        self._node = node
        self._lock = lock

    def write(self, data: memoryview) -> None:
        """Append all bytes."""
        with self._lock:
            self._inner.write(data)
            self._node.data += data.tobytes()

    def finish(self) -> None:
        """Make the bytes durable."""
        with self._lock:
            self._inner.finish()
            self._node.is_synced = True

    def abandon(self) -> None:
        """Close; the bytes never become durable."""
        self._inner.abandon()


class DiskAppender:
    """Keep lines whose bytes are never durable."""

    def __init__(
        self, memory: MemoryStorage, path: str, inner: Appender, node: FileNode, lock: threading.RLock
    ) -> None:
        self._memory = memory
        self._path = path
        self._inner = inner
        self._node = node
        self._lock = lock

    def append(self, line: bytes) -> None:
        """Add a line."""
        with self._lock:
            self._inner.append(line)
            self.record()

    def replace_last(self, line: bytes) -> None:
        """Replace the last line."""
        with self._lock:
            self._inner.replace_last(line)
            self.record()

    def close(self) -> None:
        """Close."""
        self._inner.close()

    def record(self) -> None:
        """Take over what the file holds, unless it was removed meanwhile."""
        with self._lock:
            try:
                data = self._memory.read(self._path, limit_bytes=_NO_LIMIT_BYTES)
            except ObjectMissingError:
                return
            if data != self._node.data:
                self._node.change(data)


def _images(root: FolderNode | None, seed: int, limit: int) -> Iterator[Image]:
    count = state_count(root, seed)
    if count <= limit:
        yield from (numbered_state(root, number, seed) for number in range(count))
        return
    for keeps_names in (False, True):
        for keeps_data in (False, True):
            yield extreme_state(root, keeps_names=keeps_names, keeps_data=keeps_data, seed=seed)
    chance = Chance("crash states", seed)
    for _ in range(_DRAWS_PER_STATE * limit):
        yield numbered_state(root, chance.below(count), seed)


def _distinct(images: Iterator[Image], limit: int) -> Iterator[Image]:
    seen: set[bytes] = set()
    for image in images:
        if len(seen) == limit:
            return
        digest = _digest(image)
        if digest not in seen:
            seen.add(digest)
            yield image


def _digest(image: Image) -> bytes:
    digest = hashlib.sha256()
    for path in sorted(image):
        data = image[path]
        digest.update(f"{path}\0{-1 if data is None else len(data)}\0".encode())
        digest.update(data or b"")
    return digest.digest()


def _disk_of(image: Image, url: str) -> SimulatedDisk:
    disk = SimulatedDisk(url)
    if image:
        disk._load(image)
    return disk
