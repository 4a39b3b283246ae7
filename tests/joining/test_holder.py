"""Who holds a run: what a newcomer may conclude from records, processes and heartbeats."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from safepoint.ambient import ProcessState
from safepoint.catalog import read_lineage
from safepoint.errors import FencedError
from safepoint.faults.script import Effect, Fault, FaultScript
from safepoint.faults.storage import FaultyStorage
from safepoint.joining.holder import WAIT_S, Heartbeat, find_holder
from safepoint.restoring.select import Wish
from safepoint.storage.local import LocalStorage
from safepoint.storage.memory import MemoryStorage
from safepoint.testing.ambient import FakeAmbient, FakeWorld
from tests.crash.job import Job, newest_step, whole_state
from tests.joining.hooks import RestlessAmbient

ALIVE = "incarnations/000001.alive"


def held() -> tuple[MemoryStorage, FakeWorld, Job]:
    """Return a run that a first process holds, having saved step 10."""
    storage, world = MemoryStorage(), FakeWorld()
    job = Job(storage, world, pid=1, host="first")
    job.start()
    job.live(10)
    return storage, world, job


def newcomer(storage: MemoryStorage, world: FakeWorld, happens: Callable[[float], None] = lambda waited: None) -> Job:
    world.is_visible = False
    return Job(storage, world, pid=2, ambient=RestlessAmbient(world, happens, pid=2, host="another"))


@pytest.mark.parametrize("state", ["gone", "stopped"])
def test_a_holder_that_is_dead_or_stopped_is_replaced_at_once(state: ProcessState) -> None:
    """Spec: C1.2"""
    storage, world, _ = held()
    world.states[1] = state
    before = world.seconds
    assert Job(storage, world, pid=2).start().step == 10
    assert world.seconds == before


def test_a_holder_that_runs_refuses_a_newcomer_and_is_named() -> None:
    """Spec: C1.2"""
    storage, world, job = held()
    with pytest.raises(FencedError) as caught:
        Job(storage, world, pid=2).start()
    text = str(caught.value)
    assert "process 1 of user on first" in text
    assert "incarnation 1" in text
    assert "1970-01-12T13:46:40" in text, "since when"
    assert "takeover" in text
    assert caught.value.exit_code == 6
    job.live(20)
    assert newest_step(storage) == 20
    assert read_lineage(storage).newest == 1, "a newcomer that is refused claims nothing"


def test_a_holder_that_closed_is_replaced_at_once_whoever_it_was() -> None:
    """Spec: C1.2, F6.5"""
    storage, world, job = held()
    job.end()
    assert storage.read(ALIVE, limit_bytes=64) == b"closed"
    before = world.seconds
    assert newcomer(storage, world).start().step == 10
    assert world.seconds == before


def test_a_heartbeat_that_moves_refuses_a_newcomer_on_another_host() -> None:
    """Spec: C1.2"""
    storage, world, _ = held()
    with pytest.raises(FencedError, match="on first"):
        newcomer(storage, world, lambda waited: storage.put(ALIVE, b"%d" % (100 + waited))).start()


def test_a_heartbeat_that_moves_only_once_within_the_wait_refuses_a_newcomer() -> None:
    """Spec: C1.2"""
    storage, world, _ = held()

    def beat(waited: float) -> None:
        if waited > WAIT_S - 2:
            storage.put(ALIVE, b"77")

    with pytest.raises(FencedError):
        newcomer(storage, world, beat).start()


def test_a_heartbeat_that_stands_still_for_the_whole_wait_is_one_of_the_dead() -> None:
    """Spec: C1.2"""
    storage, world, _ = held()
    before = world.seconds
    assert newcomer(storage, world).start().step == 10
    assert WAIT_S <= world.seconds - before < 2 * WAIT_S


def test_a_holder_that_closes_while_it_is_watched_is_replaced() -> None:
    storage, world, job = held()
    assert newcomer(storage, world, lambda waited: job.end()).start().step == 10


@pytest.mark.parametrize("found", [b"", b"x" * 1000, b"\x80\x02.", None])
def test_rubbish_in_the_place_of_a_heartbeat_says_nothing_of_the_holder(found: bytes | None) -> None:
    """The record tells the process, and a holder that lives puts its value there again."""
    storage, world, _ = held()
    storage.delete(ALIVE)
    if found is not None:
        storage.put(ALIVE, found)
    with pytest.raises(FencedError):
        Job(storage, world, pid=2).start()
    with pytest.raises(FencedError):
        newcomer(storage, world, lambda waited: storage.put(ALIVE, b"8")).start()
    world.states[1] = "gone"
    world.is_visible = True
    assert Job(storage, world, pid=3).start().step == 10


@pytest.mark.parametrize("beats", [True, False])
def test_an_incarnation_whose_record_is_lost_is_judged_by_its_heartbeat(beats: bool) -> None:
    """Spec: C1.2, F6.4"""
    storage, world, _ = held()
    storage.put("incarnations/000001.json", b"rubbish")
    job = newcomer(storage, world, lambda waited: storage.put(ALIVE, b"%d" % waited) if beats else None)
    if beats:
        with pytest.raises(FencedError, match="unknown host"):
            job.start()
        return
    assert job.start().step == 10
    assert job.session is not None
    assert job.session.claim.incarnation == 2


def test_a_run_whose_records_are_all_lost_still_has_its_numbers_and_its_state() -> None:
    """Spec: F6.4, C9.5"""
    storage, world, job = held()
    job.die()
    for name in ("000001.json", "000001.resumed.json", "000001.alive"):
        storage.delete(f"incarnations/{name}")
    storage.delete("run.json")
    start = Job(storage, world, pid=2)
    assert start.start().step == 10
    assert start.session is not None
    assert start.session.claim.incarnation == 2


def test_every_start_down_to_the_last_complete_one_is_asked_for() -> None:
    """A takeover that has claimed and not yet recorded holds the run as well."""
    storage, world, _ = held()
    world.states[1] = "gone"
    late = Job(storage, world, pid=2, takeover=True)
    session = late.membership.join(Wish())
    with pytest.raises(FencedError, match="incarnation 2"):
        Job(storage, world, pid=3).start()
    session.close()
    assert Job(storage, world, pid=4).start().step == 10


def test_a_claim_that_died_does_not_hide_the_holder_before_it() -> None:
    """Spec: C1.2"""
    storage, world, _ = held()
    session = Job(storage, world, pid=2, takeover=True).membership.join(Wish())
    session.close()
    world.states[2] = "gone"
    with pytest.raises(FencedError, match="incarnation 1"):
        Job(storage, world, pid=3).start()
    world.states[1] = "gone"
    assert Job(storage, world, pid=4).start().step == 10


def test_clocks_that_are_wrong_change_nothing() -> None:
    """Spec: C9.4, C10.1"""
    storage, world, job = held()
    job.die()
    steps = []
    for pid, shift in ((2, -86_400.0), (3, 10 * 86_400.0), (4, -30 * 86_400.0), (5, 0.0)):
        world.seconds += shift
        start = Job(storage, world, pid=pid)
        report = start.start()
        assert start.state() == whole_state(report.step)
        steps.append(report.step)
        world.seconds -= 86_400
        start.live(report.step + 1)
        start.die()
    assert steps == [10, 11, 12, 13]


def test_times_of_files_are_never_read(tmp_path: Path) -> None:
    """Spec: C10.1"""
    storage, world = LocalStorage(tmp_path / "run"), FakeWorld()
    job = Job(storage, world, pid=1)
    job.start()
    job.live(10, 20)
    job.die()
    for number, path in enumerate(sorted((tmp_path / "run").rglob("*"), reverse=True)):
        os.utime(path, (number * 1e6, number * 1e6))
    start = Job(storage, world, pid=2)
    assert start.start().step == 20
    assert start.state() == whole_state(20)


class CountingStorage(MemoryStorage):
    def __init__(self) -> None:
        super().__init__()
        self.values: list[bytes] = []
        self.beaten = threading.Event()

    def put(self, path: str, data: bytes) -> None:
        super().put(path, data)
        self.values.append(data)
        if len(self.values) >= 3:
            self.beaten.set()


def test_a_heartbeat_moves_until_it_is_closed() -> None:
    """Spec: F6.5"""
    storage = CountingStorage()
    storage.make_root()
    storage.make_folder("incarnations")
    heartbeat = Heartbeat(storage, 1, beat_s=0.001)
    assert storage.beaten.wait(30)
    heartbeat.close()
    count = len(storage.values)
    heartbeat.close()
    assert len(storage.values) == count
    assert storage.values[-1] == b"closed"
    assert storage.values[:3] == [b"1", b"2", b"3"]


def test_a_heartbeat_outlives_a_storage_that_is_away_for_a_while() -> None:
    storage = CountingStorage()
    faults = (Fault(Effect.FAIL, verb="put", occurrence=0), Fault(Effect.FAIL, verb="put", occurrence=1))
    storage.make_root()
    storage.make_folder("incarnations")
    heartbeat = Heartbeat(FaultyStorage(storage, FaultScript(faults)), 1, beat_s=0.001)
    assert storage.beaten.wait(30)
    heartbeat.close()
    assert storage.values[0] == b"3"


def test_an_empty_run_has_no_holder() -> None:
    storage = MemoryStorage()
    assert find_holder(storage, read_lineage(storage), FakeAmbient(FakeWorld(), pid=1)) is None
