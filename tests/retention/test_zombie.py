"""A job that is stopped inside its own retention, and wakes while its successor restores, destroys nothing.

Each case stops the old job before one operation of the retention of a save, and lets it run to its end before one
operation of the new job's start, or after all of it.
"""

from __future__ import annotations

import random
import threading
from collections.abc import Callable
from typing import Any

import pytest

from safepoint.catalog import GenerationState, examine_all, list_incarnations, read_lineage
from safepoint.errors import FencedError, NotFoundError, SafepointError
from safepoint.faults.script import FaultScript
from safepoint.faults.storage import FaultyStorage
from safepoint.format.names import generation_path
from safepoint.joining.follower import RankSession
from safepoint.restoring.select import Wish
from safepoint.retention.policy import keep
from safepoint.storage.base import Storage
from safepoint.storage.memory import MemoryStorage
from safepoint.testing.ambient import FakeWorld
from tests.build import flip
from tests.crash.job import Job, newest_step, whole_state

LONGEST_S = 30
USABLE = (GenerationState.COMMITTED, GenerationState.SUPERSEDED)


class Gated(FaultyStorage):
    """Call `meet` before the operation of one number; operations are counted from the first one of `begin` on."""

    def __init__(self, inner: Storage) -> None:
        super().__init__(inner, FaultScript())
        self._left: int | None = None
        self._meet: Callable[[], object] = lambda: None
        self.seen, self.verbs = 0, list[str]()

    def begin(self, number: int | None, meet: Callable[[], object]) -> None:
        self._left, self._meet, self.seen, self.verbs = number, meet, 0, []

    def run(self, verb: str, path: str, *arguments: Any, **options: Any) -> Any:
        self.seen += 1
        self.verbs.append(verb)
        if self._left is not None:
            self._left -= 1
            if self._left < 0:
                self._left = None
                self._meet()
        return super().run(verb, path, *arguments, **options)


class Stage:
    """A run whose job saves steps 10 to 40; the retention of the last save deletes 10, and marks 20 and 30."""

    def __init__(self, *, damages_newest: bool) -> None:
        self.storage, self.world = MemoryStorage(), FakeWorld()
        self.gate = Gated(self.storage)
        self.damages_newest = damages_newest
        self.operation: int | None = None
        self.verbs = list[str]()
        self.is_fenced = False
        self.next_save: SafepointError | None = None
        self.stopped, self.woken, self.rested, self.asked = (threading.Event() for _ in range(4))
        self.thread = threading.Thread(target=self._save, daemon=True)
        self.before: dict[str, dict[str, bytes]] = {}

    def stop_at(self, operation: int | None) -> list[str]:
        """Save step 40, and stop before an operation of its retention; for None go on, and return all their verbs."""
        self.operation = operation
        self.thread.start()
        if operation is None:
            self.thread.join(LONGEST_S)
            return self.verbs
        assert self.stopped.wait(LONGEST_S)
        if self.damages_newest:
            newest = examine_all(self.storage, read_lineage(self.storage))[0].text
            flip(self.storage, generation_path(newest, "rank-00000-of-00001.safetensors"))
        return []

    def wake(self) -> None:
        """Let the old job run to the end of its retention."""
        self.before, self.is_fenced = self.usable(), 2 in list_incarnations(self.storage)
        self.woken.set()
        assert self.rested.wait(LONGEST_S)

    def ask_for_another(self) -> SafepointError | None:
        """Let the old job save once more, and return what it raised."""
        self.asked.set()
        self.thread.join(LONGEST_S)
        assert not self.thread.is_alive()
        return self.next_save

    def usable(self) -> dict[str, dict[str, bytes]]:
        """Return the files of each checkpoint that a reader may choose."""
        found = examine_all(self.storage, read_lineage(self.storage))
        return {
            entry.text: {
                file.name: self.storage.read(generation_path(entry.text, file.name), limit_bytes=1 << 20)
                for file in self.storage.list(generation_path(entry.text))
            }
            for entry in found
            if entry.state in USABLE
        }

    def check_untouched(self) -> None:
        """Check that every file is there of what a reader could choose when the old job woke."""
        for generation, files in self.before.items():
            for name, data in files.items():
                assert self.storage.read(generation_path(generation, name), limit_bytes=1 << 20) == data

    def _save(self) -> None:
        old = Job(self.gate, self.world, pid=1, keeps=None)
        old.start()
        old.live(10, 20, 30)
        old.saver._retention.policy = keep(last=3)
        old.live(35)
        old.saver._retention.policy = keep(last=2)
        retained, verbs = old.saver._retain, list[str]()

        def retain(session: RankSession) -> None:
            self.gate.begin(self.operation, self._stand_still)
            retained(session)
            verbs.extend(self.gate.verbs)

        old.saver._retain = retain  # type: ignore[method-assign]  # nothing else tells where retention begins
        old.live(40)
        self.verbs = verbs
        self.rested.set()
        if self.operation is not None:
            assert self.asked.wait(LONGEST_S)
            try:
                old.live(50)
            except SafepointError as exc:
                self.next_save = exc
        old.die()

    def _stand_still(self) -> None:
        self.stopped.set()
        assert self.woken.wait(LONGEST_S)


def play(operation: int, wakes_at: int | None, wish: Wish | None, expected: int, *, damages_newest: bool) -> int:
    """Play one case, check it, and return how many operations the new job's start had."""
    stage = Stage(damages_newest=damages_newest)
    stage.stop_at(operation)
    storage = Gated(stage.storage)
    new = Job(storage, stage.world, pid=2, takeover=True)
    storage.begin(wakes_at, stage.wake)
    try:
        assert new.start(wish).step == expected
    except NotFoundError:
        assert wish is not None, "the old job has marked it before it was looked at"
        if not stage.woken.is_set():
            stage.wake()
        stage.ask_for_another()
        stage.check_untouched()
        return storage.seen
    assert new.state() == whole_state(expected)
    count = storage.seen
    if not stage.woken.is_set():
        stage.wake()
    stage.check_untouched()
    after = stage.usable()
    assert len(stage.before.keys() - after.keys()) <= (1 if stage.is_fenced else 2), "at most one mark was on its way"
    assert [name for name in after if int(name[5:17]) == expected], "never what was resumed"
    assert len(after) >= 2
    assert isinstance(stage.ask_for_another(), FencedError)
    new.live(expected + 1)
    assert newest_step(stage.storage) == expected + 1
    new.die()
    return count


CASES: list[tuple[Wish | None, int, bool]] = [
    (None, 40, False),
    (None, 35, True),
    (Wish(20, branch=True), 20, False),
    (Wish(30, branch=True), 30, False),
]


def retention_operations() -> list[str]:
    """Return the verbs of an undisturbed retention, in their order."""
    return Stage(damages_newest=False).stop_at(None)


def test_a_stopped_retention_that_wakes_while_its_successor_restores_destroys_nothing(chance: random.Random) -> None:
    """At each mark and each deletion, and at a few operations between.

    Spec: C12.1, C12.2, C12.3
    """
    verbs = retention_operations()
    marks = [number for number, verb in enumerate(verbs) if verb == "publish"]
    deletions = [number for number, verb in enumerate(verbs) if verb.startswith("delete")]
    assert len(marks) == 2 and len(deletions) == 5
    start = play(0, None, None, 40, damages_newest=False)
    for operation in marks:
        for wish, expected, damages_newest in CASES:
            play(operation, None, wish, expected, damages_newest=damages_newest)
    for operation in [*marks, *deletions, *chance.sample(range(len(verbs)), 3)]:
        wish, expected, damages_newest = chance.choice(CASES)
        play(operation, chance.randrange(start), wish, expected, damages_newest=damages_newest)


@pytest.mark.soak
@pytest.mark.parametrize(("wish", "expected", "damages_newest"), CASES)
def test_a_retention_stopped_anywhere_that_wakes_anywhere_destroys_nothing(
    wish: Wish | None, expected: int, damages_newest: bool
) -> None:
    """Spec: C12.1, C12.2, C12.3"""
    start = play(0, None, wish, expected, damages_newest=damages_newest)
    operations = range(len(retention_operations()))
    for operation in operations:
        for wakes_at in [*range(start), None]:
            play(operation, wakes_at, wish, expected, damages_newest=damages_newest)
    print(f"counted: {len(operations) * (start + 1)} stops")
