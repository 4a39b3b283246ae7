"""The memory of a save in the background: it is bounded where that is asked for, and is there when it is needed."""

from __future__ import annotations

import signal
import threading
from contextlib import nullcontext
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch

import safepoint as sp
from safepoint.saving import stage
from safepoint.saving.form import form_of
from safepoint.saving.ring import LiveOrigin, Ring
from safepoint.saving.stage import StagingBuffer
from safepoint.storage.aligned import paged_memory
from safepoint.storage.local import LocalStorage

LONGEST_WAIT_S = 60


class Counting:
    """A storage that counts the bytes which were handed to it for large files."""

    def __init__(self, url: Path) -> None:
        self._inner, self.written_bytes = LocalStorage(str(url)), 0
        self._lock = threading.Lock()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def create(self, path: str, *, size_bytes: int = 0) -> Any:
        writer = self._inner.create(path, size_bytes=size_bytes)
        write_at = writer.write_at

        def counted(data: memoryview, offset_bytes: int) -> None:
            write_at(data, offset_bytes)
            with self._lock:
                self.written_bytes += len(data)

        writer.write_at = counted
        return writer


def test_with_less_memory_than_the_state_a_save_blocks_until_the_rest_is_written(tmp_path: Path) -> None:
    bound, size = 32 << 20, 60 << 20
    weights, storage = {"w": torch.arange(size >> 2, dtype=torch.int32)}, Counting(tmp_path)
    state = {"weights": weights}
    manager = sp.CheckpointManager(tmp_path, state, background=True, staging_memory=bound, storage=storage)
    manager.restore()
    handle = manager.save()
    weights["w"].zero_()
    # One more piece may be on its way from the ring.
    assert handle.staged and storage.written_bytes >= size - bound
    assert manager._saver._workspace.buffer._memory is None
    assert len(manager._saver._workspace.ring._memory) == bound
    handle.wait(deadline_s=LONGEST_WAIT_S)
    manager.close()
    sp.open_run(tmp_path).load(state)
    assert torch.equal(weights["w"], torch.arange(size >> 2, dtype=torch.int32))


def test_an_interrupt_returns_to_the_loop_only_when_live_memory_is_read_no_more(tmp_path: Path) -> None:
    """A real one, which comes while the thread of the save stands in the middle of the state."""
    is_writing, is_interrupted, has_returned, goes_on = (threading.Event() for _ in range(4))
    was_early: list[bool] = []

    class Standing(Counting):
        def create(self, path: str, *, size_bytes: int = 0) -> Any:
            writer = super().create(path, size_bytes=size_bytes)
            write_at = writer.write_at

            def stand(data: memoryview, offset_bytes: int) -> None:
                is_writing.set()
                assert goes_on.wait(LONGEST_WAIT_S)
                write_at(data, offset_bytes)

            writer.write_at = stand
            return writer

    def interrupted(number: int, frame: FrameType | None) -> None:
        is_interrupted.set()
        raise KeyboardInterrupt

    def interrupt() -> None:
        assert is_writing.wait(LONGEST_WAIT_S)
        # As Ctrl-C: it has to come to a wait that only a real signal ends.
        signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)
        assert is_interrupted.wait(LONGEST_WAIT_S)
        was_early.append(has_returned.wait(0.2))
        goes_on.set()

    size = 80 << 20
    weights = {"w": torch.arange(size >> 2, dtype=torch.int32)}
    manager = sp.CheckpointManager(
        tmp_path,
        {"weights": weights},
        background=True,
        staging_memory=32 << 20,
        storage=Standing(tmp_path),
        signals=None,
    )
    manager.restore()
    previous = signal.signal(signal.SIGINT, interrupted)
    helper = threading.Thread(target=interrupt)
    try:
        helper.start()
        with pytest.raises(KeyboardInterrupt):
            manager.save()
        has_returned.set()
        weights["w"].zero_()
        helper.join()
    finally:
        signal.signal(signal.SIGINT, previous)
    assert was_early == [False]
    manager.close()
    sp.open_run(tmp_path).load({"weights": weights})
    assert torch.equal(weights["w"], torch.arange(size >> 2, dtype=torch.int32))


@pytest.mark.parametrize("interrupts", [1, 2])
def test_a_first_interrupt_is_raised_behind_the_wait_and_a_second_gives_the_save_up(
    monkeypatch: pytest.MonkeyPatch, interrupts: int
) -> None:
    origin = LiveOrigin(form_of([], is_alone=True), [], Ring())
    waits: list[int] = []

    def wait(timeout: float | None = None) -> bool:
        waits.append(len(waits))
        if len(waits) <= interrupts:
            raise KeyboardInterrupt
        origin.end()
        return True

    monkeypatch.setattr(origin._is_read, "wait", wait)
    with pytest.raises(KeyboardInterrupt):
        origin.leave_boundary()
    assert len(waits) == 2
    view = memoryview(bytearray(len(form_of([], is_alone=True).header)))
    with nullcontext() if interrupts == 1 else pytest.raises(sp.TornSnapshotError, match="interrupted twice"):
        origin.fill(view)


def test_an_interrupt_while_a_thread_is_started_returns_only_when_live_memory_is_read_no_more(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Just behind its start the thread runs and does not say so; a write past all counts would not be noticed."""
    size = 80 << 20
    weights = {"w": torch.arange(size >> 2, dtype=torch.int32)}
    manager = sp.CheckpointManager(
        tmp_path, {"weights": weights}, background=True, staging_memory=32 << 20, signals=None
    )
    manager.restore()
    start = threading.Thread.start

    def interrupted(thread: threading.Thread) -> None:
        start(thread)
        if thread.name == "safepoint-save":
            thread._started.clear()  # type: ignore[attr-defined]
            raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(threading.Thread, "start", interrupted)
        manager.save()
    weights["w"].data.zero_()
    manager.close()
    sp.open_run(tmp_path).load({"weights": weights})
    assert torch.equal(weights["w"], torch.arange(size >> 2, dtype=torch.int32))


@pytest.mark.parametrize(
    "setting", [{"staging_memory": 1 << 20}, {"staging_memory": True}, {"staging_memory": 1e9}, {"copy_behind": 1}]
)
def test_a_setting_that_is_none_is_refused(tmp_path: Path, setting: dict[str, Any]) -> None:
    with pytest.raises(sp.RequestError, match=next(iter(setting))):
        sp.CheckpointManager(tmp_path, {"n": {"n": 1}}, background=True, **setting)


def test_memory_that_was_prepared_is_that_of_the_first_save() -> None:
    buffer = StagingBuffer()
    buffer.prepare(40 << 20)
    prepared = buffer._memory
    view = buffer.view(50 << 20)
    view[-1] = 1
    assert prepared is not None and buffer._memory is prepared


def test_memory_for_a_copy_that_the_system_does_not_give_is_a_storage_error() -> None:
    buffer = StagingBuffer()
    buffer.prepare(1 << 60)
    with pytest.raises(sp.StorageError, match="ulimit -v"):
        buffer.view(1 << 60)
    assert len(buffer.view(4096)) == 4096


def test_a_training_goes_on_where_there_is_no_memory_for_the_copy_of_one_save(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    state = {"x": torch.zeros(1 << 20)}
    with sp.CheckpointManager(tmp_path, {"state": state}, save=sp.every(updates=1), background=True) as manager:
        manager.restore()
        monkeypatch.setattr(stage, "paged_memory", lambda size_bytes: paged_memory(size_bytes << 40))
        with pytest.warns(RuntimeWarning, match="no memory"):
            manager.after_update()
        monkeypatch.undo()
        manager.after_update()
    assert [checkpoint.step for checkpoint in sp.open_run(tmp_path).checkpoints()] == [2]
