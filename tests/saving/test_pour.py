"""The one way of a data file to the storage: the right bytes and digests, and one failure, whatever thread it is in."""

from __future__ import annotations

import errno
import functools
import random
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import torch
import xxhash

from safepoint.errors import InternalError, RequestError, StorageError, TornSnapshotError
from safepoint.faults.script import Effect, Fault, FaultScript, SimulatedCrash
from safepoint.faults.storage import FaultyStorage
from safepoint.saving import conveyor
from safepoint.saving import pour as pouring
from safepoint.saving.copying import Copying, Habits
from safepoint.saving.form import FileForm, form_of
from safepoint.saving.layout import LayoutBox
from safepoint.saving.pour import Origin, Spent
from safepoint.saving.ring import LiveOrigin, Ring
from safepoint.saving.stage import ImageOrigin, StagingBuffer
from safepoint.state.item import Owned, Source
from safepoint.state.tensors import TensorSource
from safepoint.storage.local import LocalStorage
from safepoint.storage.memory import MemoryStorage, MemoryWriter

PIECE = 4096
LONGEST_WAIT_S = 60
pour = functools.partial(pouring.pour, clock=lambda: 0.0, spent=Spent())


@dataclass(slots=True)
class Dense:
    """Bytes that lie as they are stored, and may have been written to."""

    data: bytes
    is_torn: bool = False

    @property
    def nbytes(self) -> int:
        return len(self.data)

    def copy_into(self, buffer: memoryview) -> None:
        buffer[:] = self.data
        self.check()

    def in_place(self) -> memoryview | None:
        return memoryview(self.data)

    def check(self) -> None:
        if self.is_torn:
            raise TornSnapshotError("it moved")


@dataclass(slots=True)
class Strided:
    """Bytes that have to be gathered, by rows."""

    data: bytes
    row_bytes: int
    asked: list[tuple[int, int]] = field(default_factory=list)

    @property
    def nbytes(self) -> int:
        return len(self.data)

    def copy_into(self, buffer: memoryview) -> None:
        buffer[:] = self.data

    def in_place(self) -> memoryview | None:
        return None

    def check(self) -> None:
        return None

    def rows(self, start: int, stop: int) -> Source:
        self.asked.append((start, stop))
        return Dense(self.data[start * self.row_bytes : stop * self.row_bytes])


@dataclass(slots=True)
class Opaque:
    """Bytes that can only be read whole."""

    data: bytes

    @property
    def nbytes(self) -> int:
        return len(self.data)

    def copy_into(self, buffer: memoryview) -> None:
        buffer[:] = self.data

    def in_place(self) -> memoryview | None:
        return None

    def check(self) -> None:
        return None


def box(name: str, *shape: int) -> LayoutBox:
    return LayoutBox("model", name, "uint8", shape, (0,) * len(shape), shape)


def made(chance: random.Random) -> tuple[FileForm, list[Source], bytes]:
    """Return a form, sources of all kinds for it, and the file that they make."""
    lengths = [chance.choice([0, 1, 5, 4095, 4096, 4097, 9000, 30_000]) for _ in range(chance.randint(1, 8))]
    contents = [chance.randbytes(length) for length in lengths]
    kinds = [Dense, Opaque, lambda data: Strided(data, 1)]
    sources: list[Source] = [chance.choice(kinds)(content) for content in contents]
    form = form_of([box(f"w{number}", length) for number, length in enumerate(lengths)], is_alone=True)
    return form, sources, form.header + b"".join(contents)


def live(form: FileForm, sources: Sequence[Source]) -> Origin:
    return LiveOrigin(form, sources, Ring(piece_bytes=PIECE))


def staged(form: FileForm, sources: Sequence[Source]) -> Origin:
    image = StagingBuffer().view(form.size_bytes)
    copying = Copying(form, sources, image, owned=Owned(), habits=Habits())
    copying.leave_boundary()
    return ImageOrigin(image, copying, piece_bytes=PIECE)


def expected_digests(form: FileForm, content: bytes) -> list[str]:
    begins = [0, *(chunk.offset_bytes for entry in form.entries for chunk in entry.chunks)]
    ends = [*begins[1:], len(content)]
    return [xxhash.xxh3_128_hexdigest(content[begin:end]) for begin, end in zip(begins, ends, strict=True)]


@pytest.mark.parametrize("origin_of", [live, staged])
def test_what_is_stored_is_the_file_and_each_digest_that_of_its_bytes(
    origin_of: type[Origin], chance: random.Random
) -> None:
    """Spec: F3.9, F3.10."""
    storage = MemoryStorage()
    storage.make_root()
    for number in range(40):
        form, sources, content = made(chance)
        found = pour(storage.create(f"file-{number}"), form, origin_of(form, sources))
        assert storage.read(f"file-{number}", limit_bytes=len(content)) == content
        assert found == expected_digests(form, content)


def test_small_tensors_are_read_many_at_once_and_one_that_spans_pieces_for_itself(chance: random.Random) -> None:
    lengths = [chance.choice([0, 1, 60, 60, 60, 1000, 70_000]) for _ in range(300)]
    tensors = [torch.rand(length) for length in lengths]
    tensors[7] = torch.rand(9, 5).t()
    boxes = [
        LayoutBox("m", f"{n:03}", "float32", tuple(one.shape), (0,) * one.dim(), tuple(one.shape))
        for n, one in enumerate(tensors)
    ]
    form = form_of(boxes, is_alone=True)
    storage = MemoryStorage()
    storage.make_root()
    found = pour(storage.create("file"), form, live(form, [TensorSource.of(one, "") for one in tensors]))
    content = form.header + b"".join(one.contiguous().numpy().tobytes() for one in tensors)
    assert storage.read("file", limit_bytes=len(content)) == content
    assert found == expected_digests(form, content)


def test_a_chunk_may_span_pieces_and_is_gathered_alone() -> None:
    """Spec: F3.8."""
    rows = bytes(range(256)) * (300 * 1024)
    form = form_of([box("w", 75, 1 << 20)], is_alone=True)
    source = Strided(rows, 1 << 20)
    storage = MemoryStorage()
    storage.make_root()
    found = pour(storage.create("file"), form, LiveOrigin(form, [source], Ring()))
    assert source.asked == [(0, 64), (64, 75)]
    assert found[1:] == [xxhash.xxh3_128_hexdigest(rows[: 64 << 20]), xxhash.xxh3_128_hexdigest(rows[64 << 20 :])]
    assert storage.size("file") == form.size_bytes


class Lagging:
    """A writer that takes a piece only when the origin has filled as many further ones as it may."""

    def __init__(self, origin: Filling, bounds: Sequence[int]) -> None:
        self.data = bytearray()
        self._origin, self._bounds = origin, bounds

    def write(self, data: memoryview) -> None:
        number = self._bounds.index(len(self.data))
        ahead = min(number + 1 + self._origin.depth, len(self._bounds) - 1)
        assert self._origin.wait_for(self._bounds[ahead])
        self.data += data
        assert len(self.data) == self._bounds[number + 1]

    def finish(self) -> None:
        return None

    def abandon(self) -> None:
        return None


class Filling:
    """Count how much of the file the origin has filled."""

    def __init__(self, inner: Origin) -> None:
        self._inner, self._filled, self._changed = inner, 0, threading.Condition()
        self.piece_bytes, self.depth = inner.piece_bytes, inner.depth

    def piece(self, begin: int, end: int) -> memoryview:
        return self._inner.piece(begin, end)

    def fill(self, view: memoryview) -> None:
        self._inner.fill(view)
        with self._changed:
            self._filled += len(view)
            self._changed.notify_all()

    def wait_for(self, filled: int) -> bool:
        with self._changed:
            return self._changed.wait_for(lambda: self._filled >= filled, LONGEST_WAIT_S)


def test_no_piece_is_filled_again_before_it_is_written(chance: random.Random) -> None:
    content = chance.randbytes(20 * PIECE + 17)
    form = form_of([box("w", len(content))], is_alone=True)
    origin = Filling(live(form, [Dense(content)]))
    writer = Lagging(origin, [*range(0, form.size_bytes, PIECE), form.size_bytes])
    pour(writer, form, origin)
    assert writer.data == form.header + content


# A file of one piece goes whole: nothing is written beside anything else.
@pytest.mark.parametrize(("size", "begins"), [(3, [0]), (22, [0, 1, 2, 4, 8, 12, 16, 20])])
def test_the_disk_need_not_wait_for_a_whole_piece(size: int, begins: list[int], chance: random.Random) -> None:
    content = chance.randbytes(size << 20)
    form = form_of([box("w", len(content))], is_alone=True)
    origin = Filling(LiveOrigin(form, [Dense(content)], Ring(piece_bytes=4 << 20)))
    writer = Lagging(origin, [*(begin << 20 for begin in begins), form.size_bytes])
    digests = pour(writer, form, origin)
    assert writer.data == form.header + content
    assert digests == [xxhash.xxh3_128_hexdigest(part) for part in (form.header, content)]


@pytest.mark.parametrize("number", [0, 1, 4, 20])
@pytest.mark.parametrize(
    ("effect", "error"),
    [(Effect.FAIL, StorageError), (Effect.LOSE_ANSWER, StorageError), (Effect.STOP, SimulatedCrash)],
)
def test_a_failure_of_any_piece_is_the_failure_of_the_file(
    number: int, effect: Effect, error: type[BaseException], chance: random.Random
) -> None:
    """Spec: C3.2."""
    form = form_of([box("w", 20 * PIECE)], is_alone=True)
    fault = Fault(effect, verb="write", errno=errno.ENOSPC, occurrence=number)
    storage = FaultyStorage(MemoryStorage(), FaultScript((fault,)))
    storage.make_root()
    with pytest.raises(error):
        pour(storage.create("file"), form, live(form, [Dense(chance.randbytes(20 * PIECE))]))
    verbs = [verb for _, verb, _ in storage.operations]
    assert verbs == ["make_root", "create"] + ["write"] * (number + 1)
    assert not writing_threads()


def test_what_the_time_went_to_is_counted_where_it_was_spent(monkeypatch: pytest.MonkeyPatch) -> None:
    """By a clock that only the source, the digests and the storage move: 3 s for each gathered box, and so on."""
    seconds = [0.0]

    class Slow(Opaque):
        def copy_into(self, buffer: memoryview) -> None:
            seconds[0] += 3.0
            super().copy_into(buffer)

    class SlowWriter(MemoryWriter):
        def write(self, data: memoryview) -> None:
            seconds[0] += 5.0
            super().write(data)

        def finish(self) -> None:
            seconds[0] += 7.0
            super().finish()

    taken = pouring.digest_bytes

    def slow_digest(data: memoryview) -> str:
        seconds[0] += 11.0
        return taken(data)

    monkeypatch.setattr(pouring, "digest_bytes", slow_digest)
    form = form_of([box("w", 100), box("v", 200)], is_alone=True)
    spent = Spent()
    # One piece: nothing is written beside anything else.
    origin = LiveOrigin(form, [Slow(bytes(100)), Slow(bytes(200))], Ring(piece_bytes=4 * PIECE))
    writer = SlowWriter(bytearray(), threading.Lock(), "file")
    pouring.pour(writer, form, origin, clock=lambda: seconds[0], spent=spent)
    # Two boxes; the digests of them and of the header; one piece, and the syncs.
    assert (spent.copy_s, spent.digest_s, spent.storage_s) == (6.0, 33.0, 12.0)


@pytest.mark.parametrize("pieces", [1, 20])
def test_what_is_done_meanwhile_has_all_digests_and_comes_before_the_sync(pieces: int, chance: random.Random) -> None:
    content = chance.randbytes(pieces * PIECE - 4000)
    form = form_of([box("w", len(content))], is_alone=True)
    storage = FaultyStorage(MemoryStorage())
    storage.make_root()
    told: list[list[str]] = []

    def meanwhile(digests: list[str]) -> None:
        assert "finish" not in [verb for _, verb, _ in storage.operations]
        told.append(list(digests))

    found = pour(storage.create("file"), form, live(form, [Dense(content)]), meanwhile=meanwhile)
    assert told == [found] == [[xxhash.xxh3_128_hexdigest(part) for part in (form.header, content)]]
    assert [verb for _, verb, _ in storage.operations][-1] == "finish"


@pytest.mark.parametrize("pieces", [1, 20])
def test_a_failure_of_what_is_done_meanwhile_leaves_no_finished_file(pieces: int, tmp_path: Path) -> None:
    def fail(digests: list[str]) -> None:
        raise StorageError("the index does not fit")

    form = form_of([box("w", pieces * PIECE - 4000)], is_alone=True)
    writer = LocalStorage(tmp_path).create("file")
    with pytest.raises(StorageError, match="the index"):
        pour(writer, form, live(form, [Dense(bytes(pieces * PIECE - 4000))]), meanwhile=fail)
    with pytest.raises(RequestError, match="closed"):
        writer.finish()
    assert not writing_threads()


def test_a_failed_sync_is_the_failure_of_the_file() -> None:
    """Spec: C3.2."""
    form = form_of([box("w", 3 * PIECE)], is_alone=True)
    storage = FaultyStorage(MemoryStorage(), FaultScript((Fault(Effect.FAIL, verb="finish"),)))
    storage.make_root()
    with pytest.raises(StorageError):
        pour(storage.create("file"), form, live(form, [Dense(bytes(3 * PIECE))]))
    assert not writing_threads()


@pytest.mark.parametrize("size", [0, 100, 3 * PIECE])
@pytest.mark.parametrize("place", [0, 1, 2])
@pytest.mark.parametrize("origin_of", [live, staged])
def test_a_tensor_that_was_written_to_leaves_no_finished_file(
    origin_of: Callable[[FileForm, Sequence[Source]], Origin], place: int, size: int
) -> None:
    storage = FaultyStorage(MemoryStorage())
    storage.make_root()
    form = form_of([box(f"w{number}", size) for number in range(3)], is_alone=True)
    sources = [Dense(bytes(size), is_torn=number == place) for number in range(3)]
    writer = storage.create("file")
    with pytest.raises(TornSnapshotError):
        pour(writer, form, origin_of(form, sources))
    assert "finish" not in [verb for _, verb, _ in storage.operations]
    assert not writing_threads()


def test_an_abandoned_file_is_closed(tmp_path: object) -> None:
    storage = LocalStorage(str(tmp_path))
    form = form_of([box("w", 3 * PIECE)], is_alone=True)
    writer = storage.create("file")
    with pytest.raises(TornSnapshotError):
        pour(writer, form, live(form, [Dense(bytes(3 * PIECE), is_torn=True)]))
    with pytest.raises(RequestError, match="closed"):
        writer.write(memoryview(b"more"))


def test_a_source_of_another_size_than_its_box_is_refused() -> None:
    form = form_of([box("w", 3 * PIECE)], is_alone=True)
    storage = MemoryStorage()
    storage.make_root()
    with pytest.raises(InternalError, match="other bytes"):
        pour(storage.create("file"), form, live(form, [Dense(bytes(3 * PIECE - 1))]))


def test_where_no_thread_can_be_started_the_file_is_written_all_the_same(
    monkeypatch: pytest.MonkeyPatch, chance: random.Random
) -> None:
    """At the end of the interpreter, a save in flight has to complete."""

    def refuse(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread at interpreter shutdown")

    monkeypatch.setattr(conveyor.threading.Thread, "start", refuse)
    content = chance.randbytes(9 * PIECE)
    form = form_of([box("w", len(content))], is_alone=True)
    storage = MemoryStorage()
    storage.make_root()
    pour(storage.create("file"), form, live(form, [Dense(content)]))
    assert storage.read("file", limit_bytes=form.size_bytes) == form.header + content


def writing_threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "safepoint-write"]
