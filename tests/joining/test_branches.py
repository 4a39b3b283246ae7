"""Going back on purpose: within one process or in a new one, and what is superseded by it."""

from __future__ import annotations

import pytest

from safepoint.catalog import GenerationState, examine_all, read_lineage
from safepoint.errors import RequestError
from safepoint.restoring.select import Wish
from safepoint.retention.policy import keep
from safepoint.storage.base import Storage
from safepoint.storage.memory import MemoryStorage
from safepoint.testing.ambient import FakeWorld
from tests.crash.job import Job, newest_step, whole_state


class Runs:
    """A run and its successive processes, which keep every checkpoint."""

    def __init__(self) -> None:
        self.storage: Storage = MemoryStorage()
        self.world = FakeWorld()
        self.pid = 0

    def start(self, wish: Wish | None = None) -> Job:
        self.pid += 1
        job = Job(self.storage, self.world, pid=self.pid, keeps=None)
        job.report = job.start(wish)
        return job

    def steps(self, state: GenerationState) -> list[int]:
        found = examine_all(self.storage, read_lineage(self.storage))
        return sorted(entry.name.step for entry in found if entry.state is state)


@pytest.fixture
def runs() -> Runs:
    found = Runs()
    job = found.start()
    job.live(10, 20, 30, 40)
    job.end()
    return found


def go_back(job: Job, step: int) -> list[int]:
    """Restore an older step in the process that holds the run, and return the steps that become superseded."""
    job.membership.leave()
    report = job.start(Wish(step, branch=True))
    assert job.state() == whole_state(step)
    return sorted(int(name[5:17]) for name in report.superseded)


def test_going_back_in_one_process_supersedes_the_newer_steps(runs: Runs) -> None:
    """Spec: C10.5, C9.3"""
    job = runs.start()
    assert go_back(job, 20) == [30, 40]
    job.live(25)
    assert runs.steps(GenerationState.COMMITTED) == [10, 20, 25]
    assert runs.steps(GenerationState.SUPERSEDED) == [30, 40]
    assert newest_step(runs.storage) == 25
    job.die()
    again = runs.start()
    assert again.step == 25
    assert again.state() == whole_state(25)


def test_going_back_holds_before_anything_is_saved(runs: Runs) -> None:
    """Spec: C9.2"""
    job = runs.start(Wish(20, branch=True))
    job.die()
    for _ in range(2):
        job = runs.start()
        assert job.step == 20
        job.die()
    assert runs.steps(GenerationState.SUPERSEDED) == [30, 40]


def test_returning_to_a_superseded_branch_supersedes_the_one_that_replaced_it(runs: Runs) -> None:
    """Spec: C10.5"""
    job = runs.start()
    go_back(job, 20)
    job.live(25)
    assert go_back(job, 40) == [25]
    assert runs.steps(GenerationState.COMMITTED) == [10, 20, 30, 40]


def test_a_branch_of_a_branch_leaves_one_lineage(runs: Runs) -> None:
    """Spec: C9.3"""
    job = runs.start(Wish(30, branch=True))
    job.live(35, 45)
    assert go_back(job, 35) == [45]
    job.live(36)
    assert go_back(job, 10) == [20, 30, 35, 36]
    job.live(12)
    assert go_back(job, 12) == []
    job.live(13)
    job.die()
    assert runs.start().step == 13
    assert runs.steps(GenerationState.COMMITTED) == [10, 12, 13]
    assert runs.steps(GenerationState.SUPERSEDED) == [20, 30, 35, 36, 40, 45]


def test_a_superseded_step_comes_back_only_when_asked_for(runs: Runs) -> None:
    """Spec: C10.5"""
    job = runs.start(Wish(10, branch=True))
    job.live(11)
    job.end()
    back = runs.start(Wish(40, branch=True))
    assert back.state() == whole_state(40)
    back.live(41)
    back.die()
    assert runs.start().step == 41
    assert runs.steps(GenerationState.SUPERSEDED) == [11]


def test_the_same_step_saved_again_on_a_branch_is_the_one_that_counts(runs: Runs) -> None:
    """Spec: C10.1"""
    job = runs.start(Wish(20, branch=True))
    job.live(30)
    job.die()
    again = runs.start()
    assert again.step == 30
    assert again.report.generation is not None
    assert "-i000002-" in again.report.generation


@pytest.mark.parametrize("step", [10, 20, 30])
def test_an_older_step_is_refused_without_the_word_and_changes_nothing(runs: Runs, step: int) -> None:
    """Spec: C10.5"""
    with pytest.raises(RequestError, match="branch=True") as caught:
        runs.start(Wish(step))
    assert "step 40" in str(caught.value)
    runs.world.states[runs.pid] = "gone"
    assert runs.start().step == 40


def test_what_a_start_did_on_a_branch_that_was_left_is_not_done_again() -> None:
    """Of 95 updates 85 are left by going back to 10; the third start goes on where the second one saved."""
    runs = Runs()
    first = runs.start()
    first.live(10, 90)
    first.train_to(95)
    first.end()
    second = runs.start(Wish(10, branch=True))
    second.live(30)
    second.train_to(32)
    second.end()
    third = runs.start()
    assert (third.step, third.report.replayed) == (30, 2)


def test_what_was_left_stays_left_when_the_start_that_left_it_saved_nothing() -> None:
    runs = Runs()
    first = runs.start()
    first.live(10, 90)
    first.train_to(95)
    first.end()
    second = runs.start(Wish(10, branch=True))
    second.end()
    third = runs.start()
    assert (third.step, third.report.replayed) == (10, 0)
    third.train_to(13)
    third.end()
    fourth = runs.start()
    assert (fourth.step, fourth.report.replayed) == (10, 3)


def test_a_branch_without_a_step_is_a_wrong_call_and_picks_none() -> None:
    """The newest of all branches may be the one that was left on purpose. Spec: C9.3, C10.5"""
    with pytest.raises(RequestError, match="no step is named"):
        Wish(branch=True)


def test_the_newest_step_needs_no_word(runs: Runs) -> None:
    assert runs.start(Wish(40)).step == 40


def test_an_older_step_needs_no_word_when_the_newer_ones_are_damaged(runs: Runs) -> None:
    for found in examine_all(runs.storage, read_lineage(runs.storage)):
        if found.name.step > 20:
            runs.storage.delete(f"generations/{found.text}/rank-00000-of-00001.safetensors")
    job = runs.start(Wish(20))
    assert job.state() == whole_state(20)


def test_kept_older_checkpoints_serve_when_the_newest_three_are_damaged() -> None:
    """What lies between was deleted: the lineage does not depend on it.

    Spec: C9.4, C10.2
    """
    storage, world = MemoryStorage(), FakeWorld()
    policy = keep(last=3, every=100)
    for pid, first in enumerate((25, 150, 325, 400, 475), start=1):
        job = Job(storage, world, pid=pid, keeps=policy)
        job.start()
        job.live(*range(max(25, first), 551 if pid == 5 else (150, 325, 400, 475)[pid - 1], 25))
        job.die()
    left = [found for found in examine_all(storage, read_lineage(storage)) if found.state is GenerationState.COMMITTED]
    assert [found.name.step for found in left] == [550, 525, 500, 450, 400, 375, 300, 200, 100]
    parents = [int(link.resumed[5:17]) for link in read_lineage(storage).chain if link.resumed]
    assert parents == [125, 300, 375, 450]
    assert 125 not in [found.name.step for found in left], "a parent was deleted"
    for found in left[:3]:
        storage.put(f"generations/{found.text}/rank-00000-of-00001.json", b"rubbish")
    job = Job(storage, world, pid=4)
    report = job.start()
    assert (report.step, [entry.file for entry in report.refused]) == (450, ["rank-00000-of-00001.json"] * 3)
    assert job.state() == whole_state(450)
