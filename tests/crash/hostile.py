"""Change a run's files as somebody would who knows the format: fields are changed, and digests are made right again.

So a change is met by the checks behind the digests. Nothing here uses the code that reads or writes runs.
"""

from __future__ import annotations

import contextlib
import copy
import json
import signal
from collections.abc import Iterator, Mapping, Sequence
from types import FrameType
from typing import Any

import xxhash
from hypothesis import strategies as st

from tests.format.sealing import sealed_tree, tree_of
from tests.format.test_hostile import POISON

# Where, how, and with what a tree is changed.
Change = tuple[int, str, int]
HOWS = ("delete", "double", "replace", "replace", "nudge", "nudge", "exchange", "rename")
changes = st.lists(st.tuples(st.integers(0, 5000), st.sampled_from(HOWS), st.integers(0, 5000)), min_size=1, max_size=3)

# What one execution may take beyond what the process has: far more than it needs, far less than what files name.
ROOM_BYTES = 1 << 30
LONGEST_CPU_S = 20


def changed(tree: Any, steps: Sequence[Change]) -> Any:
    """Return a tree with some of its places changed."""
    tree = copy.deepcopy(tree)
    for place, how, with_what in steps:
        places = list(_places(tree))
        if places:
            owner, key = places[place % len(places)]
            _change(owner, key, how, with_what, places)
    return tree


def with_change(files: Mapping[str, bytes], path: str, steps: Sequence[Change]) -> dict[str, bytes]:
    """Return a run in which a file is changed, with every digest and size right that speaks of it."""
    found = dict(files)
    if path.endswith(".safetensors"):
        _change_header(found, path, steps)
    elif path.endswith(".jsonl"):
        lines = [json.loads(line) for line in found[path].splitlines()]
        found[path] = b"\n".join(json.dumps(line).encode() for line in changed(lines, steps)) + b"\n"
    elif path.endswith("of-00001.json"):
        _put_index(found, path, changed(tree_of(found[path]), steps))
    elif path.endswith(".json"):
        found[path] = _resealed(found[path], changed(tree_of(found[path]), steps))
    else:
        found[path] = json.dumps(changed([found[path].decode()], steps)).encode()
    return found


def place_in_chain(path: str) -> int:
    """Return what to change first: a change makes right the records further on, which have to have their form still."""
    return 0 if path.endswith(".safetensors") else 1 if path.endswith("of-00001.json") else 2


def with_state_change(files: Mapping[str, bytes], path: str, item: int, steps: Sequence[Change]) -> dict[str, bytes]:
    """Return a run in which the plain tree of one item of an index is changed, with every digest right."""
    found = dict(files)
    tree = tree_of(found[path])
    indexed = list(tree["items"].values())[item % len(tree["items"])]
    indexed["plain"] = next(iter(changed([indexed["plain"]], steps)), None)
    _put_index(found, path, tree)
    return found


@contextlib.contextmanager
def bounded() -> Iterator[None]:
    """Let what runs inside have so much memory and time of the processor; beyond it is an error that has no type."""
    import resource

    with open("/proc/self/statm") as file:
        size_bytes = int(file.read().split()[0]) * resource.getpagesize()
    before, hard = resource.getrlimit(resource.RLIMIT_AS)
    handler = signal.signal(signal.SIGVTALRM, _too_long)
    resource.setrlimit(resource.RLIMIT_AS, (size_bytes + ROOM_BYTES, hard))
    signal.setitimer(signal.ITIMER_VIRTUAL, LONGEST_CPU_S)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
        resource.setrlimit(resource.RLIMIT_AS, (before, hard))
        signal.signal(signal.SIGVTALRM, handler)


def _too_long(number: int, frame: FrameType | None) -> None:
    raise AssertionError(f"one execution took more than {LONGEST_CPU_S} s of the processor")


def _places(tree: Any) -> Iterator[tuple[Any, Any]]:
    keys = range(len(tree)) if isinstance(tree, list) else list(tree) if isinstance(tree, dict) else ()
    for key in keys:
        yield tree, key
        yield from _places(tree[key])


def _change(owner: Any, key: Any, how: str, with_what: int, places: list[tuple[Any, Any]]) -> None:
    if how == "delete":
        del owner[key]
    elif how == "double" and isinstance(owner, list):
        owner.insert(key, copy.deepcopy(owner[key]))
    elif how == "rename" and isinstance(owner, dict):
        names = [other for _, other in places if isinstance(other, str)]
        owner[names[with_what % len(names)]] = owner.pop(key)
    elif how == "exchange":
        other, name = places[with_what % len(places)]
        owner[key] = copy.deepcopy(other[name])
    elif how == "nudge":
        owner[key] = _nudged(owner[key], with_what)
    else:
        owner[key] = copy.deepcopy(POISON[with_what % len(POISON)])


def _nudged(value: Any, with_what: int) -> Any:
    """Return nearly the same value."""
    if isinstance(value, bool) or value is None:
        return not value
    if isinstance(value, int):
        return value + (1, -1, 4096, 2**32)[with_what % 4]
    if isinstance(value, str) and value:
        at = with_what % len(value)
        return value[:at] + chr(ord(value[at]) ^ 1) + value[at + 1 :]
    return [value]


def _resealed(old: bytes, tree: Any) -> bytes:
    return sealed_tree(tree) if isinstance(tree, dict) else old


def _put_index(files: dict[str, bytes], path: str, tree: Any) -> None:
    """Put an index in place, and make what the manifest says of it and of its items right, as far as it has a form."""
    new = _resealed(files[path], tree)
    folder, _, name = path.rpartition("/")
    manifest = tree_of(files[f"{folder}/manifest.json"])
    for entry in manifest["objects"]:
        if entry["name"] == name:
            entry.update(size_bytes=len(new), digest=xxhash.xxh3_128_hexdigest(new))
    for item, summary in manifest["items"].items():
        with contextlib.suppress(KeyError, TypeError, AttributeError):
            summary["digest"] = _item_digest(item, tree)
    files[path] = new
    files[f"{folder}/manifest.json"] = sealed_tree(manifest)


def _item_digest(item: str, index: Any) -> str:
    """Return the digest of an item. Spec: F7.3."""
    indexed = index["items"][item]
    lines = [indexed["type"].encode(), _compact(indexed["plain"])]
    for tensor in sorted((one for one in index["tensors"] if one["item"] == item), key=lambda one: one["name"]):
        chunks = [chunk["digest"] for chunk in tensor["chunks"]]
        lines.append(_compact([tensor["name"], tensor["dtype"], tensor["shape"], chunks]))
    return xxhash.xxh3_128_hexdigest(b"\n".join(lines))


def _compact(value: Any) -> bytes:
    return json.dumps(value, separators=(",", ":"), ensure_ascii=False).encode()


def _change_header(files: dict[str, bytes], path: str, steps: Sequence[Change]) -> None:
    """Change a data file's header, and make right what index and manifest say of it."""
    data = files[path]
    index_path = path.replace(".safetensors", ".json")
    index = tree_of(files[index_path])
    begin = index["header_bytes"]
    header = json.dumps(changed(json.loads(data[8:begin]), steps)).encode()
    header += b" " * (-(8 + len(header)) % 4096)
    new = len(header).to_bytes(8, "little") + header
    shift = len(new) - begin
    index.update(header_bytes=len(new), header_digest=xxhash.xxh3_128_hexdigest(new))
    chunks = [chunk for tensor in index["tensors"] for chunk in tensor["chunks"]]
    for chunk in chunks:
        chunk["offset_bytes"] += shift
    chunks.sort(key=lambda chunk: chunk["offset_bytes"])
    parts = [index["header_digest"], *(chunk["digest"] for chunk in chunks)]
    digest = xxhash.xxh3_128_hexdigest(b"".join(map(bytes.fromhex, parts)))
    folder, _, name = path.rpartition("/")
    manifest = tree_of(files[f"{folder}/manifest.json"])
    for entry in [*index["objects"], *manifest["objects"]]:
        if entry["name"] == name and folder.endswith(entry["generation"]):
            entry.update(size_bytes=len(data) + shift, digest=digest)
    files[path] = new + data[begin:]
    files[f"{folder}/manifest.json"] = sealed_tree(manifest)
    _put_index(files, index_path, index)
