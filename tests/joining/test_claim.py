"""Several starts at once, takeovers and rivals: one goes on, and no healthy one ends for a claim that is closed."""

from __future__ import annotations

import pytest

from safepoint.catalog import GenerationState, examine_all, read_lineage
from safepoint.errors import FencedError, StorageError
from safepoint.faults.script import Effect, Fault, FaultScript
from safepoint.faults.storage import FaultyStorage
from safepoint.format.encoding import seal
from safepoint.format.names import incarnation_path
from safepoint.format.records import Holder, IncarnationRecord, LineageLink, RefusedRecord, ResumedRecord
from safepoint.joining.claim import Claim, check_not_fenced
from safepoint.joining.holder import WAIT_S
from safepoint.membership import record_start
from safepoint.restoring.restore import Restored
from safepoint.restoring.select import Wish
from safepoint.storage.memory import MemoryStorage
from safepoint.testing.ambient import FakeWorld
from tests.crash.job import Job, newest_step, whole_state
from tests.joining.hooks import HookedStorage, RestlessAmbient


def names(storage: MemoryStorage) -> list[str]:
    return [entry.name for entry in storage.list("incarnations")]


def lived() -> tuple[MemoryStorage, FakeWorld]:
    storage, world = MemoryStorage(), FakeWorld()
    job = Job(storage, world, pid=1)
    job.start()
    job.live(10)
    job.die()
    return storage, world


class Rival:
    """A start on another host that has claimed a number and may close the claim or record what it resumed."""

    def __init__(self, storage: MemoryStorage, number: int) -> None:
        lineage = read_lineage(storage)
        assert lineage.run is not None
        self.run, self.number, self.storage, self.chain = lineage.run, number, storage, lineage.chain

    def claim(self) -> None:
        holder = Holder("far", "user", "b", "n", 5, "5")
        record = IncarnationRecord(1, self.run, self.number, "aa", holder, 1, "today", {})
        self.storage.publish(incarnation_path(self.number), seal(record))

    def close(self) -> None:
        record = RefusedRecord(1, self.run, self.number, "it lost", "bb")
        self.storage.publish(incarnation_path(self.number, "refused.json"), seal(record))

    def record(self) -> None:
        chain = (LineageLink(self.number, None, 0),)
        record = ResumedRecord(1, self.run, self.number, None, 0, chain, (), False, "cc")
        self.storage.publish(incarnation_path(self.number, "resumed.json"), seal(record))


def test_of_two_starts_at_once_the_lower_living_number_goes_on() -> None:
    """The second looks before the first claims, and claims after it.

    Spec: C1.3, C1.1
    """
    storage, world = lived()
    first = Job(storage, world, pid=2)
    hooked = HookedStorage(storage, "publish", "000002.json", lambda: started.append(first.start().step))
    started: list[int] = []
    second = Job(hooked, world, pid=3)
    with pytest.raises(FencedError, match="incarnation 2: process 2"):
        second.start()
    assert started == [10]
    assert {"000002.json", "000002.resumed.json", "000003.json", "000003.refused.json"} <= set(names(storage))
    assert "000003.resumed.json" not in names(storage)
    first.live(20)
    assert newest_step(storage) == 20
    first.die()
    third = Job(storage, world, pid=4)
    assert third.start().step == 20
    assert third.session is not None
    assert third.session.claim.incarnation == 4


def test_of_two_starts_at_once_the_higher_goes_on_when_the_lower_is_dead() -> None:
    """Spec: C1.3"""
    storage, world = lived()
    first = Job(storage, world, pid=2)

    def start_and_die() -> None:
        first.start()
        first.die()

    second = Job(HookedStorage(storage, "publish", "000002.json", start_and_die), world, pid=3)
    assert second.start().step == 10
    second.live(20)
    assert newest_step(storage) == 20


def test_a_run_created_by_two_starts_at_once_has_one_identity() -> None:
    storage, world = MemoryStorage(), FakeWorld()
    first = Job(storage, world, pid=2)
    second = Job(HookedStorage(storage, "publish", "run.json", lambda: void(first.start())), world, pid=3)
    with pytest.raises(FencedError):
        second.start()
    first.live(5)
    assert newest_step(storage) == 5


def void(result: object) -> None:
    return None


def closing(storage: MemoryStorage, world: FakeWorld, rival: Rival) -> RestlessAmbient:
    """Return a process during whose first wait the rival closes its claim."""

    def happens(waited: float) -> None:
        if "000003.refused.json" not in names(storage):
            rival.close()

    return RestlessAmbient(world, happens, pid=2)


def test_a_rival_that_closes_its_claim_does_not_end_a_start() -> None:
    """Spec: C1.3"""
    storage, world = lived()
    rival = Rival(storage, 3)
    job = Job(storage, world, pid=2, ambient=closing(storage, world, rival))
    session = job.membership.join(Wish())
    rival.claim()
    record_start(session, Restored(), is_branch=False)
    assert {"000002.resumed.json", "000003.refused.json"} <= set(names(storage))


def test_a_rival_that_closes_its_claim_does_not_end_a_save() -> None:
    """Spec: C5.2"""
    storage, world = lived()
    rival = Rival(storage, 3)
    job = Job(storage, world, pid=2, ambient=closing(storage, world, rival))
    job.start()
    rival.claim()
    job.live(20)
    assert newest_step(storage) == 20


def test_a_rival_that_records_fences_without_further_wait() -> None:
    """Spec: C5.2"""
    storage, world = lived()
    job = Job(storage, world, pid=2)
    job.start()
    rival = Rival(storage, 3)
    rival.claim()
    rival.record()
    before = world.seconds
    with pytest.raises(FencedError, match="incarnation 3"):
        job.live(20)
    assert world.seconds == before
    assert [found.name.step for found in examine_all(storage, read_lineage(storage)) if found.manifest] == [10]


def test_a_rival_that_decides_nothing_fences_after_the_wait() -> None:
    """Spec: C5.2"""
    storage, world = lived()
    job = Job(storage, world, pid=2)
    job.start()
    Rival(storage, 3).claim()
    before = world.seconds
    with pytest.raises(FencedError):
        job.live(20)
    assert WAIT_S <= world.seconds - before <= WAIT_S + 2


def test_a_takeover_fences_the_old_process_and_its_next_save_publishes_nothing() -> None:
    """Spec: C5.2"""
    storage, world = MemoryStorage(), FakeWorld()
    old = Job(storage, world, pid=1)
    old.start()
    old.live(10)
    new = Job(storage, world, pid=2, takeover=True)
    assert new.start().step == 10
    with pytest.raises(FencedError) as caught:
        old.live(20)
    assert caught.value.exit_code == 6
    assert [entry.name for entry in storage.list("generations")] == [
        str(found.name) for found in examine_all(storage, read_lineage(storage)) if found.name.step == 10
    ]
    new.live(15)
    assert newest_step(storage) == 15


@pytest.mark.parametrize(("verb", "ending"), [("create", ".safetensors"), ("size", ".json")])
def test_a_takeover_in_the_middle_of_a_save_lets_it_publish_nothing(verb: str, ending: str) -> None:
    """Spec: C5.2"""
    storage, world = MemoryStorage(), FakeWorld()
    new = Job(storage, world, pid=2, takeover=True)
    old = Job(storage, world, pid=1)
    old.start()
    old.live(10)
    old.saver._storage = HookedStorage(storage, verb, ending, lambda: void(new.start()))
    with pytest.raises(FencedError):
        old.live(20)
    found = examine_all(storage, read_lineage(storage))
    assert [(entry.name.step, entry.manifest is None) for entry in found] == [(20, True), (10, False)]


def test_a_publish_that_comes_late_is_reported_as_fenced_and_never_chosen() -> None:
    """The old process stands still between its check and its publish while a new one takes over and saves.

    Spec: C6.1, C9.3, C8.1
    """
    storage, world = MemoryStorage(), FakeWorld()
    new = Job(storage, world, pid=2, takeover=True)
    old = Job(storage, world, pid=1)
    old.start()
    old.live(10)
    old.saver._storage = HookedStorage(storage, "publish", "manifest.json", lambda: void(new.start()))
    with pytest.raises(FencedError):
        old.live(20)
    new.live(15)
    states = {found.name.step: found.state for found in examine_all(storage, read_lineage(storage))}
    assert states == {10: GenerationState.COMMITTED, 15: GenerationState.COMMITTED, 20: GenerationState.SUPERSEDED}
    new.live(17)
    new.die()
    last = Job(storage, world, pid=3)
    assert last.start().step == 17
    assert last.state() == whole_state(17)


def test_a_publish_that_comes_after_its_folder_was_swept_publishes_nothing() -> None:
    """The new process has saved as well, and swept what the old one had begun.

    Spec: C12.6
    """
    storage, world = MemoryStorage(), FakeWorld()
    new = Job(storage, world, pid=2, takeover=True)

    def take_over() -> None:
        new.start()
        new.live(15)

    old = Job(storage, world, pid=1)
    old.start()
    old.live(10)
    old.saver._storage = HookedStorage(storage, "publish", "manifest.json", take_over)
    with pytest.raises(FencedError, match="incarnation 2"):
        old.live(20)
    assert newest_step(storage) == 15


@pytest.mark.parametrize(
    ("ours", "is_let_in"),
    [
        ({"TORCHELASTIC_RUN_ID": "job7", "TORCHELASTIC_RESTART_COUNT": "2"}, True),
        ({"TORCHELASTIC_RUN_ID": "job7", "TORCHELASTIC_RESTART_COUNT": "1"}, False),
        ({"TORCHELASTIC_RUN_ID": "job7"}, False),
        ({"TORCHELASTIC_RUN_ID": "other", "TORCHELASTIC_RESTART_COUNT": "9"}, False),
        ({}, False),
    ],
)
def test_a_restart_of_the_same_elastic_job_takes_over_at_once(ours: dict[str, str], is_let_in: bool) -> None:
    """Its agent has ended the earlier processes, but on this host they may not be visible.

    Spec: C1.4
    """
    storage, world = MemoryStorage(), FakeWorld()
    theirs = {"TORCHELASTIC_RUN_ID": "job7", "TORCHELASTIC_RESTART_COUNT": "1"}
    first = Job(storage, world, pid=1, variables=theirs)
    first.start()
    first.live(10)
    second = Job(storage, world, pid=2, variables=ours)
    before = world.seconds
    if is_let_in:
        assert second.start().step == 10
        assert world.seconds == before
        return
    with pytest.raises(FencedError):
        second.start()


def test_an_elastic_job_without_a_name_is_no_elastic_job() -> None:
    storage, world = MemoryStorage(), FakeWorld()
    Job(storage, world, pid=1, variables={"TORCHELASTIC_RUN_ID": "none", "TORCHELASTIC_RESTART_COUNT": "0"}).start()
    with pytest.raises(FencedError):
        Job(storage, world, pid=2, variables={"TORCHELASTIC_RUN_ID": "none", "TORCHELASTIC_RESTART_COUNT": "1"}).start()


def test_a_claim_meets_its_own_record_and_counts_it_as_success() -> None:

    class Twice(MemoryStorage):
        """A store whose transport repeats each conditional put: the second meets the first."""

        def publish(self, path: str, data: bytes) -> None:
            super().publish(path, data)
            super().publish(path, data)

    storage = Twice()
    job = Job(storage, FakeWorld(), pid=1)
    job.start()
    job.live(10)
    assert names(storage) == ["000001.alive", "000001.json", "000001.resumed.json"]
    assert newest_step(storage) == 10


@pytest.mark.parametrize("lost", ["json", "resumed.json", "alive"])
def test_a_newer_start_of_which_a_file_is_lost_fences_all_the_same(lost: str) -> None:
    """Spec: C5.2, F6.4"""
    storage, world = MemoryStorage(), FakeWorld()
    old = Job(storage, world, pid=1)
    old.start()
    old.live(10)
    new = Job(storage, world, pid=2, takeover=True)
    new.start()
    new.live(15)
    storage.delete(f"incarnations/000002.{lost}")
    with pytest.raises(FencedError, match="incarnation 2"):
        old.live(20)
    assert newest_step(storage) == 15


@pytest.mark.parametrize(
    "fault",
    [
        Fault(Effect.FAIL, verb="sync_folder", path="incarnations"),
        Fault(Effect.FAIL, verb="list", path="incarnations", occurrence=2),
        Fault(Effect.FAIL, verb="publish", path="*resumed.json"),
    ],
    ids=["sync", "second look", "record"],
)
def test_a_start_that_fails_after_its_claim_closes_it(fault: Fault) -> None:
    """So the next try of the same, living process is let in, and nobody is fenced for it.

    Spec: C1.3
    """
    storage, world = lived()
    session = None
    with pytest.raises(StorageError):
        job = Job(FaultyStorage(storage, FaultScript((fault,))), world, pid=2)
        session = job.membership.join(Wish())
        record_start(session, Restored(), is_branch=False)
    if session is not None:
        session.close()
    assert "000002.refused.json" in names(storage)
    check_not_fenced(storage, Claim("", 1))
    again = Job(storage, world, pid=2)
    assert again.start().step == 10
    again.live(20)
    assert newest_step(storage) == 20


def test_a_claim_that_the_storage_lets_nobody_close_still_lets_its_own_process_in() -> None:
    storage, world = lived()
    faults = (
        Fault(Effect.FAIL, verb="sync_folder", path="incarnations"),
        Fault(Effect.FAIL, verb="publish", path="*refused.json"),
    )
    with pytest.raises(StorageError):
        Job(FaultyStorage(storage, FaultScript(faults)), world, pid=2).start()
    assert "000002.refused.json" not in names(storage)
    assert Job(storage, world, pid=2).start().step == 10


def test_a_takeover_that_fails_before_it_recorded_anything_fences_nobody() -> None:
    """Spec: C1.3"""
    storage, world = MemoryStorage(), FakeWorld()
    old = Job(storage, world, pid=1)
    old.start()
    old.live(10)
    Job(storage, world, pid=2, takeover=True).membership.join(Wish()).close()
    old.live(20)
    assert newest_step(storage) == 20


def test_refused_claims_fence_nobody() -> None:
    """Spec: C5.2"""
    storage, world = lived()
    job = Job(storage, world, pid=2)
    job.start()
    for number in (3, 4):
        rival = Rival(storage, number)
        rival.claim()
        rival.close()
    job.live(20)
    check_not_fenced(storage, Claim("", 2))
    with pytest.raises(FencedError):
        check_not_fenced(storage, Claim("", 1))
