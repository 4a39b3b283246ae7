"""A job that stood still behind its last look for a newer start, and publishes when a successor has the run.

Its checkpoint comes to exist late: it is off the live lineage, no start takes it by itself, and retention lets it go
once the live branch is past it.
"""

from __future__ import annotations

import threading
from typing import Any

import pytest

from safepoint.catalog import GenerationState, examine_all, read_lineage
from safepoint.errors import FencedError, NotFoundError
from safepoint.faults.storage import FaultyStorage
from safepoint.format.names import generation_path
from safepoint.restoring.select import Wish
from safepoint.retention.explain import explain_retention
from safepoint.retention.pins import pin
from safepoint.retention.policy import keep
from safepoint.storage.base import Storage
from safepoint.storage.memory import MemoryStorage
from safepoint.testing.ambient import FakeWorld
from tests.build import flip
from tests.crash.job import Job, newest_step, whole_state

LONGEST_S = 30
RESUMED, LATE = 30, 40
SUPERSEDED, COMMITTED, DELETED = GenerationState.SUPERSEDED, GenerationState.COMMITTED, GenerationState.DELETED


class Standing(FaultyStorage):
    """Stand still before the publish of the manifest of one step."""

    def __init__(self, inner: Storage) -> None:
        super().__init__(inner)
        self.stands, self.goes_on = threading.Event(), threading.Event()
        self.verbs: list[tuple[str, str]] = []

    def run(self, verb: str, path: str, *arguments: Any, **options: Any) -> Any:
        if verb == "publish" and path.endswith("manifest.json") and f"step-{LATE:012d}" in path:
            self.stands.set()
            assert self.goes_on.wait(LONGEST_S)
        self.verbs.append((verb, path))
        return super().run(verb, path, *arguments, **options)


class Zombie:
    """The old job, in a thread of its own; it has passed its look for a newer start when this is made."""

    def __init__(self, storage: Storage, world: FakeWorld, *, full_every: int) -> None:
        self._gate = Standing(storage)
        self._job = Job(self._gate, world, pid=1, keeps=None, full_every=full_every)
        self.errors: list[BaseException] = []
        self._thread = threading.Thread(target=self._live, daemon=True)
        self._thread.start()
        assert self._gate.stands.wait(LONGEST_S)
        assert ("list", "incarnations") in self._gate.verbs[-3:], "it has looked"

    def publish(self) -> None:
        """Let it publish, and try to save once more."""
        self._gate.goes_on.set()
        self._thread.join(LONGEST_S)
        assert not self._thread.is_alive()

    def _live(self) -> None:
        self._job.start()
        self._job.live(10, 20, RESUMED)
        for step in (LATE, LATE + 10):
            try:
                self._job.live(step)
            except FencedError as exc:
                self.errors.append(exc)
        self._job.die()


class Run:
    """A run with the late checkpoint, and with the successor, which goes on from the one before it and saves so often
    before the publish.
    """

    def __init__(self, *, saves: tuple[int, ...] = (), full_every: int = 1) -> None:
        self.storage, self.world, self.pids = MemoryStorage(), FakeWorld(), 1
        zombie = Zombie(self.storage, self.world, full_every=full_every)
        self._full_every = full_every
        self.job = self.begin(takeover=True)
        assert self.resumed == RESUMED
        self.job.live(*saves)
        zombie.publish()
        assert [type(error) for error in zombie.errors] == [FencedError, FencedError], "it learns that it was late"
        found = (entry.text for entry in self.found() if (entry.name.step, entry.name.incarnation) == (LATE, 1))
        self.late = next(found, "")

    def begin(self, wish: Wish | None = None, **options: Any) -> Job:
        self.pids += 1
        keeps, full_every = keep(last=2), self._full_every
        job = Job(self.storage, self.world, pid=self.pids, keeps=keeps, full_every=full_every, **options)
        self.resumed = job.start(wish).step
        assert job.state() == whole_state(self.resumed)
        return job

    def again(self, wish: Wish | None = None) -> int:
        """Let the successor die, start once more, and return what was resumed."""
        self.job.die()
        self.job = self.begin(wish)
        return self.resumed

    def found(self) -> list[Any]:
        return examine_all(self.storage, read_lineage(self.storage))

    def state_of_late(self) -> GenerationState | None:
        return next((entry.state for entry in self.found() if entry.text == self.late), None)

    def explained(self) -> str:
        lineage = read_lineage(self.storage)
        decisions = explain_retention(self.storage, lineage, keep(last=2), incarnation=lineage.newest).decisions
        return next(str(decision) for decision in decisions if decision.generation == self.late)


def test_a_late_publish_is_off_the_lineage_and_no_start_takes_it() -> None:
    """Spec: C6.1, C9.3"""
    run = Run()
    for newest in (RESUMED, 35, LATE, 45):
        if newest > RESUMED:
            run.job.live(newest)
        assert run.again() == newest
        assert run.state_of_late() is (SUPERSEDED if newest <= LATE else DELETED)
    assert newest_step(run.storage) == 45


@pytest.mark.parametrize("saves", [(31,), (39, LATE), (39, 41)])
def test_a_publish_behind_the_successors_first_save_finds_nothing_to_publish(saves: tuple[int, ...]) -> None:
    """The save that was never completed was swept.

    Spec: C12.6
    """
    run = Run(saves=saves)
    assert run.late == ""
    assert run.again() == saves[-1]


def test_a_late_publish_is_not_taken_where_what_is_on_the_lineage_is_damaged() -> None:
    """Spec: C9.3, C10.1"""
    run = Run()
    run.job.live(35)
    newest = next(entry.text for entry in run.found() if entry.state is COMMITTED)
    flip(run.storage, generation_path(newest, "rank-00000-of-00001.safetensors"))
    assert run.again() == RESUMED


def test_a_late_publish_is_taken_only_by_who_asks_for_the_branch() -> None:
    """Spec: C10.5"""
    run = Run()
    run.job.live(35)
    run.job.die()
    with pytest.raises(NotFoundError, match=f"step {LATE}"):
        run.begin(Wish(LATE))
    run.world.states[run.pids] = "gone"
    run.begin(Wish(LATE, branch=True)).live(LATE + 1)
    assert newest_step(run.storage) == LATE + 1


@pytest.mark.parametrize("full_every", [1, 3])
def test_a_late_publish_goes_once_the_live_branch_is_past_it(full_every: int) -> None:
    """Marked at the first save behind it and deleted at the next, also where it refers to an older one.

    Spec: C12.1, C12.5
    """
    run = Run(full_every=full_every)
    for step in (36, 38, LATE):
        run.job.live(step)
        assert run.state_of_late() is SUPERSEDED
        assert "no newer step" in run.explained()
    run.job.live(41)
    assert run.state_of_late() is DELETED
    assert {LATE, 41} <= {entry.name.step for entry in run.found() if entry.state is COMMITTED}
    run.job.live(42)
    assert run.state_of_late() is None
    assert run.again() == 42


def test_a_late_publish_counts_as_no_copy() -> None:
    """It is newer than what the rules keep, and none of it goes for its sake.

    Spec: C12.5
    """
    run = Run()
    run.job.live(36, 38)
    assert [entry.name.step for entry in run.found() if entry.state is COMMITTED] == [38, 36, RESUMED]


def test_a_late_publish_that_is_pinned_stays_and_is_not_chosen() -> None:
    """Spec: C12.8"""
    run = Run()
    assert pin("", LATE, reason="evidence", storage=run.storage) == run.late
    run.job.live(41, 42, 43)
    assert run.state_of_late() is SUPERSEDED
    assert run.again() == 43
