"""A job of several ranks without torch: threads that save items of plain bytes into one storage.

The weights are a function of the step alone, so that any mixture of two saves shows.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from safepoint.catalog import GenerationState, examine_all, read_lineage
from safepoint.errors import SafepointError
from safepoint.evidence import Evidence
from safepoint.faults.group import MessageFault, MessageScript
from safepoint.format.encoding import INDEX_LIMIT_BYTES
from safepoint.format.extent import element_count
from safepoint.format.index import Index, Tensor, decode_index
from safepoint.format.manifest import Manifest, ProgressRecord
from safepoint.format.names import generation_path, index_name
from safepoint.format.stencil import encode_text
from safepoint.joining.follower import RankSession
from safepoint.membership import Membership, record_start
from safepoint.restoring.restore import Restored
from safepoint.restoring.select import Wish
from safepoint.retention.after_save import Retention
from safepoint.retention.policy import Keep
from safepoint.saver import Saver
from safepoint.saving.background import SaveHandle
from safepoint.saving.capture import Snapshot, capture
from safepoint.saving.context import SaveResult
from safepoint.schedule import Schedule
from safepoint.state.item import CapturedItem, CapturedTensor, Item, TensorSpec
from safepoint.storage.base import Storage
from safepoint.storage.memory import MemoryStorage
from safepoint.testing.ambient import FakeWorld
from safepoint.testing.ranks import RankOutcome, RankThread, RankThreads
from tests.crash.job import CONDITIONS, BytesSource

DEADLINE_S = 10.0
LENGTH = 96


def weights_at(step: int, length: int = LENGTH) -> bytes:
    """Return the weights that every correct run has after this step."""
    return hashlib.shake_256(f"weights {step}".encode()).digest(length)


@dataclass(slots=True)
class Held:
    """An item that captures whatever boxes and plain value a test gives it."""

    name: str
    type: str
    plain: object = None
    tensors: Sequence[CapturedTensor] = ()
    division: str = ""

    def capture(self) -> CapturedItem:
        return CapturedItem(self.type, encode_text(self.plain), tuple(self.tensors), self.division)


def box(name: str, whole: bytes, start: int, stop: int, *, is_leaders: bool = False) -> CapturedTensor:
    """Return the bytes of some rows of a tensor of single bytes."""
    spec = TensorSpec(name, "uint8", (stop - start,), (len(whole),), (start,))
    return CapturedTensor(spec, BytesSource(whole[start:stop]), is_leaders)


def replicated(rank: int, world_size: int, step: int) -> list[Held]:
    """Return what a rank of a data-parallel job holds: all weights, a scheduler, and a stream of its own."""
    return [
        Held("model", "module", {"step": step}, [box("w", weights_at(step), 0, LENGTH)]),
        Held("schedule", "scheduler", {"count": step}),
        Held("rng", "random", {"seed": rank, "step": step}),
    ]


def sharded(rank: int, world_size: int, step: int) -> list[Held]:
    """Return what a rank of a sharded job holds: its part of the weights; the last part may be shorter, or empty."""
    length = -(-LENGTH // world_size)
    start, stop = min(rank * length, LENGTH), min((rank + 1) * length, LENGTH)
    model = Held("model", "module", {"step": step}, [box("w", weights_at(step), start, stop)])
    return [model, *replicated(rank, world_size, step)[1:]]


Holding = Callable[[int, int, int], Sequence[Held]]


@dataclass(slots=True)
class Rank:
    """One rank of the job, in its own thread."""

    thread: RankThread
    storage: Storage
    holds: Holding
    keeps: Keep | None
    compares_every: int
    refuses_difference: bool
    schedule: Schedule
    is_background: bool
    step: int = 0
    saver: Saver = field(init=False)
    membership: Membership = field(init=False)
    session: RankSession | None = None

    def __post_init__(self) -> None:
        group, ambient = self.thread.group, self.thread.ambient
        self.saver = Saver(
            self.storage,
            group,
            ambient,
            schedule=self.schedule,
            retention=Retention(ambient, policy=self.keeps),
            background=self.is_background,
            deadline_s=DEADLINE_S,
            evidence=Evidence(None, {}),
            compares_every=self.compares_every,
            refuses_difference=self.refuses_difference,
        )
        self.saver.close()
        self.membership = Membership(
            self.storage,
            ambient,
            group=group,
            environment=dict,
            takeover=True,
            restart=True,
            deadline_s=DEADLINE_S,
        )

    def start(self) -> None:
        """Join, and begin at step 0."""
        session = self.session = self.membership.join(Wish())
        beat = getattr(session, "_heartbeat", None)
        if beat is not None:
            beat._stop.set()
        record_start(session, Restored(), is_branch=False)
        self.membership.hold(session)

    def save(self, step: int, *, is_scheduled: bool = False) -> SaveResult | None:
        """Save this step; return what came of it at once, or raise."""
        self.step = step
        handle = SaveHandle(is_explicit=not is_scheduled)
        self.saver.save(self.membership.require(), self._snapshot, handle)
        return handle.result

    def try_to_save(self, step: int) -> SaveResult | SafepointError:
        """Save this step; return the result or the error."""
        try:
            return self.save(step)  # type: ignore[return-value]  # not in the background
        except SafepointError as exc:
            return exc

    def _snapshot(self) -> Snapshot:
        items: Sequence[Item] = self.holds(self.thread.rank, self.thread.group.world_size, self.step)  # type: ignore[assignment]
        progress = ProgressRecord(self.step, self.step, self.step, 0, 0, 0)
        return Snapshot(progress, capture(items), CONDITIONS, {}, None, "approximate")


class Ranks:
    """A job of several ranks on one storage."""

    def __init__(
        self,
        world_size: int,
        holds: Holding = replicated,
        *,
        storage: Storage | None = None,
        storages: Mapping[int, Storage] | None = None,
        faults: Mapping[int, MessageFault | MessageScript] | None = None,
        keeps: Keep | None = None,
        world: FakeWorld | None = None,
        first_pid: int = 1,
        compares_every: int = 1,
        refuses_difference: bool = True,
        schedule: Schedule | None = None,
        is_background: bool = False,
    ) -> None:
        self.storage = storage or MemoryStorage()
        scripts = {
            rank: MessageScript((fault,)) if isinstance(fault, MessageFault) else fault
            for rank, fault in (faults or {}).items()
        }
        self.threads = RankThreads(world_size, scripts=scripts, world=world, first_pid=first_pid)
        self.world = self.threads.world
        # Whoever reads the clock takes part in it, so that each rank is made in its own thread.
        self._make = lambda thread: Rank(
            thread,
            (storages or {}).get(thread.rank, self.storage),
            holds,
            keeps,
            compares_every,
            refuses_difference,
            schedule or Schedule(),
            is_background,
        )

    def run(self, act: Callable[[Rank], object]) -> tuple[RankOutcome[object], ...]:
        """Start on all ranks, then act on each; return how each ended."""

        def body(thread: RankThread) -> object:
            rank: Rank = self._make(thread)
            rank.start()
            return act(rank)

        return self.threads.run(body)


def manifests(storage: Storage) -> list[Manifest]:
    """Return the manifests of all committed generations, the newest first."""
    found = examine_all(storage, read_lineage(storage))
    return [one.manifest for one in found if one.state is GenerationState.COMMITTED and one.manifest is not None]


def indexes(storage: Storage, manifest: Manifest) -> list[Index]:
    """Return the indexes of all ranks of a generation."""
    paths = [
        generation_path(manifest.generation, index_name(rank, manifest.world_size))
        for rank in range(manifest.world_size)
    ]
    return [decode_index(storage.read(path, limit_bytes=INDEX_LIMIT_BYTES), where=path) for path in paths]


def stored_bytes(storage: Storage, index: Index, tensor: Tensor) -> bytes:
    """Return the stored bytes of one box."""
    data = bytearray()
    for chunk in tensor.chunks:
        reference = index.objects[chunk.object]
        piece = bytearray(chunk.size_bytes)
        storage.read_into(generation_path(reference.generation, reference.name), chunk.offset_bytes, memoryview(piece))
        data += piece
    return bytes(data)


def whole(storage: Storage, manifest: Manifest, item: str, name: str) -> bytes:
    """Return a tensor of single bytes, put together from all ranks; zeros where none stored anything."""
    data: bytearray | None = None
    filled = 0
    for index in indexes(storage, manifest):
        for tensor in index.tensors:
            if (tensor.item, tensor.name) != (item, name):
                continue
            data = data if data is not None else bytearray(element_count(tensor.global_shape))
            (start,), (length,) = tensor.offset, tensor.shape
            data[start : start + length] = stored_bytes(storage, index, tensor)
            filled += length
    assert data is not None and filled == len(data)
    return bytes(data)
