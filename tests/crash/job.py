"""A training job without torch: its whole state is a function of its step, so that any mixture shows.

The job joins, restores, saves and sweeps through the same code as the manager.
"""

from __future__ import annotations

import hashlib
import weakref
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from safepoint.ambient import Ambient
from safepoint.catalog import read_lineage
from safepoint.contract import Contract
from safepoint.errors import Difference, SafepointError
from safepoint.evidence import Evidence
from safepoint.format.manifest import Conditions, ProgressRecord
from safepoint.format.stencil import encode_text
from safepoint.group.solo import SoloGroup
from safepoint.joining.session import Session
from safepoint.membership import Membership, record_start
from safepoint.restoring.match import Choice
from safepoint.restoring.outcome import RestoreReport
from safepoint.restoring.restore import RestoreContext, Restored, restore
from safepoint.restoring.select import Wish
from safepoint.retention.after_save import Retention
from safepoint.retention.policy import Keep, keep
from safepoint.saver import Saver
from safepoint.saving.background import SaveHandle
from safepoint.saving.capture import Snapshot, capture
from safepoint.saving.context import Workspace
from safepoint.saving.increment import Increments
from safepoint.saving.ring import Ring
from safepoint.schedule import Schedule
from safepoint.state.item import CapturedItem, CapturedTensor, Item, Permits, SavedItem, Target, TensorSpec
from safepoint.storage.base import Storage
from safepoint.testing.ambient import FakeAmbient, FakeWorld

CONDITIONS = Conditions(
    world_size=1,
    global_batch=None,
    accumulation=None,
    environment={},
    structure={},
    configuration={},
    datasets={},
    config=None,
    counts={},
)
LAST_TWO = keep(last=2)


def weights_at(step: int) -> bytes:
    """Return the weights that every correct run has after this step."""
    return hashlib.shake_256(f"weights {step}".encode()).digest(300)


@dataclass(slots=True)
class BytesSource:
    data: bytes

    @property
    def nbytes(self) -> int:
        return len(self.data)

    def copy_into(self, buffer: memoryview) -> None:
        buffer[:] = self.data

    def in_place(self) -> memoryview | None:
        return memoryview(self.data)

    def check(self) -> None:
        return None


@dataclass(slots=True)
class BytesTarget:
    data: bytearray
    nbytes: int

    def memory(self) -> memoryview:
        return memoryview(self.data)

    def commit(self) -> None:
        return None


@dataclass(slots=True)
class Weights:
    """An item whose tensor and plain value both tell the step. It is filled in place."""

    name: str
    step: int = 0
    data: bytearray = field(default_factory=lambda: bytearray(weights_at(0)))
    type: str = "plain"

    def go_to(self, step: int) -> None:
        self.step, self.data = step, bytearray(weights_at(step))

    def capture(self) -> CapturedItem:
        spec = TensorSpec("weight", "uint8", (len(self.data),), (len(self.data),), (0,))
        tensor = CapturedTensor(spec, BytesSource(bytes(self.data)))
        return CapturedItem("plain", encode_text({"step": self.step}), (tensor,))

    def check(self, saved: SavedItem) -> Sequence[Difference]:
        return []

    def targets(self, saved: SavedItem, permits: Permits) -> Mapping[str, Target]:
        # Read into the live bytes, as into a module's parameters, so that a restore that fails leaves its traces.
        return {"weight": BytesTarget(self.data, len(self.data))}

    def apply(self, saved: SavedItem, permits: Permits) -> Sequence[str]:
        assert isinstance(saved.plain, dict)
        self.step = saved.plain["step"]
        return []


class Job:
    """One start of the job, as one process of a world."""

    def __init__(
        self,
        storage: Storage,
        world: FakeWorld,
        *,
        pid: int,
        takeover: bool = False,
        host: str = "host",
        variables: dict[str, str] | None = None,
        ambient: Ambient | None = None,
        keeps: Keep | None = LAST_TWO,
        is_background: bool = False,
        piece_bytes: int = 4096,
        full_every: int = 1,
    ) -> None:
        self.storage = storage
        self.world = world
        self.pid = pid
        self.ambient: Ambient = ambient or FakeAmbient(world, pid=pid, host=host, variables=variables)
        self.items: dict[str, Item] = {}
        self.weights = [Weights("first"), Weights("second")]
        self.items.update({entry.name: entry for entry in self.weights})
        if full_every > 1:
            # There has to be something to refer to.
            self.items["frozen"] = Weights("frozen")
        self.membership = Membership(
            storage, self.ambient, group=SoloGroup(), environment=dict, takeover=takeover, restart=False
        )
        self.saver = Saver(
            storage,
            SoloGroup(),
            self.ambient,
            schedule=Schedule(),
            retention=Retention(self.ambient, policy=keeps),
            background=is_background,
            deadline_s=10,
            evidence=Evidence(None, self.items),
        )
        # A file of two pieces, by default, of which the second is filled while the first is written.
        self.saver._workspace = Workspace(ring=Ring(piece_bytes=piece_bytes), increments=Increments(full_every))
        if not is_background:
            self.saver.close()
        self.session: Session | None = None
        self.step = 0

    def start(self, wish: Wish | None = None) -> RestoreReport:
        """Join and restore, like the manager."""
        wish = wish or Wish()
        self.session = session = self.membership.join(wish)
        # A job that a test lets go without an end must not beat on until the tests are over.
        weakref.finalize(self, session._heartbeat._stop.set)
        restored = restore(self.context(), session.lineage, wish, Choice())
        replayed = record_start(session, restored, is_branch=wish.branch)
        self.membership.hold(session)
        self.step = 0 if restored.saved is None else restored.saved.manifest.step
        return restored.report(step=self.step, replayed=replayed)

    def context(self) -> RestoreContext:
        return RestoreContext(self.storage, self.ambient, self.items, Contract("approximate"), None)

    def train_to(self, step: int) -> None:
        """Do the updates up to a step."""
        self.step = step
        for entry in self.weights:
            entry.go_to(step)
        self.membership.require().journal.update(step)

    def save(self, *, is_scheduled: bool = False) -> SaveHandle:
        """Save the boundary, with retention; one that fell due by a schedule may fail with a warning."""
        handle = SaveHandle(is_explicit=not is_scheduled)
        self.saver.save(self.membership.require(), self._snapshot, handle)
        return handle

    def live(self, *steps: int) -> None:
        """Train to each of these steps and save there."""
        for step in steps:
            self.train_to(step)
            self.save()

    def end(self) -> None:
        """End properly."""
        self.membership.leave()

    def die(self) -> None:
        """Be dead, as others see it; nothing more is written by this process."""
        self.world.states[self.pid] = "gone"
        if self.session is not None:
            self.session._heartbeat._stop.set()

    def state(self) -> set[tuple[int, bytes]]:
        """Return what the items hold: one element when they are all of one step."""
        return {(entry.step, bytes(entry.data)) for entry in self.weights}

    def _snapshot(self) -> Snapshot:
        progress = ProgressRecord(self.step, self.step, self.step, 0, 0, 0)
        return Snapshot(progress, capture(list(self.items.values())), CONDITIONS, {}, None, "approximate")


def check_state_is_told(job: Job, error: SafepointError) -> None:
    """Check that what a failed start left is whole, untouched included, or that the error says that it may be mixed."""
    if job.state() not in [whole_state(entry.step) for entry in job.weights]:
        assert "mixture" in str(error), error
        assert "Nothing was changed" not in str(error)


def whole_state(step: int) -> set[tuple[int, bytes]]:
    """Return the only right state of a step."""
    return {(step, weights_at(step))}


def newest_step(storage: Storage) -> int:
    """Return the newest live checkpoint's step as a fresh reader sees it; 0 for none."""
    probe = Weights("first"), Weights("second")
    ambient = FakeAmbient(FakeWorld(), pid=999_999)
    context = RestoreContext(storage, ambient, {entry.name: entry for entry in probe}, Contract("approximate"), None)
    restored: Restored = restore(context, read_lineage(storage), Wish(), Choice())
    return 0 if restored.saved is None else restored.saved.manifest.step
