"""What a manager tells of the cost of saving, by a clock that only the test and the storage move."""

from __future__ import annotations

import json
import os
import threading
from pathlib import Path

import pytest
import torch

import safepoint as sp
from safepoint.storage.memory import MemoryStorage, MemoryWriter
from safepoint.testing.ambient import FakeAmbient, FakeWorld


class TimedStorage(MemoryStorage):
    """Take two seconds for each object that is created, once it may go on."""

    def __init__(self, world: FakeWorld) -> None:
        super().__init__()
        self._world = world
        self.goes_on = threading.Event()
        self.goes_on.set()
        self.is_full = False

    def create(self, path: str, *, size_bytes: int = 0) -> MemoryWriter:
        assert self.goes_on.wait(60)
        if self.is_full:
            raise sp.StorageError("no room", where=path)
        self._world.seconds += 2.0
        return super().create(path, size_bytes=size_bytes)


class SlowToSync(MemoryStorage):
    """Take five seconds until a data file is durable."""

    def __init__(self, world: FakeWorld) -> None:
        super().__init__()
        self._world = world

    def create(self, path: str, *, size_bytes: int = 0) -> MemoryWriter:
        writer = super().create(path, size_bytes=size_bytes)
        if path.endswith(".safetensors"):
            finish = writer.finish

            def slowly() -> None:
                self._world.seconds += 5.0
                finish()

            writer.finish = slowly  # type: ignore[method-assign]
        return writer


def start(world: FakeWorld, storage: MemoryStorage, **options: object) -> tuple[torch.nn.Linear, sp.CheckpointManager]:
    torch.manual_seed(0)
    model = torch.nn.Linear(3, 2)
    ambient = FakeAmbient(world, pid=1)
    manager = sp.CheckpointManager(
        "unused", {"model": model}, storage=storage, ambient=ambient, signals=None, **options
    )
    manager.restore()
    return model, manager


def step(world: FakeWorld, manager: sp.CheckpointManager, seconds: float) -> None:
    world.seconds += seconds
    manager.after_update(samples=1)


def test_a_save_at_the_boundary_blocks_for_as_long_as_it_takes() -> None:
    world = FakeWorld()
    storage = TimedStorage(world)
    _, manager = start(world, storage)
    step(world, manager, 1.0)
    handle = manager.save()
    (cost,) = manager.stats.saves
    # The data file and the index, two seconds each, and no time for anything else.
    assert (cost.step, cost.blocked_s, cost.total_s) == (1, 4.0, 4.0)
    assert cost.phases_s["write"] == 4.0
    assert handle.result is not None
    assert (cost.generation, cost.size_bytes) == (handle.result.generation, handle.result.size_bytes)
    manager.close()


def test_what_writing_went_to_is_told_apart() -> None:
    world = FakeWorld()
    _, manager = start(world, SlowToSync(world))
    step(world, manager, 1.0)
    manager.save()
    (cost,) = manager.stats.saves
    assert (cost.copy_s, cost.digest_s, cost.storage_s) == (0.0, 0.0, 5.0)
    manager.close()


def test_a_background_save_blocks_for_its_copy_alone() -> None:
    world = FakeWorld()
    storage = TimedStorage(world)
    _, manager = start(world, storage, background=True)
    step(world, manager, 1.0)
    storage.goes_on.clear()
    first = manager.save()
    assert manager.stats.saves == ()
    world.seconds += 5.0
    storage.goes_on.set()
    first.wait(deadline_s=60)
    (cost,) = manager.stats.saves
    assert (cost.blocked_s, cost.total_s) == (0.0, 9.0)
    manager.close()


def test_steps_are_told_apart_by_whether_a_save_was_in_flight_when_they_began() -> None:
    world = FakeWorld()
    storage = TimedStorage(world)
    _, manager = start(world, storage, background=True, save=sp.every(updates=5))
    for seconds in (100.0, 1.0, 2.0, 3.0):
        step(world, manager, seconds)
    storage.goes_on.clear()
    step(world, manager, 4.0)
    step(world, manager, 7.0)
    storage.goes_on.set()
    manager.wait()
    # The first step was not seen to begin. The save began at the end of the fifth.
    stats = manager.stats
    assert stats.steps == sp.StepTimes(count=4, median_s=2.0, p99_s=4.0, longest_s=4.0)
    assert stats.steps_beside_a_save == sp.StepTimes(count=1, median_s=7.0, p99_s=7.0, longest_s=7.0)
    manager.close()


def test_a_save_asked_for_between_two_updates_is_beside_the_step_and_no_part_of_it() -> None:
    world = FakeWorld()
    storage = TimedStorage(world)
    _, manager = start(world, storage)
    step(world, manager, 100.0)
    manager.save()
    step(world, manager, 1.0)
    # The save took four seconds, and was over when the step went on.
    assert manager.stats.saves[0].blocked_s == 4.0
    assert manager.stats.steps == sp.StepTimes(count=1, median_s=1.0, p99_s=1.0, longest_s=1.0)
    manager.close()


def test_a_step_goes_on_beside_a_background_save_asked_for_after_the_update() -> None:
    world = FakeWorld()
    storage = TimedStorage(world)
    _, manager = start(world, storage, background=True)
    step(world, manager, 100.0)
    storage.goes_on.clear()
    manager.save()
    step(world, manager, 3.0)
    storage.goes_on.set()
    manager.wait()
    step(world, manager, 0.5)
    stats = manager.stats
    assert stats.steps_beside_a_save.count == 2
    assert stats.steps.count == 0
    manager.close()


def noted(storage: MemoryStorage) -> list[dict[str, object]]:
    lines = [json.loads(line) for line in storage.read("journal/000001.jsonl", limit_bytes=1 << 20).splitlines()]
    return [line for line in lines if line.get("event") == "saved"]


def test_what_a_save_cost_is_in_the_journal_once_it_is_known() -> None:
    world = FakeWorld()
    storage = TimedStorage(world)
    _, manager = start(world, storage)
    step(world, manager, 1.0)
    manager.save()
    (line,) = noted(storage)
    assert (line["step"], line["blocked_s"], line["total_s"], line["is_background"]) == (1, 4.0, 4.0, False)
    manager.close()
    assert len(noted(storage)) == 1


def test_what_a_background_save_cost_is_in_the_journal_at_the_next_save_or_the_end() -> None:
    world = FakeWorld()
    storage = TimedStorage(world)
    _, manager = start(world, storage, background=True)
    for number in (1, 2):
        step(world, manager, 1.0)
        storage.goes_on.clear()
        handle = manager.save()
        assert len(noted(storage)) == number - 1
        world.seconds += 5.0
        storage.goes_on.set()
        handle.wait(deadline_s=60)
    manager.close()
    told = [(line["step"], line["blocked_s"], line["total_s"], line["is_background"]) for line in noted(storage)]
    assert told == [(1, 0.0, 9.0, True), (2, 0.0, 9.0, True)]


def test_a_child_that_was_forked_off_notes_nothing_in_the_journal_of_its_parent(tmp_path: Path) -> None:
    model = torch.nn.Linear(3, 2)
    manager = sp.CheckpointManager(tmp_path, {"model": model}, background=True, signals=None)
    manager.restore()
    manager.after_update()
    manager.save().wait(deadline_s=60)
    before = (tmp_path / "journal" / "000001.jsonl").read_bytes()
    child = os.fork()
    if not child:
        try:
            manager.close()
        finally:
            os._exit(0)
    os.waitpid(child, 0)
    assert (tmp_path / "journal" / "000001.jsonl").read_bytes() == before
    manager.close()
    assert (tmp_path / "journal" / "000001.jsonl").read_bytes().count(b'"saved"') == 1


def test_stats_are_told_in_words() -> None:
    world = FakeWorld()
    _, manager = start(world, TimedStorage(world), save=sp.every(updates=2))
    assert str(manager.stats).splitlines() == [
        "saves: none",
        "steps without a save: none",
        "steps beside a save: none",
    ]
    for seconds in (100.0, 1.0, 2.0, 3.0):
        step(world, manager, seconds)
    saves, steps, beside = str(manager.stats).splitlines()
    assert saves.startswith("saves: 2, the newest of step 4 and ")
    assert saves.endswith("; training stood still for 4 s (longest 4 s), committed after 4 s (longest 4 s)")
    assert steps == "steps without a save: 3, median 2 s, p99 3 s, longest 3 s"
    assert beside == "steps beside a save: none"
    manager.close()


def test_a_save_that_fails_is_not_told() -> None:
    world = FakeWorld()
    storage = TimedStorage(world)
    _, manager = start(world, storage, save=sp.every(updates=1))
    step(world, manager, 1.0)
    storage.is_full = True
    with pytest.warns(RuntimeWarning, match="no room"):
        step(world, manager, 1.0)
    storage.is_full = False
    step(world, manager, 1.0)
    assert [cost.step for cost in manager.stats.saves] == [1, 3]
    manager.close()
