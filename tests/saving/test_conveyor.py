"""Two pieces of a file under way at a time: in any order, each once, and none left behind."""

from __future__ import annotations

import random
import sys
import threading
from pathlib import Path

import pytest

from safepoint.errors import RequestError, StorageError
from safepoint.saving.conveyor import Conveyor
from safepoint.storage.local import LocalStorage

PIECE = 4096
LONGEST_WAIT_S = 60


def writing_threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "safepoint-write"]


class Unordered:
    """A writer of parts that takes each part of an even number only after the next one."""

    def __init__(self, size_bytes: int) -> None:
        self.data = bytearray(size_bytes)
        self.most = 0
        self._under_way, self._changed = 0, threading.Condition()
        self._done: set[int] = set()

    def write(self, data: memoryview) -> None:
        raise AssertionError("parts have places")

    def write_at(self, data: memoryview, offset_bytes: int) -> None:
        behind = offset_bytes + PIECE
        with self._changed:
            self._under_way += 1
            self.most = max(self.most, self._under_way)
            if offset_bytes // PIECE % 2 == 0 and behind < len(self.data):
                assert self._changed.wait_for(lambda: behind in self._done, LONGEST_WAIT_S)
            self.data[offset_bytes : offset_bytes + len(data)] = data
            self._under_way -= 1
            self._done.add(offset_bytes)
            self._changed.notify_all()

    def finish(self) -> None:
        return None

    def abandon(self) -> None:
        raise AssertionError("nothing failed")


@pytest.mark.parametrize("depth", [2, 3, 7, 21])
def test_two_pieces_are_under_way_and_memory_is_used_again_only_for_what_is_written(
    depth: int, chance: random.Random
) -> None:
    content = chance.randbytes(20 * PIECE + 17)
    writer = Unordered(len(content))
    ring = [bytearray(PIECE) for _ in range(depth + 1)]
    with Conveyor(writer, depth=depth) as conveyor:
        for number, begin in enumerate(range(0, len(content), PIECE)):
            part = content[begin : begin + PIECE]
            memory = ring[number % len(ring)]
            memory[: len(part)] = part
            conveyor.put(memoryview(memory)[: len(part)])
    assert writer.data == content
    assert writer.most == 2


class Unheld:
    """A writer of parts that tells of each when it is begun."""

    def __init__(self) -> None:
        self.begun: list[int] = []
        self.may_end = threading.Event()

    def write(self, data: memoryview) -> None:
        raise AssertionError("parts have places")

    def write_at(self, data: memoryview, offset_bytes: int) -> None:
        self.begun.append(offset_bytes)
        assert self.may_end.wait(LONGEST_WAIT_S)

    def finish(self) -> None:
        return None

    def abandon(self) -> None:
        raise AssertionError("nothing failed")


def test_what_a_thread_is_free_for_is_begun_at_once_though_the_interpreter_is_held() -> None:
    """No thread would come to it by itself meanwhile: the interpreter is asked for after an hour at the earliest."""
    writer, interval_s = Unheld(), sys.getswitchinterval()
    sys.setswitchinterval(3600)
    try:
        with Conveyor(writer, depth=3) as conveyor:
            for count, begun in ((1, [0]), (2, [0, PIECE]), (3, [0, PIECE])):
                conveyor.put(memoryview(bytes(PIECE)))
                assert writer.begun == begun, count
            writer.may_end.set()
    finally:
        sys.setswitchinterval(interval_s)
    assert sorted(writer.begun) == [0, PIECE, 2 * PIECE]


class Failing:
    """A writer of two parts: the first fails while the second is under way, and that ends when it is waited for."""

    def __init__(self) -> None:
        self.is_waited_for = threading.Event()
        self.second: threading.Thread | None = None
        self.left: list[int] = []
        self._is_begun = threading.Event()

    def write(self, data: memoryview) -> None:
        raise AssertionError("parts have places")

    def write_at(self, data: memoryview, offset_bytes: int) -> None:
        if offset_bytes:
            self.second = threading.current_thread()
            self._is_begun.set()
            self.is_waited_for.wait(LONGEST_WAIT_S)
        else:
            assert self._is_begun.wait(LONGEST_WAIT_S)
            raise StorageError("no")

    def finish(self) -> None:
        raise AssertionError("a part failed")

    def abandon(self) -> None:
        self.left.append(len(writing_threads()))
        self.is_waited_for.set()


def test_a_failure_of_one_piece_waits_for_the_other_before_the_file_is_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Closed under a thread that still writes, its descriptor might be that of another file by then. Spec: C3.2."""
    writer = Failing()
    join = threading.Thread.join

    def joined(thread: threading.Thread, timeout: float | None = None) -> None:
        if thread is writer.second:
            writer.is_waited_for.set()
        join(thread, timeout)

    monkeypatch.setattr(threading.Thread, "join", joined)
    with pytest.raises(StorageError), Conveyor(writer, depth=2) as conveyor:
        conveyor.put(memoryview(bytes(PIECE)))
        conveyor.put(memoryview(bytes(PIECE)))
    assert writer.left == [0]


@pytest.mark.parametrize("count", [0, 1])
def test_the_file_is_whole_with_as_many_threads_as_the_system_gives(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, count: int, chance: random.Random
) -> None:
    start = threading.Thread.start

    def limited(thread: threading.Thread) -> None:
        if thread.name == "safepoint-write" and len(writing_threads()) >= count:
            raise RuntimeError("can't start new thread")
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", limited)
    content = chance.randbytes(20 * PIECE + 17)
    storage = LocalStorage(tmp_path)
    with Conveyor(storage.create("file", size_bytes=len(content)), depth=3) as conveyor:
        for begin in range(0, len(content), PIECE):
            conveyor.put(memoryview(content[begin : begin + PIECE]))
    assert (tmp_path / "file").read_bytes() == content


@pytest.mark.parametrize("number", [1, 2])
def test_an_interrupt_while_a_thread_is_started_leaves_no_thread_and_no_open_file(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, number: int
) -> None:
    start = threading.Thread.start
    begun: list[threading.Thread] = []

    def interrupted(thread: threading.Thread) -> None:
        begun.append(thread)
        start(thread)
        if len(begun) == number:
            raise KeyboardInterrupt

    writer = LocalStorage(tmp_path).create("file", size_bytes=2 * PIECE)
    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", interrupted)
        with pytest.raises(KeyboardInterrupt):
            Conveyor(writer, depth=2)
    for thread in begun:
        thread.join(LONGEST_WAIT_S)
    assert not writing_threads()
    with pytest.raises(RequestError, match="closed"):
        writer.write(memoryview(b"more"))
