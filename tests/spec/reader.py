"""Read a run by docs/spec/v1.md alone: nothing of the package is imported here.

`read(folder)` returns the newest committed generation on the live lineage, every byte checked: name, manifest, tensors
as {item/name: [(dtype, global shape, offset, shape, bytes) of each box]}, plain values by item.
"""

from __future__ import annotations

import base64
import json
import re
from collections import OrderedDict
from pathlib import Path
from typing import Any

import safetensors
import xxhash

GENERATION = re.compile(r"step-\d{12}-i\d{6}-[0-9a-f]{8}", re.ASCII)
digest = xxhash.xxh3_128_hexdigest


def read(root: Path) -> tuple[str, dict[str, Any], dict[str, list[Any]], dict[str, Any]]:
    names = [entry.name for entry in (root / "generations").iterdir() if GENERATION.fullmatch(entry.name)]
    chain = live_chain(root, names, run := run_id(root, names))
    for name in sorted(names, key=order, reverse=True):  # C10.1
        try:
            if manifest := committed(root, name, run, chain):
                return name, manifest, *contents(root, name, manifest)
        except (OSError, ValueError):
            continue  # C10.2: the next older one
    raise ValueError(f"no generation of {root} can be used")


def record(path: Path) -> dict[str, Any] | None:  # F2; None when it is absent or damaged
    try:
        data = path.read_bytes()
        if data[:11] != b'{"digest":"' or data[43:45] != b'",' or data[11:43].decode() != digest(data[43:]):
            return None
        tree: dict[str, Any] = json.loads(data)
    except (OSError, ValueError):
        return None
    if tree.get("format", 1) != 1 or tree.get("flags", []):
        raise NotImplementedError(f"{path} was written by a newer format")  # F1.2
    return tree


def order(name: str) -> tuple[int, int, str]:  # F5.2
    return int(name[5:17]), int(name[19:25]), name[26:]


def manifest_of(root: Path, name: str, run: str | None) -> dict[str, Any] | None:
    tree = record(root / "generations" / name / "manifest.json")
    return tree if tree and tree["generation"] == name and run in (None, tree["run"]) else None  # F6.3


def run_id(root: Path, names: list[str]) -> str:  # F6.6
    records = [record(root / "run.json")] + [record(path) for path in (root / "incarnations").glob("[0-9]*.json")]
    runs = {tree["run"] for tree in records if tree} or {m["run"] for n in names if (m := manifest_of(root, n, None))}
    (run,) = runs
    return str(run)


def live_chain(root: Path, names: list[str], run: str) -> list[Any]:  # C9.2, C9.5
    numbers = {int(path.name[:6]) for path in (root / "incarnations").glob("[0-9]" * 6 + ".*")}  # F6.4
    numbers |= {order(n)[1] for n in names if manifest_of(root, n, run)}
    for number in sorted(numbers, reverse=True):
        base = root / "incarnations" / f"{number:06d}"
        if record(base.with_suffix(".refused.json")):
            continue
        resumed = record(base.with_suffix(".resumed.json"))
        links = resumed["chain"] if resumed and resumed["incarnation"] == number else None
        told = [m["lineage"] for n in names if order(n)[1] == number and (m := manifest_of(root, n, run))]
        if links or told:
            return links or told[0]
        if base.with_suffix(".resumed.json").exists():
            raise ValueError(f"{base}.resumed.json")
    return []


def committed(root: Path, name: str, run: str, chain: list[Any]) -> dict[str, Any] | None:  # C8.1
    numbers = [link["incarnation"] for link in chain]
    following = chain[numbers.index(order(name)[1]) + 1 :][:1]  # C9.3
    mark = record(root / "generations" / name / "deleted.json") or {"incarnation": 0}  # C12.3
    is_valid = mark["incarnation"] in numbers and (mark["run"], mark["generation"]) == (run, name)
    is_held = name == chain[-1]["resumed"] or (root / "generations" / name / "pinned.json").exists()  # C12.8
    is_left = any(order(name)[0] > link["step"] for link in following)
    return None if is_left or (is_valid and not is_held) else manifest_of(root, name, run)


def contents(root: Path, name: str, manifest: dict[str, Any]) -> tuple[dict[str, list[Any]], dict[str, Any]]:
    files = {}
    for entry in manifest["objects"]:
        data = (root / "generations" / entry["generation"] / entry["name"]).read_bytes()
        if len(data) != entry["size_bytes"]:
            raise ValueError(entry["name"])
        files[entry["generation"], entry["name"]] = entry, data
    tensors, plain = {}, {}  # type: dict[str, list[Any]], dict[str, Any]
    for rank in range(manifest["world_size"]):
        entry, data = files[name, f"rank-{rank:05d}-of-{manifest['world_size']:05d}.json"]
        if digest(data) != entry["digest"]:
            raise ValueError(f"{entry['name']} is damaged")
        index = json.loads(data)
        sources = [files[source["generation"], source["name"]] for source in index["objects"]]
        for tensor in index["tensors"]:
            part = b""
            for chunk in tensor["chunks"]:  # F3.8, F3.10
                piece = sources[chunk["object"]][1][chunk["offset_bytes"] :][: chunk["size_bytes"]]
                if digest(piece) != chunk["digest"]:
                    raise ValueError(f"{entry['name']}: {tensor['item']}/{tensor['name']}")
                part += piece
            box = *(tensor[field] for field in ("dtype", "global_shape", "offset", "shape")), part
            tensors.setdefault(f"{tensor['item']}/{tensor['name']}", []).append(box)
        check_file(index, sources, name)
        plain |= {item: value(entry["plain"]) for item, entry in index["items"].items()}
    return tensors, plain


def check_file(index: dict[str, Any], sources: list[Any], name: str) -> None:  # F3.1 to F3.3, F3.9, F3.10
    number, (entry, data) = next((n, source) for n, source in enumerate(sources) if source[0]["generation"] == name)
    chunks = [chunk for tensor in index["tensors"] for chunk in tensor["chunks"] if chunk["object"] == number]
    parts = [index["header_digest"]] + [c["digest"] for c in sorted(chunks, key=lambda c: int(c["offset_bytes"]))]
    begin, whole = index["header_bytes"], digest(b"".join(map(bytes.fromhex, parts)))
    if begin % 4096 or digest(data[:begin]) != index["header_digest"] or whole != entry["digest"]:
        raise ValueError(entry["name"])
    safetensors.deserialize(data)  # F3.1: refuses holes, overlaps and trailing bytes


def value(form: Any) -> Any:  # F4.1; what has no builtin type stays (tag, payload)
    if isinstance(form, list):
        return [value(element) for element in form]
    if not isinstance(form, dict):
        return form
    tag, payload = next(iter(form.items()), ("", None))
    if not tag.startswith("$"):
        return {key: value(element) for key, element in form.items()}
    return BUILDERS.get(tag, lambda p: (tag, p))(payload)


BUILDERS: dict[str, Any] = {
    "$float": lambda p: float(p) if p in ("nan", "inf", "-inf") else float.fromhex(p),
    "$int": lambda p: int(p, 16),
    "$str": lambda p: bytes.fromhex(p).decode("utf-8", "surrogatepass"),
    "$complex": lambda p: complex(value({"$float": p[0]}), value({"$float": p[1]})),
    "$bytes": base64.b64decode,
    "$tuple": lambda p: tuple(value(p)),
    "$set": lambda p: set(value(p)),
    "$dict": lambda p: {value(k): value(v) for k, v in p},
    "$ordered": lambda p: OrderedDict((value(k), value(v)) for k, v in p),
}
