"""Where the system gives no more threads, whoever reads does it itself, and each thing once."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch

import safepoint as sp
from safepoint.catalog import examine_all, read_lineage
from safepoint.errors import CorruptionError, ObjectMissingError
from safepoint.restoring import read
from safepoint.restoring.read import READERS
from safepoint.restoring.runs import RUN_BYTES
from safepoint.restoring.verify import verify_generation
from safepoint.restoring.workers import Workers
from safepoint.storage.local import LocalStorage
from safepoint.storage.memory import MemoryStorage
from safepoint.storage.sizes import AT_ONCE, sizes_of
from tests.build import flip
from tests.restoring.ranks.jobs import holds, part_of, run_of, start

POOLS = ("safepoint-read", "ThreadPoolExecutor")

LONGEST_WAIT_S = 20

Limit = Callable[[int], None]


@pytest.fixture
def limit(monkeypatch: pytest.MonkeyPatch) -> Limit:
    """Return what allows so many more threads of pools, and no more."""
    begin, left = threading.Thread.start, [0]

    def refused(thread: threading.Thread) -> None:
        if thread.name.startswith(POOLS):
            if not left[0]:
                raise RuntimeError("can't start new thread")
            left[0] -= 1
        begin(thread)

    def allow(count: int) -> None:
        left[0] = count
        monkeypatch.setattr(threading.Thread, "start", refused)

    return allow


@pytest.mark.parametrize("allowed", [0, 1, 3])
def test_each_task_is_carried_out_once_by_whoever_is_there(allowed: int, limit: Limit) -> None:
    limit(allowed)
    done: Counter[int] = Counter()
    with Workers(4) as workers:
        tasks = [workers.start(lambda n=number: done.update([n]) or n) for number in range(40)]  # type: ignore[misc,func-returns-value]
        assert [workers.result_of(task) for task in tasks] == list(range(40))
    assert done == Counter(range(40))


@pytest.mark.parametrize("allowed", [0, 1])
def test_the_first_failure_stops_what_is_done_without_threads(allowed: int, limit: Limit) -> None:
    limit(allowed)
    begun: list[int] = []

    def failing() -> None:
        raise LookupError("the first")

    with pytest.raises(LookupError, match="the first"), Workers(4) as workers:
        first = workers.start(failing)
        assert isinstance(first.exception(), LookupError)
        later = workers.start(lambda: begun.append(1))
        workers.result_of(later)
    assert begun == []


@pytest.mark.parametrize("allowed", [0, 3])
def test_the_sizes_of_many_objects_are_found_without_threads(allowed: int, limit: Limit) -> None:
    storage = MemoryStorage()
    storage.make_root()
    storage.put("a", b"12345")
    limit(allowed)
    found = sizes_of(storage, ["a", "b"] * AT_ONCE)
    assert found[::2] == [5] * AT_ONCE
    assert all(isinstance(one, ObjectMissingError) for one in found[1::2])


@pytest.mark.parametrize("allowed", [0, 2])
def test_indexes_of_many_ranks_are_read_without_threads(allowed: int, limit: Limit) -> None:
    storage = run_of(1, 2, world_size=5)
    limit(allowed)
    started = start([storage], [{"model": part_of(0, 1)}])
    assert holds(started.parts[0], 2)


@pytest.mark.parametrize("allowed", [0, 1])
def test_a_checkpoint_is_restored_and_verified_without_threads(allowed: int, limit: Limit, tmp_path: Path) -> None:
    saved = {str(number): torch.full((1000,), float(number)) for number in range(20)}
    with sp.CheckpointManager(tmp_path, {"state": saved}) as manager:
        manager.save()
    limit(allowed)
    state = {name: torch.zeros(1000) for name in saved}
    with sp.CheckpointManager(tmp_path, {"state": state}) as manager:
        manager.restore()
    assert all(torch.equal(state[name], saved[name]) for name in saved)
    storage = LocalStorage(tmp_path)
    (found,) = examine_all(storage, read_lineage(storage))
    assert verify_generation(storage, found).holds
    flip(storage, f"generations/{found.text}/rank-00000-of-00001.safetensors")
    assert len(verify_generation(storage, found).findings) == 1
    with pytest.raises(CorruptionError), sp.CheckpointManager(tmp_path, {"state": state}) as manager:
        manager.restore()


def test_a_run_is_read_by_whoever_starts_it_beside_readers_that_are_all_at_work(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    saved = {str(number): torch.full((RUN_BYTES // 4,), float(number)) for number in range(READERS + 2)}
    with sp.CheckpointManager(tmp_path, {"state": saved}) as manager:
        manager.save()
    at_work, is_joined, caller = threading.Semaphore(0), threading.Event(), threading.current_thread()
    begin, submit, started = read.check_run, ThreadPoolExecutor.submit, Counter[str]()

    def held(*arguments: Any) -> int:
        if threading.current_thread() is caller:
            is_joined.set()
        else:
            at_work.release()
            assert is_joined.wait(LONGEST_WAIT_S)
        return begin(*arguments)

    def refused_once(pool: ThreadPoolExecutor, task: Callable[[], Any]) -> Any:
        if pool._thread_name_prefix == "safepoint-read":
            started["all"] += 1
            if started["all"] == READERS + 1:
                assert all(at_work.acquire(timeout=LONGEST_WAIT_S) for _ in range(READERS))
                raise RuntimeError("cannot schedule new futures after interpreter shutdown")
        return submit(pool, task)

    monkeypatch.setattr(read, "check_run", held)
    monkeypatch.setattr(ThreadPoolExecutor, "submit", refused_once)
    state = {name: torch.zeros(RUN_BYTES // 4) for name in saved}
    with sp.CheckpointManager(tmp_path, {"state": state}) as manager:
        manager.restore()
    assert is_joined.is_set()
    assert all(torch.equal(state[name], saved[name]) for name in saved)
