"""A restore of what many ranks stored, by as many ranks or by one process, with one of them at work.

Every rank holds four rows of each of 1,000 tensors. Indexes are made and sealed by the package itself, each for the
moment in which it is needed: those of 16,384 ranks are seven gigabytes of text. `lead_restore` is the leader's part:
it decodes the manifest, looks at every object 64 at a time, tells each rank what it reads, reads its own index, and
proves from the reports of all ranks, which were made beforehand. `rank_restore` is the part of a
rank: the manifest that it is told, its index, what it tells the leader, and its plan. `alone_restore` is one process
that reads all indexes; to make their texts is not counted. Each look at an object and each read of an index or of the
manifest sleeps; nothing else does. Peak memory is that of the process, with all messages.
"""

from __future__ import annotations

import json
import resource
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec

from harness.played import PlayedBoard, Posted
from safepoint.ambient import SystemAmbient
from safepoint.catalog import Lineage, examine
from safepoint.format.chunks import IndexReader
from safepoint.format.digest import digest_bytes, digest_file
from safepoint.format.encoding import seal
from safepoint.format.index import Chunk, Index, IndexedItem, ObjectReference, Tensor
from safepoint.format.manifest import Conditions, ItemSummary, Manifest, ProgressRecord
from safepoint.format.names import GenerationName, data_name, index_name
from safepoint.format.records import LineageLink
from safepoint.format.state_digest import add_digests, joint_digest, rank_share
from safepoint.group.board_group import BoardGroup
from safepoint.restoring.deal import deal_boxes, deal_state, told_manifest
from safepoint.restoring.examine import ItemReport, Share, examine_share
from safepoint.restoring.find import lacking, wanted_by
from safepoint.restoring.plan import plan_reads
from safepoint.restoring.stored import StoredBoxes, StoredIndex
from safepoint.restoring.together import Ranks
from safepoint.restoring.union import Union
from safepoint.restoring.validate import Common, Own, state_of
from safepoint.state.item import TensorSpec
from safepoint.storage.memory import MemoryStorage

GENERATION = "step-000000000001-i000001-00000001"
RUN = "0123456789abcdef"
BOXES = 1000
ROWS, COLUMNS = 4, 1024
BOX_BYTES = 2 * ROWS * COLUMNS
HEADER_BYTES = 204_800
DEADLINE_S = 1800.0
SAMPLE = 20
# One process that reads all is measured up to so many ranks.
MOST_ALONE = 2048
NOTHING = add_digests(())


def index_of(rank: int, world_size: int) -> Index:
    """Return the index of a rank."""
    tensors, digests, begin = [], [], HEADER_BYTES
    for number in range(BOXES):
        name = f"layers.{number // 10}.block{number % 10}.weight"
        digest = digest_bytes(b"%d of %d" % (number, rank))
        chunk = Chunk((0, ROWS), 0, begin, BOX_BYTES, digest)
        whole = (ROWS * world_size, COLUMNS)
        tensors.append(Tensor("model", name, "bfloat16", whole, (ROWS * rank, 0), (ROWS, COLUMNS), (chunk,)))
        digests.append(digest)
        begin += BOX_BYTES
    header = digest_bytes(b"%d" % rank)
    reference = ObjectReference(GENERATION, data_name(rank, world_size), begin, digest_file(header, digests))
    items = {"model": IndexedItem("module", {"layers": BOXES})} if rank == 0 else {}
    return Index(GENERATION, rank, world_size, HEADER_BYTES, header, (reference,), items, tuple(tensors))


class IndexStorage(MemoryStorage):
    """Make the text of an index when it is read, after a sleep; `making_s` is the processor's time for that."""

    def __init__(self, world_size: int, stat_s: float = 0.0, read_s: float = 0.0) -> None:
        super().__init__()
        self.making_s = 0.0
        self.sizes: dict[str, int] = {}
        self._world_size = world_size
        self._stat_s = stat_s
        self._read_s = read_s

    def read(self, path: str, *, limit_bytes: int) -> bytes:
        time.sleep(self._read_s)
        name = path.rpartition("/")[2]
        if not name.startswith("rank-"):
            return super().read(path, limit_bytes=limit_bytes)
        began = time.thread_time()
        text = seal(index_of(int(name[5:10]), self._world_size))
        self.making_s += time.thread_time() - began
        return text

    def size(self, path: str) -> int:
        time.sleep(self._stat_s)
        return self.sizes[path.rpartition("/")[2]]


class Whole:
    """Be a target of any size that nothing is read into."""

    def __init__(self, offset: tuple[int, ...], shape: tuple[int, ...]) -> None:
        self.offset = offset
        self.shape = shape
        self.nbytes = 2 * shape[0] * shape[1]

    def boxes(self) -> list[Whole]:
        """Return the one box."""
        return [self]


def targets_of(rank: int, world_size: int) -> dict[str, dict[str, Any]]:
    """Return what a rank of so many fills."""
    box = Whole((ROWS * rank, 0), (ROWS, COLUMNS))
    return {"model": {f"layers.{number // 10}.block{number % 10}.weight": box for number in range(BOXES)}}


def prepare_restore(world_size: int, folder: Path, stat_s: float, read_s: float) -> dict[str, Any]:
    """Make the manifest, and the report of each rank."""
    objects: list[ObjectReference] = []
    shares: list[str] = []

    def reports() -> Iterator[bytes]:
        for listed, share, report in told_by(range(world_size), world_size):
            objects.extend(listed)
            shares.append(share)
            yield report

    Posted(folder / "reports").write(reports())
    write_manifest(world_size, folder, objects, shares)
    return {"objects": len(objects)}


def write_manifest(world_size: int, folder: Path, objects: list[ObjectReference], shares: list[str]) -> None:
    """Write the manifest of what ranks listed."""
    digest = joint_digest("module", shares)
    (folder / "manifest").write_bytes(seal(manifest_of(world_size, summary_of(world_size, digest), tuple(objects))))


def summary_of(world_size: int, digest: str) -> ItemSummary:
    """Return what the manifest says of the one item."""
    return ItemSummary("module", "sharded", BOXES, BOXES * BOX_BYTES * world_size, digest)


def told_by(ranks: range, world_size: int) -> Iterator[tuple[list[ObjectReference], str, bytes]]:
    """Yield the objects of each rank, its share in the item's digest, and its report.

    Only indexes that are read later are written out for their sizes and digests: those of some ranks, or all for one
    process that reads all.
    """
    reader, draft = IndexReader(), manifest_of(world_size, summary_of(world_size, NOTHING), ())
    for rank in ranks:
        index = index_of(rank, world_size)
        text = seal(index) if world_size <= MOST_ALONE or rank in sampled(world_size) else b""
        reference = ObjectReference(GENERATION, index_name(rank, world_size), len(text), digest_bytes(text))
        share, own, common = rank_share(None, index.tensors, tree_of=None, boxes_of=None), NOTHING, NOTHING
        if index.items:
            tree = (index.items["model"].plain,)
            own, common = (rank_share(tree, (), tree_of=of, boxes_of=None) for of in (rank, None))
        stored = StoredIndex.of(index, reader.columns_of(index))
        trees = {"model": {rank: index.items["model"].plain}} if index.items else {}
        found = {"model": ItemReport(len(index.items), share, own, common)}
        report = Share((stored,), trees, index.objects, found).report(draft, with_boxes=rank != 0)
        yield [*index.objects, reference], add_digests((share, common)), msgspec.msgpack.encode(report)


def sampled(world_size: int) -> range:
    """Return some ranks, rank 0 among them."""
    return range(0, world_size, max(1, world_size // SAMPLE))


def manifest_of(world_size: int, summary: ItemSummary, objects: tuple[ObjectReference, ...]) -> Manifest:
    """Return the manifest of what all ranks stored."""
    conditions = Conditions(world_size, 1, 1, {}, {}, {}, {}, None, {})
    return Manifest(
        format=1,
        flags=(),
        run=RUN,
        generation=GENERATION,
        incarnation=1,
        step=1,
        boundary="after_update",
        created="2025-03-01T12:00:00+00:00",
        lineage=(LineageLink(1, None, 0),),
        progress=ProgressRecord(1, 1, 0, 0, 0, 0),
        world_size=world_size,
        mesh={"model": ["Shard(0)"]},
        contract="exact",
        items={"model": summary},
        objects=objects,
        layout="0" * 32,
        conditions=conditions,
        metrics={},
        probe=None,
        agreement="off",
        timings_s={},
        nonce="00",
    )


def opened(world_size: int, folder: Path, stat_s: float, read_s: float) -> tuple[IndexStorage, Manifest, float]:
    """Return the storage, and the manifest as the leader finds it, with the seconds that this took."""
    storage = IndexStorage(world_size, stat_s, read_s)
    storage.make_root()
    storage.make_folder("generations")
    storage.make_folder(f"generations/{GENERATION}")
    text = (folder / "manifest").read_bytes()
    storage.publish(f"generations/{GENERATION}/manifest.json", text)
    for entry in json.loads(text)["objects"]:
        storage.sizes[entry["name"]] = entry["size_bytes"]
    name = GenerationName.parse(GENERATION)
    began = time.perf_counter()
    assert name is not None
    found = examine(storage, name, Lineage(RUN, chain=(LineageLink(1, None, 0),)))
    assert found.manifest is not None, found.refusal
    return storage, found.manifest, time.perf_counter() - began


def lead_restore(world_size: int, folder: Path, stat_s: float, read_s: float) -> dict[str, Any]:
    """Restore as the leader of as many ranks."""
    storage, manifest, examine_s = opened(world_size, folder, stat_s, read_s)
    reports = [b"v" + message for message in Posted(folder / "reports").read()]
    nothing = [b"v" + msgspec.msgpack.encode([])] * world_size
    succeeded = [b"v" + msgspec.msgpack.encode(None)] * world_size
    exchanges = iter([reports, nothing, succeeded, nothing])
    board = PlayedBoard(lambda topic: next(exchanges))
    group = BoardGroup(board, rank=0, world_size=world_size, ambient=SystemAmbient())
    ranks = Ranks(group, deadline_s=DEADLINE_S)
    times, processor = [time.perf_counter()], time.process_time()
    told = ranks.led(lambda: told_manifest(ranks, manifest), Manifest)
    assert told is not None
    saved = deal_state(ranks, storage, told, full=[manifest])
    times.append(time.perf_counter())
    targets = targets_of(0, world_size)
    reads = plan_reads(deal_boxes(ranks, saved, targets).tensors, targets)
    times.append(time.perf_counter())
    assert len(reads) == BOXES
    return {
        "seconds": round(examine_s + times[-1] - times[0], 3),
        "seconds_of_processor_behind_the_look": round(time.process_time() - processor, 3),
        "manifest_and_look_at_objects_s": round(examine_s, 3),
        "prove_s": round(times[1] - times[0], 3),
        "boxes_and_plan_s": round(times[2] - times[1], 3),
        "report_bytes": max(map(len, reports)),
        "messages_of_the_leader": {"count": board.posts, "bytes": board.posted_bytes},
        "peak_memory_mib": peak_mib(),
    }


def rank_restore(world_size: int, folder: Path, stat_s: float, read_s: float) -> dict[str, Any]:
    """Restore as some of the ranks, and return what that takes each."""
    storage, manifest, _ = opened(world_size, folder, 0.0, read_s)
    references = {entry.name: entry for entry in manifest.objects}
    told = msgspec.msgpack.encode(msgspec.structs.replace(manifest, objects=()))
    del manifest
    spent: list[float] = []
    specs = {}
    for name in targets_of(0, 1)["model"]:
        shape = (ROWS * world_size, COLUMNS)
        specs[name] = TensorSpec(name, "bfloat16", shape, shape, (0, 0))
    for rank in sampled(world_size):
        storage.making_s = 0.0
        began = time.perf_counter()
        known = msgspec.msgpack.decode(told, type=Manifest)
        reference = references[index_name(rank, world_size)]
        share = examine_share(storage, known, [reference], [rank], keeps_own=True)
        report = msgspec.msgpack.encode(share.report(known, with_boxes=True))
        # What all ranks are told in common is small here, and not counted.
        common = {"model": Common(Union({"layers": BOXES}, ()), True, specs)}
        saved = state_of(known, common, Own({}, {}), rank=rank, world_size=world_size)
        targets = targets_of(rank, world_size)
        assert lacking(wanted_by(saved, targets), share, frozenset()) == []
        boxes = StoredBoxes({"model": specs}, share.indexes, frozenset(), rank)
        assert len(plan_reads(boxes, targets)) == BOXES
        spent.append(time.perf_counter() - began - storage.making_s)
    return {
        "seconds": round(sorted(spent)[len(spent) // 2], 4),
        "ranks": len(spent),
        "manifest_told_bytes": len(told),
        "report_bytes": len(report),
        "peak_memory_mib": peak_mib(),
    }


def alone_restore(world_size: int, folder: Path, stat_s: float, read_s: float) -> dict[str, Any]:
    """Read and prove all indexes in one process, and plan to read all."""
    storage, manifest, examine_s = opened(world_size, folder, stat_s, read_s)
    times, processor = [time.perf_counter()], time.process_time()
    ranks = Ranks()
    saved = deal_state(ranks, storage, manifest, full=[manifest])
    proven, made_s = time.process_time() - processor, storage.making_s
    times.append(time.perf_counter())
    proven_mib = peak_mib()
    box = Whole((0, 0), (ROWS * world_size, COLUMNS))
    targets = {"model": {name: box for name in targets_of(0, 1)["model"]}}
    reads = plan_reads(deal_boxes(ranks, saved, targets).tensors, targets)
    times.append(time.perf_counter())
    assert sum(len(one.chunks) for one in reads) == BOXES * world_size
    return {
        "manifest_and_look_at_objects_s": round(examine_s, 3),
        "read_and_prove_s_of_processor": round(proven - made_s, 3),
        "plan_s": round(times[2] - times[1], 3),
        "peak_memory_mib_when_proven": proven_mib,
        "peak_memory_mib": peak_mib(),
    }


def peak_mib() -> int:
    """Return the most memory that this process has had."""
    return round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024)


PARTS: dict[str, Callable[[int, Path, float, float], dict[str, Any]]] = {
    "prepare_restore": prepare_restore,
    "lead_restore": lead_restore,
    "rank_restore": rank_restore,
    "alone_restore": alone_restore,
}
