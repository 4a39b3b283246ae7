"""How does the work of one save and of one restore, of the leader and of each rank, grow with the number of ranks?

Every rank holds its rows of each of 1,000 tensors, as fully sharded data parallel jobs do, so no two layouts are equal.
The messages of the ranks are made and decoded by the package itself, and wait on a board in memory. The leader runs in
a process of its own on one thread of Python: it receives offers and layouts, divides, proves, tells each rank its part,
receives the ballots, checks them, looks at every object 64 at a time, and publishes the manifest and reads it back. The
storage is memory; each look at an object sleeps, and nothing else does. `first` is a job's first save, to which every
layout is new; `next` the save after it. Peak memory is that of the process, with all messages.

What the same ranks stored is then restored by as many: see `harness/scaled_restore.py`.

    python benchmarks/commit_scale.py [--ranks 8,512,16384] [--alone 8,512] [--stat-ms 1] [--read-ms 5]

To make the messages of 16,384 ranks takes some minutes, which no rank and no leader of a job spends.
"""

from __future__ import annotations

import argparse
import json
import resource
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from harness import scaled_restore
from harness.machine import describe
from harness.played import PlayedBoard, Posted, child, exponents
from safepoint.ambient import SystemAmbient
from safepoint.format.ballot import Ballot
from safepoint.format.columns import encode_columns
from safepoint.format.digest import digest_bytes
from safepoint.format.index import ObjectReference
from safepoint.format.manifest import Conditions, ProgressRecord
from safepoint.format.names import MANIFEST, data_name, generation_path, index_name
from safepoint.format.records import LineageLink
from safepoint.group.board_group import BoardGroup
from safepoint.joining.claim import claim_incarnation
from safepoint.saving.alike import said_by
from safepoint.saving.capture import Snapshot
from safepoint.saving.commit import settle
from safepoint.saving.context import PhaseClock, SaveContext, SaveResult, StagedSave
from safepoint.saving.describe import Place
from safepoint.saving.form import form_of
from safepoint.saving.increment import full
from safepoint.saving.layout import Layouts, columns_of, cut_digest
from safepoint.saving.own_conditions import digest_of, own_of
from safepoint.saving.plan import Agreed, Planner
from safepoint.saving.ring import LiveOrigin, Ring
from safepoint.saving.vote import vote
from safepoint.state.item import CapturedTensor, TensorSpec
from safepoint.state.snapshot import SnapshotItem
from safepoint.storage.memory import MemoryStorage

BOXES = 1000
ROWS, COLUMNS = 4, 1024
GENERATIONS = ("step-000000000001-i000001-00000001", "step-000000000002-i000001-00000002")
SIZE_BYTES = 8192
DEADLINE_S = 600.0
TREE = b'{"layers":1000}'


@dataclass(frozen=True)
class NoBytes:
    """Stand for memory that nothing here reads."""

    nbytes: int

    def copy_into(self, buffer: memoryview) -> None:
        raise AssertionError("the leader's work reads no tensor")

    def in_place(self) -> None:
        return None

    def check(self) -> None:
        return None


def snapshot_of(rank: int, world_size: int, step: int) -> Snapshot:
    """Return what a rank holds: four rows of each tensor."""
    tensors = []
    for number in range(BOXES):
        name = f"layers.{number // 10}.block{number % 10}.weight"
        spec = TensorSpec(name, "bfloat16", (ROWS, COLUMNS), (ROWS * world_size, COLUMNS), (ROWS * rank, 0))
        tensors.append(CapturedTensor(spec, NoBytes(2 * ROWS * COLUMNS)))
    item = SnapshotItem("model", "module", TREE, tuple(tensors), "Shard(0)")
    progress = ProgressRecord(step, step, 0, 0, 0, 0)
    return Snapshot(progress, (item,), Conditions(world_size, 1, 1, {}, {}, {}, {}, None, {}), {}, None, "exact")


def ballot_of(run: str, rank: int, world_size: int, layout: str, generation: str) -> Ballot:
    """Return the ballot of a rank that stored what it holds."""
    names = (data_name(rank, world_size), index_name(rank, world_size))
    objects = tuple(ObjectReference(generation, name, SIZE_BYTES, digest_bytes(name.encode())) for name in names)
    return Ballot(run, generation, 1, rank, world_size, layout, objects, shares={"model": digest_bytes(b"%d" % rank)})


class SlowStorage(MemoryStorage):
    """Answer for objects that all ranks stored, each time after a sleep."""

    def __init__(self, stat_s: float) -> None:
        super().__init__()
        self.looks = 0
        self._stat_s = stat_s

    def size(self, path: str) -> int:
        self.looks += 1
        time.sleep(self._stat_s)
        return SIZE_BYTES


def prepare(world_size: int, folder: Path) -> dict[str, Any]:
    """Make the messages of all ranks, and return what that took a rank."""
    spent = {
        "layout_of": 0.0,
        "columns_of": 0.0,
        "encode_layout": 0.0,
        "digest_of_what_is_stored": 0.0,
        "encode_ballot": 0.0,
    }

    def timed(name: str, act: Callable[[], Any]) -> Any:
        started = time.perf_counter()
        result = act()
        spent[name] += time.perf_counter() - started
        return result

    offers, layouts, ballots = [], [], []
    leaders = digest_of(own_of(snapshot_of(0, world_size, 1).conditions))
    for rank in range(world_size):
        snapshot = snapshot_of(rank, world_size, 1)
        layout, _ = timed("layout_of", lambda: Layouts().of(snapshot.items))  # noqa: B023 (called at once)
        columns = timed("columns_of", lambda: columns_of(layout))  # noqa: B023
        layouts.append(timed("encode_layout", lambda: encode_columns(columns)))  # noqa: B023
        stored = timed("digest_of_what_is_stored", lambda: cut_digest(layout.boxes))  # noqa: B023
        offered = {"model": ["module", digest_bytes(b"tree"), "", "Shard(0)"]}
        offer = {
            "step": 1,
            "layout": columns.digest,
            "division": "",
            "items": offered,
            "said": said_by(snapshot, leaders=leaders),
        }
        offers.append(msgspec.msgpack.encode(offer))
        ballot = ballot_of("", rank, world_size, stored, GENERATIONS[0])
        ballots.append(timed("encode_ballot", lambda: msgspec.json.encode(ballot)))  # noqa: B023
    for name, messages in (("offers", offers), ("layouts", layouts), ("ballots", ballots)):
        Posted(folder / name).write(iter(messages))
    largest = {name: max(map(len, messages)) for name, messages in (("offer", offers), ("layout", layouts))}
    return {
        "ms_each": {name: round(1e3 * seconds / world_size, 3) for name, seconds in spent.items()},
        "largest_message_bytes": {**largest, "ballot": max(map(len, ballots))},
    }


def lead(world_size: int, folder: Path, stat_s: float) -> dict[str, Any]:
    """Save twice as the leader, and return what each part took and what it weighed."""
    waiting: dict[str, list[bytes]] = {}
    ambient, storage = SystemAmbient(), SlowStorage(stat_s)
    board = PlayedBoard(lambda topic: next(messages for kind, messages in waiting.items() if topic.endswith(kind)))
    storage.make_root()
    claim = claim_incarnation(storage, ambient, world_size=world_size, versions={})
    group = BoardGroup(board, rank=0, world_size=world_size, ambient=ambient)
    planner = Planner(group, deadline_s=DEADLINE_S, compares_every=0)
    context = SaveContext(storage, group, ambient, claim, (LineageLink(1, None, 0),), DEADLINE_S, planner)
    layouts = Posted(folder / "layouts").read()
    offers = [msgspec.msgpack.decode(one) for one in Posted(folder / "offers").read()]
    ballots = [msgspec.json.decode(one, type=Ballot) for one in Posted(folder / "ballots").read()]
    known = ""
    found: dict[str, Any] = {}
    for name, step, generation in zip(("first", "next"), (1, 2), GENERATIONS, strict=True):
        told = [{**one, "step": step, "division": known} for one in offers]
        voted = [_of(one, claim.run, generation) for one in ballots]
        waiting["/offers/parts"] = [b"v" + msgspec.msgpack.encode(one) for one in told]
        waiting["/layouts/parts"] = [b"v" + message for message in layouts]
        waiting["/ballot"] = [msgspec.json.encode(one) for one in voted]
        del told, voted
        board.posts = board.posted_bytes = storage.looks = 0
        found[name] = _save(context, board, ballots[0], world_size, step, generation)
        known = found[name].pop("division")
        found[name]["looks_at_objects"] = storage.looks
        found[name]["messages_of_the_leader"] = {"count": board.posts, "bytes": board.posted_bytes}
        layouts = []
    found["peak_memory_mib"] = round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024)
    return found


def _of(ballot: Ballot, run: str, generation: str) -> Ballot:
    objects = tuple(msgspec.structs.replace(one, generation=generation) for one in ballot.objects)
    return msgspec.structs.replace(ballot, run=run, generation=generation, objects=objects)


def _save(
    context: SaveContext, board: PlayedBoard, own: Ballot, world_size: int, step: int, generation: str
) -> dict[str, Any]:
    context.storage.make_folder(generation_path(generation))
    taken = snapshot_of(0, world_size, step)
    times, cpu = [time.perf_counter()], time.process_time()
    agreed: Agreed = context.planner.agree(1, lambda: taken, lambda step: generation)
    times.append(time.perf_counter())
    place = Place(generation, 0, world_size, frozenset())
    form = form_of((), is_alone=False)
    nothing = LiveOrigin(form, (), Ring())
    save = StagedSave(agreed.plan, agreed.snapshot, place, form, full(form), nothing, None, agreed.division, (), "", {})
    mine = _of(own, context.claim.run, generation)
    result: SaveResult = settle(
        context, save, mine, vote(context.group, mine, deadline_s=DEADLINE_S), PhaseClock(context, {})
    )
    times.append(time.perf_counter())
    context.planner.note(generation, "committed")
    size = len(context.storage.read(generation_path(generation, MANIFEST), limit_bytes=1 << 30))
    part = board.parts.get(next(iter(board.parts), ""), b"")
    return {
        "seconds": round(times[-1] - times[0], 3),
        "seconds_of_processor": round(time.process_time() - cpu, 3),
        "meet_s": round(times[1] - times[0], 3),
        "vote_and_publish_s": round(times[2] - times[1], 3),
        "phases_s": {name: round(seconds, 3) for name, seconds in result.timings_s.items()},
        "manifest_bytes": size,
        "part_message_bytes": len(part),
        "division": agreed.plan.division,
    }


def main() -> None:
    """Measure each number of ranks, and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", default="8,64,256", help="numbers of ranks")
    parser.add_argument("--stat-ms", type=float, default=1.0, help="the sleep of each look at an object")
    parser.add_argument("--read-ms", type=float, default=5.0, help="the sleep of each read of an index or a manifest")
    parser.add_argument("--alone", default="8,64", help="of these numbers, those that one process restores as well")
    parser.add_argument("--folder", type=Path, help="where the messages of the ranks are, or shall be")
    parser.add_argument("--part", choices=["prepare", "lead", *scaled_restore.PARTS])
    options = parser.parse_args()
    sizes = [int(size) for size in options.ranks.split(",")]
    stat_s, read_s = options.stat_ms / 1e3, options.read_ms / 1e3
    if options.part in scaled_restore.PARTS:
        print(json.dumps(scaled_restore.PARTS[options.part](sizes[0], options.folder, stat_s, read_s)))
        return
    if options.part:
        act = prepare if options.part == "prepare" else lambda size, folder: lead(size, folder, stat_s)
        print(json.dumps(act(sizes[0], options.folder)))
        return
    found: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as temporary:
        for size in sizes:
            folder = (options.folder or Path(temporary)) / str(size)
            folder.mkdir(parents=True, exist_ok=True)
            common = ("--ranks", str(size), "--folder", str(folder))
            common += ("--stat-ms", str(options.stat_ms), "--read-ms", str(options.read_ms))
            kept = {part: folder / f"{part}.json" for part in ("prepare", "prepare_restore")}
            for part, path in kept.items():
                if not path.exists():
                    path.write_text(json.dumps(child(__file__, "--part", part, *common)))
            found[str(size)] = {
                "leader": child(__file__, "--part", "lead", *common),
                "rank": json.loads(kept["prepare"].read_text()),
                "restore": {
                    "leader": child(__file__, "--part", "lead_restore", *common),
                    "rank": child(__file__, "--part", "rank_restore", *common),
                },
            }
            if str(size) in options.alone.split(","):
                found[str(size)]["restore"]["alone"] = child(__file__, "--part", "alone_restore", *common)
    growth = {
        f"{save}.{what}": exponents(sizes, [found[str(size)]["leader"][save][what] for size in sizes])
        for save in ("first", "next")
        for what in ("seconds", "seconds_of_processor")
    }
    for who in ("leader", "rank"):
        values = [found[str(size)]["restore"][who]["seconds"] for size in sizes]
        growth[f"restore.{who}.seconds"] = exponents(sizes, values)
    print(
        json.dumps(
            {
                "question": __doc__.splitlines()[0],
                "simulated": {
                    "boxes_per_rank": BOXES,
                    "stat_ms": options.stat_ms,
                    "stats_at_once": 64,
                    "read_ms": options.read_ms,
                },
                "by_ranks": found,
                "growth_exponents": growth,
                "machine": describe(Path.cwd()),
            },
            indent=2,
        )
    )


if __name__ == "__main__":
    main()
