"""Write runs by hand: records, indexes and data files as the format says, without the code that saves."""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from msgspec.structs import replace

from safepoint.format.digest import digest_bytes, digest_file
from safepoint.format.encoding import seal
from safepoint.format.index import Chunk, Index, IndexedItem, ObjectReference, Tensor
from safepoint.format.manifest import Conditions, ItemSummary, Manifest, ProgressRecord
from safepoint.format.names import MANIFEST, data_name, generation_path, incarnation_path, index_name
from safepoint.format.records import Holder, IncarnationRecord, LineageLink, RefusedRecord, ResumedRecord, RunRecord
from safepoint.format.state_digest import item_digest, joint_digest, rank_share
from safepoint.storage.base import Storage

RUN = "a1b2c3d4e5f60718"
CREATED = "2025-03-01T12:00:00+00:00"
_ALIGNMENT = 4096
_SIZES = {"float32": 4, "float16": 2, "bfloat16": 2, "float64": 8, "int64": 8, "int32": 4, "uint8": 1, "bool": 1}
_CODES = {"float32": "F32", "float16": "F16", "bfloat16": "BF16", "float64": "F64", "int64": "I64", "int32": "I32"}


@dataclass(frozen=True)
class Values:
    """Hold one tensor, or one rank's box of one: element type, shape, dense bytes; `rows` cuts it into chunks.

    `borrowed` names, by row range, chunks that lie in the data file of an ancestor instead: (generation, offset).
    """

    dtype: str
    shape: tuple[int, ...]
    data: bytes
    global_shape: tuple[int, ...] | None = None
    offset: tuple[int, ...] | None = None
    rows: int | None = None
    borrowed: Mapping[tuple[int, int], tuple[ObjectReference, int]] = field(default_factory=dict)


def floats(*values: float, rows: int | None = None) -> Values:
    """Return a vector of float32."""
    return Values("float32", (len(values),), struct.pack(f"<{len(values)}f", *values), rows=rows)


def integers(*values: int) -> Values:
    """Return a vector of int64."""
    return Values("int64", (len(values),), struct.pack(f"<{len(values)}q", *values))


MODEL = {"model": {"weight": floats(1.0, 2.0, 3.0, 4.0), "bias": floats(0.5)}}


def write_run(storage: Storage, *, run: str = RUN) -> None:
    """Write the run's record and its empty folders."""
    storage.make_root()
    for folder in ("incarnations", "generations"):
        storage.make_folder(folder)
    record = RunRecord(format=1, flags=(), run=run, created=CREATED, nonce="00")
    storage.publish("run.json", seal(record))


def write_incarnation(
    storage: Storage,
    number: int,
    *,
    chain: Sequence[LineageLink] | None = None,
    run: str = RUN,
    is_closed: bool = True,
    is_refused: bool = False,
    holder: Holder | None = None,
) -> None:
    """Write a start of the job. `chain` ends with its own link; None stands for one that recorded nothing."""
    holder = holder or Holder("host", "user", "boot", "namespace", 1, "1")
    record = IncarnationRecord(1, run, number, f"{number:02x}", holder, 1, CREATED, {"torch": "2.13.0"})
    storage.publish(incarnation_path(number), seal(record))
    if is_closed:
        storage.put(incarnation_path(number, "alive"), b"closed")
    if is_refused:
        refused = RefusedRecord(1, run, number, "another start was alive", "00")
        storage.publish(incarnation_path(number, "refused.json"), seal(refused))
    if chain is not None:
        own = chain[-1]
        resumed = ResumedRecord(1, run, number, own.resumed, own.step, tuple(chain), (), False, "00")
        storage.publish(incarnation_path(number, "resumed.json"), seal(resumed))


def begin(storage: Storage) -> tuple[LineageLink, ...]:
    """Write a run whose first start resumed nothing, and return its chain."""
    chain = (LineageLink(1, None, 0),)
    write_run(storage)
    write_incarnation(storage, 1, chain=chain)
    return chain


def write_generation(
    storage: Storage,
    step: int,
    *,
    chain: Sequence[LineageLink],
    items: Mapping[str, Mapping[str, Values]] = MODEL,
    ranks: Sequence[Mapping[str, Mapping[str, Values]]] | None = None,
    plain: Mapping[str, Any] | None = None,
    plain_of_ranks: Sequence[Mapping[str, Any]] | None = None,
    types: Mapping[str, str] | None = None,
    kinds: Mapping[str, str] | None = None,
    holders: Mapping[str, tuple[int, ...]] | None = None,
    nonce: str = "0badcafe",
    run: str = RUN,
    metrics: Mapping[str, Any] | None = None,
    is_committed: bool = True,
    created: str = CREATED,
    timings_s: Mapping[str, float] | None = None,
) -> str:
    """Write a generation of the chain's last incarnation and return its name.

    Args:
        items: The tensors of a run of one process, by item and name.
        ranks: The tensors of each rank instead, for a run of several.
        plain: The plain tree of each item, in JSON form.
        types: The type of each item; a module by default.
        plain_of_ranks: The plain trees that each rank stores instead, in JSON form; by default the first rank stores
            those of all items, and each rank its own of an item of the kind ``per_rank``.
        holders: The ranks that had an item, where they were not all.
        is_committed: Whether the manifest is written.
    """
    incarnation = chain[-1].incarnation
    generation = f"step-{step:012d}-i{incarnation:06d}-{nonce}"
    storage.make_folder(generation_path(generation))
    parts = ranks if ranks is not None else [items]
    objects: list[ObjectReference] = []
    indexes: list[Index] = []
    for rank, part in enumerate(parts):
        if plain_of_ranks is not None:
            trees = plain_of_ranks[rank]
        else:
            named = [name for name in parts[0] if rank == 0 or (kinds or {}).get(name) == "per_rank"]
            trees = {name: (plain or {}).get(name) for name in named}
        indexed = {name: IndexedItem((types or {}).get(name, "module"), tree) for name, tree in trees.items()}
        references, index = _write_rank(storage, generation, rank, len(parts), part, indexed)
        objects += references
        indexes.append(index)
    if is_committed:
        names = dict.fromkeys(name for index in indexes for name in index.items)
        summaries = {
            name: replace(_summary(indexes, name, (kinds or {}).get(name, "global")), ranks=(holders or {}).get(name))
            for name in names
        }
        manifest = _manifest(generation, step, tuple(chain), summaries, objects, len(parts), run, metrics, created)
        manifest = replace(manifest, timings_s=dict(timings_s or {}))
        storage.publish(generation_path(generation, MANIFEST), seal(manifest))
    return generation


def rewrite(storage: Storage, path: str, data: bytes) -> None:
    """Put other bytes in the place of an object."""
    storage.put(path, data)


def flip(storage: Storage, path: str, offset: int = -1) -> None:
    """Flip the lowest bit of one byte of an object."""
    data = bytearray(storage.read(path, limit_bytes=1 << 30))
    data[offset] ^= 1
    storage.put(path, bytes(data))


def _summary(indexes: Sequence[Index], name: str, kind: str) -> ItemSummary:
    tensors = [tensor for index in indexes for tensor in index.tensors if tensor.item == name]
    (type_name,) = {index.items[name].type for index in indexes if name in index.items}
    size_bytes = sum(chunk.size_bytes for tensor in tensors for chunk in tensor.chunks)
    if len(indexes) == 1:
        digest = item_digest(indexes[0].items[name], tensors)
    else:
        is_common = kind != "per_rank" and sum(name in index.items for index in indexes) == 1
        shares = [
            rank_share(
                (index.items[name].plain,) if name in index.items else None,
                [tensor for tensor in index.tensors if tensor.item == name],
                tree_of=None if is_common else index.rank,
                boxes_of=index.rank if kind == "per_rank" else None,
            )
            for index in indexes
        ]
        digest = joint_digest(type_name, shares)
    return ItemSummary(type_name, kind, len(tensors), size_bytes, digest)


def _manifest(
    generation: str,
    step: int,
    chain: tuple[LineageLink, ...],
    items: dict[str, ItemSummary],
    objects: list[ObjectReference],
    world_size: int,
    run: str,
    metrics: Mapping[str, Any] | None,
    created: str,
) -> Manifest:
    unique = {(entry.generation, entry.name): entry for entry in objects}
    return Manifest(
        format=1,
        flags=(),
        run=run,
        generation=generation,
        incarnation=chain[-1].incarnation,
        step=step,
        boundary="after_update",
        created=created,
        lineage=chain,
        progress=ProgressRecord(step, step, 32 * step, 0, 0, 0),
        world_size=world_size,
        mesh=None,
        contract="exact",
        items=items,
        objects=tuple(unique.values()),
        layout="0" * 32,
        conditions=Conditions(
            world_size, 32, 1, {"torch": "2.13.0"}, {}, {}, {}, {"lr": {"$float": (0.125).hex()}}, {}
        ),
        metrics=dict(metrics or {}),
        probe=None,
        agreement="off",
        timings_s={},
        nonce="00",
    )


def _write_rank(
    storage: Storage,
    generation: str,
    rank: int,
    world_size: int,
    items: Mapping[str, Mapping[str, Values]],
    plain: Mapping[str, IndexedItem],
) -> tuple[list[ObjectReference], Index]:
    placed = sorted(
        ((item, name, values) for item, named in items.items() for name, values in named.items()),
        key=lambda entry: (-_SIZES[entry[2].dtype], entry[0], entry[1]),
    )
    header, body = _data_file(placed)
    ancestors = list({id(r): r for _, _, v in placed for r, _ in v.borrowed.values()}.values())
    tensors, end, digests = [], len(header), []
    for item, name, values in placed:
        chunks = []
        for start, stop, piece in _cut(values):
            digest = digest_bytes(piece)
            if (start, stop) in values.borrowed:
                reference, offset = values.borrowed[start, stop]
                chunks.append(Chunk((start, stop), 1 + ancestors.index(reference), offset, len(piece), digest))
                continue
            chunks.append(Chunk((start, stop), 0, end, len(piece), digest))
            digests.append(digest)
            end += len(piece)
        whole = values.global_shape if values.global_shape is not None else values.shape
        offset_of_box = values.offset if values.offset is not None else (0,) * len(values.shape)
        tensors.append(Tensor(item, name, values.dtype, whole, offset_of_box, values.shape, tuple(chunks)))
    header_digest = digest_bytes(header)
    own = ObjectReference(generation, data_name(rank, world_size), end, digest_file(header_digest, digests))
    index = Index(
        generation=generation,
        rank=rank,
        world_size=world_size,
        header_bytes=len(header),
        header_digest=header_digest,
        objects=(own, *ancestors),
        items=dict(plain),
        tensors=tuple(tensors),
    )
    text = seal(index)
    storage.publish(generation_path(generation, own.name), header + body)
    storage.publish(generation_path(generation, index_name(rank, world_size)), text)
    listing = ObjectReference(generation, index_name(rank, world_size), len(text), digest_bytes(text))
    return [own, listing, *ancestors], index


def _data_file(placed: Sequence[tuple[str, str, Values]]) -> tuple[bytes, bytes]:
    entries: dict[str, object] = {"__metadata__": {"format": "pt"}}
    body = b""
    for item, name, values in placed:
        kept = [(start, stop, piece) for start, stop, piece in _cut(values) if (start, stop) not in values.borrowed]
        own = b"".join(piece for _, _, piece in kept)
        rows = [sum(stop - start for start, stop, _ in kept)] if values.borrowed else list(values.shape[:1])
        if own or not values.data:
            entries[f"{item}/{name}"] = {
                "dtype": _CODES.get(values.dtype, "U8"),
                "shape": [*rows, *values.shape[1:]],
                "data_offsets": [len(body), len(body) + len(own)],
            }
        body += own
    text = json.dumps(entries).encode("ascii")
    text += b" " * (-(8 + len(text)) % _ALIGNMENT)
    return len(text).to_bytes(8, "little") + text, body


def _cut(values: Values) -> list[tuple[int, int, bytes]]:
    count = values.shape[0] if values.shape else 1
    if not values.data:
        return []
    row_bytes = len(values.data) // count
    step = values.rows or count
    return [
        (start, min(start + step, count), values.data[start * row_bytes : min(start + step, count) * row_bytes])
        for start in range(0, count, step)
    ]
