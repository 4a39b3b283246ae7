"""Copying state into its image: an interrupt lets go of everything, and memory that was given back is never read."""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable

import pytest
import torch

from safepoint.errors import TornSnapshotError
from safepoint.saving import copying
from safepoint.saving.copying import Copying, Habits
from safepoint.saving.form import FileForm, form_of
from safepoint.saving.layout import LayoutBox
from safepoint.state.item import Owned
from safepoint.state.tensors import TensorSource

COUNT = 3000
LONGEST_WAIT_S = 60


@pytest.fixture(autouse=True)
def small_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have tensors of several parts, and a second thread for all of them."""
    monkeypatch.setattr(copying, "_PART_BYTES", 4096)
    monkeypatch.setattr(copying, "_LARGE_BYTES", 1)


class Case:
    """Two tensors of an optimizer, and the image of their file."""

    def __init__(self) -> None:
        self.tensors = [torch.arange(float(COUNT)), torch.ones(COUNT)]
        boxes = [LayoutBox("model", name, "float32", (COUNT,), (0,), (COUNT,)) for name in "ab"]
        self.form: FileForm = form_of(boxes, is_alone=True)
        self.image = memoryview(bytearray(self.form.size_bytes))
        self.habits = Habits()

    def copying(self) -> Copying:
        sources = [TensorSource.of(one, name) for one, name in zip(self.tensors, "ab", strict=True)]
        ranges = sorted((one.data_ptr(), one.data_ptr() + one.nbytes) for one in self.tensors)
        begins, ends = zip(*ranges, strict=True)
        owned = Owned(begins=begins, ends=ends)
        return Copying(self.form, sources, self.image, owned=owned, habits=self.habits)

    def known(self) -> Copying:
        """Return a copy all of which is made behind the training."""
        made = self.copying()
        made.leave_boundary()
        made.settle()
        assert set(self.habits.lies_still.values()) == {True}
        return self.copying()


def within(work: Callable[[], object]) -> None:
    """Do it in a thread of its own, so that a wait without end is a failure."""
    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    thread.join(LONGEST_WAIT_S)
    assert not thread.is_alive()


def test_an_interrupt_while_the_second_thread_is_started_lets_go_of_the_image(monkeypatch: pytest.MonkeyPatch) -> None:
    """That thread may run: the next save has the image, and a byte that came late would be published damaged."""
    case = Case()
    made = case.copying()

    def interrupted(work: Callable[[], object]) -> None:
        left.append(work)
        raise KeyboardInterrupt

    left: list[Callable[[], object]] = []
    monkeypatch.setattr(copying, "_started", interrupted)
    with pytest.raises(KeyboardInterrupt):
        made.leave_boundary()
    before = bytes(case.image)
    within(left[0])
    assert bytes(case.image) == before


def interrupt() -> None:
    raise KeyboardInterrupt


def test_an_interrupt_while_habits_are_looked_at_lets_the_next_save_have_the_image(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It comes in the thread of the training, while the other one looks as well."""
    made, is_interrupted = Case().copying(), threading.Event()

    def look(*ignored: object) -> bool:
        if threading.current_thread().name != "safepoint-copy":
            is_interrupted.set()
            interrupt()
        return is_interrupted.wait(LONGEST_WAIT_S)

    made.leave_boundary()
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(copying, "is_same", look)
        made.settle()
    within(made.leave_image)


class InterruptedOnce(threading.Condition):
    """Let an interrupt come to the main thread right behind the block of one number."""

    def __init__(self, number: int) -> None:
        super().__init__()
        self._left = number

    def __exit__(self, *error: object) -> None:
        super().__exit__(*error)  # type: ignore[arg-type]  # what a block is left with
        if threading.current_thread() is threading.main_thread():
            self._left -= 1
            if self._left == -1:
                interrupt()


@pytest.mark.parametrize("number", [0, 1])
def test_an_interrupt_right_behind_the_taking_of_a_part_lets_the_next_save_have_the_image(number: int) -> None:
    case = Case()
    made = case.copying()
    made._changed = InterruptedOnce(number)
    with pytest.raises(KeyboardInterrupt):
        made.advance(case.form.size_bytes)
    within(made.leave_image)


def test_an_interrupt_right_behind_the_taking_of_a_look_lets_the_next_save_have_the_image() -> None:
    made = Case().copying()
    made.leave_boundary()
    # Behind the wait for the copy and the list of what is looked at.
    made._changed = InterruptedOnce(2)
    with pytest.raises(KeyboardInterrupt):
        made.settle()
    within(made.leave_image)


def test_no_thread_writes_into_the_image_after_an_interrupt_at_the_boundary(monkeypatch: pytest.MonkeyPatch) -> None:
    """The interrupt comes while the thread of the training waits for the other one."""
    case = Case()
    made, goes_on, has_begun = case.copying(), threading.Event(), threading.Event()
    moved: list[str] = []

    def move(target: int, source: int, size: int) -> None:
        name = threading.current_thread().name
        if name == "safepoint-copy":
            has_begun.set()
            assert goes_on.wait(LONGEST_WAIT_S)
        else:
            assert has_begun.wait(LONGEST_WAIT_S)
            threading.Timer(0.2, goes_on.set).start()
            interrupt()
        moved.append(name)
        ctypes.memmove(target, source, size)

    monkeypatch.setattr(copying, "move", move)
    with pytest.raises(KeyboardInterrupt):
        made.leave_boundary()
    assert goes_on.is_set(), "the part that was under way was not waited for"
    assert len(moved) <= 1


def test_memory_that_was_given_back_is_not_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """A storage that is resized moves, past all counts, and what lies where it was is somebody else's."""
    case = Case()
    made = case.known()
    made.leave_boundary()
    read: list[int] = []
    monkeypatch.setattr(copying, "move", lambda target, source, size: read.append(source))
    storage = case.tensors[0].untyped_storage()
    storage.resize_(2 * storage.nbytes())
    with pytest.raises(TornSnapshotError, match="resized"):
        made.advance(case.form.size_bytes)
    assert read == []
    case.copying().leave_boundary()
    assert case.habits.lies_still[("model", "a", (0,))] is False


def test_memory_that_was_given_back_is_not_compared() -> None:
    case = Case()
    made = case.copying()
    made.leave_boundary()
    storage = case.tensors[0].untyped_storage()
    storage.resize_(2 * storage.nbytes())
    made.settle()
    assert case.habits.lies_still == {("model", "a", (0,)): False, ("model", "b", (0,)): True}


@pytest.mark.parametrize("most", [1, 2, 3, 16])
def test_each_byte_is_copied_once_whoever_takes_how_many_parts(monkeypatch: pytest.MonkeyPatch, most: int) -> None:
    """One thread takes parts from the front, one by one; who waits takes stretches of them from the back."""
    monkeypatch.setattr(copying, "_MOST_PARTS", most)
    moved: list[tuple[int, int]] = []
    move = copying.move
    monkeypatch.setattr(copying, "move", lambda to, of, size: (moved.append((to, size)), move(to, of, size)))
    case = Case()
    made = case.known()
    for front in range(0, len(case.image), 4096):
        moved.clear()
        case.image[len(case.form.header) :] = bytes(len(case.image) - len(case.form.header))
        made.advance(front)
        within(made.settle)
        made.advance(len(case.image))
        for entry, tensor in zip(case.form.entries, case.tensors, strict=True):
            assert case.image[entry.offset_bytes :][: entry.size_bytes] == tensor.numpy().tobytes()
        assert sum(size for _to, size in moved) == sum(one.nbytes for one in case.tensors)
        assert len({to for to, _size in moved}) == len(moved)
        made = case.copying()
