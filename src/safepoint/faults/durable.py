"""The model of a disk at a power cut: which contents the system may find when it comes back.

1. The bytes of a file are durable once it was synced. Until then they may be there, partly there, zeros, or not at all.
2. A name (of a file or a folder, given or taken away) is durable once its folder was synced after the change. Until
   then the name may refer to anything it has referred to since the last sync, or to nothing if that was so; each name
   for itself, in no order.
3. What is not reachable from the root is absent: the files of a lost folder, the bytes of a lost name.

Journalling file systems keep more order than that; nothing here relies on it. Source: Pillai et al., "All File Systems
Are Not Created Equal", OSDI 2014; Zheng et al., "Understanding the Robustness of SSDs under Power Fault", FAST 2013.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from safepoint.faults.chance import Chance

_PAGE_BYTES = 4096

# What a folder holds when the power is back: bytes of each file, None for each folder, by path.
Image = dict[str, "bytes | None"]


@dataclass(slots=True)
class FileNode:
    """Hold a file's bytes; `older` are those before the last change in place, which may come back."""

    data: bytes = b""
    older: bytes = b""
    is_synced: bool = False

    def change(self, data: bytes) -> None:
        """Set other bytes, which are not synced."""
        self.older, self.data, self.is_synced = self.data, data, False


@dataclass(slots=True)
class FolderNode:
    """Hold what each name has referred to since the folder was synced: first what is durable, last what holds now."""

    history: dict[str, list[FileNode | FolderNode | None]] = field(default_factory=dict)

    def current(self, name: str) -> FileNode | FolderNode | None:
        """Return what a name refers to."""
        return self.history.get(name, [None])[-1]

    def give(self, name: str, node: FileNode | FolderNode | None) -> None:
        """Let a name refer to something else, or to nothing."""
        self.history.setdefault(name, [None]).append(node)

    def sync(self) -> None:
        """Make what each name refers to durable."""
        self.history = {name: [values[-1]] for name, values in self.history.items() if values[-1] is not None}


def state_count(node: FileNode | FolderNode | None, seed: int, path: str = "") -> int:
    """Return in how many ways a file or folder may come back; some may be equal."""
    if node is None:
        return 1
    if isinstance(node, FileNode):
        return len(_versions(node, seed, path))
    product = 1
    for name, values in node.history.items():
        product *= sum(state_count(value, seed, _join(path, name)) for value in _distinct(values))
    return product


def numbered_state(node: FileNode | FolderNode | None, number: int, seed: int, path: str = "") -> Image:
    """Return one of the `state_count` ways, by its number."""
    if node is None:
        return {}
    if isinstance(node, FileNode):
        return {path: _versions(node, seed, path)[number]}
    image: Image = {path: None}
    for name in sorted(node.history):
        below = _join(path, name)
        values = _distinct(node.history[name])
        counts = [state_count(value, seed, below) for value in values]
        number, rest = divmod(number, sum(counts))
        index = 0
        while rest >= counts[index]:
            rest -= counts[index]
            index += 1
        image |= numbered_state(values[index], rest, seed, below)
    return image


def extreme_state(
    node: FileNode | FolderNode | None, *, keeps_names: bool, keeps_data: bool, seed: int, path: str = ""
) -> Image:
    """Return the state in which every unsynced name, and all unsynced data, is kept or is lost."""
    if node is None:
        return {}
    if isinstance(node, FileNode):
        return {path: _versions(node, seed, path)[-1 if keeps_data else 0]}
    image: Image = {path: None}
    for name in sorted(node.history):
        value = node.history[name][-1 if keeps_names else 0]
        image |= extreme_state(value, keeps_names=keeps_names, keeps_data=keeps_data, seed=seed, path=_join(path, name))
    return image


def tree_of(image: Image) -> FolderNode:
    """Return the nodes of a disk that came back with these contents, all durable."""
    root = FolderNode()
    for path in sorted(image):
        if not path:
            continue
        names = path.split("/")
        folder = root
        for name in names[:-1]:
            above = folder.current(name)
            assert isinstance(above, FolderNode)
            folder = above
        data = image[path]
        folder.history[names[-1]] = [FolderNode() if data is None else FileNode(data, is_synced=True)]
    return root


def _versions(node: FileNode, seed: int, path: str) -> list[bytes]:
    """Return the bytes that a file may come back with: from all lost to all kept, each once."""
    if node.is_synced:
        return [node.data]
    chance = Chance(seed, path)
    page = chance.below(-(-len(node.data) // _PAGE_BYTES) or 1) * _PAGE_BYTES
    zeroed = bytearray(node.data)
    zeroed[page : page + _PAGE_BYTES] = bytes(len(node.data[page : page + _PAGE_BYTES]))
    versions = [b"", bytes(len(node.data)), chance.prefix(node.data), bytes(zeroed), node.older]
    return [version for version in dict.fromkeys(versions) if version != node.data] + [node.data]


def _distinct(values: list[FileNode | FolderNode | None]) -> list[FileNode | FolderNode | None]:
    return list({id(value): value for value in values}.values())


def _join(path: str, name: str) -> str:
    return f"{path}/{name}" if path else name
