"""A cursor in an input that someone else orders."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import BinaryIO

import pytest
from hypothesis import given
from hypothesis import strategies as st

from safepoint.data import Cursor, Replay, may_repeat, may_skip
from safepoint.errors import FormatVersionError, MismatchError, RequestError


class Log:
    """Read the lines of a growing log, some of them ahead, as the client of a message queue does."""

    def __init__(self, path: Path, ahead: int) -> None:
        self._file: BinaryIO = path.open("rb")
        self._ahead = ahead
        self._fetched: deque[bytes] = deque()
        self.cursor = Cursor(seek=self._seek, name=path.name)

    def __iter__(self) -> Iterator[str]:
        while True:
            while len(self._fetched) < self._ahead and (line := self._file.readline()):
                self._fetched.append(line)
            if not self._fetched:
                return
            line = self._fetched.popleft()
            self.cursor.advance(len(line))
            yield line.decode().strip()

    def close(self) -> None:
        self._file.close()

    def _seek(self, offset_bytes: int) -> None:
        self._fetched.clear()
        self._file.seek(offset_bytes)


@pytest.fixture
def log(tmp_path: Path) -> Iterator[Callable[[], Log]]:
    path = tmp_path / "messages.log"
    path.write_text("".join(f"message {'x' * (number % 7)}{number}\n" for number in range(100)))
    opened: list[Log] = []

    def open_log() -> Log:
        opened.append(Log(path, ahead=4))
        return opened[-1]

    yield open_log
    for one in opened:
        one.close()


def numbers(lines: list[str]) -> list[int]:
    return [int(line.split()[1].strip("x")) for line in lines]


@pytest.mark.parametrize("cut", [0, 1, 3, 50, 99, 100])
def test_a_log_read_ahead_goes_on_without_gap_or_repetition(cut: int, log: Callable[[], Log]) -> None:
    """Field report B09: what was fetched and not handed to training is fetched again."""
    first = log()
    before = [line for line, _ in zip(first, range(cut), strict=False)] if cut == 100 else []
    lines = iter(first)
    before += [next(lines) for _ in range(cut - len(before))]
    second = log()
    second.cursor.load_state_dict(first.cursor.state_dict())
    assert numbers(before + list(second)) == list(range(100))


def test_a_filtered_log_goes_on_where_it_was_read_and_not_where_it_was_kept(log: Callable[[], Log]) -> None:
    """Field report B15: the number of samples that passed a filter is not the place in the input."""
    first = log()
    odd = (line for line in first if int(line[-1]) % 2)
    before = [next(odd) for _ in range(10)]
    second = log()
    second.cursor.load_state_dict(first.cursor.state_dict())
    after = [line for line in second if int(line[-1]) % 2]
    assert numbers(before + after) == list(range(1, 100, 2))


def test_a_cursor_loaded_into_a_reader_at_work_moves_it(log: Callable[[], Log]) -> None:
    """Field report B10."""
    saved, reader = log(), log()
    for _ in zip(range(20), saved, strict=False):
        pass
    lines = iter(reader)
    next(lines)
    reader.cursor.load_state_dict(saved.cursor.state_dict())
    assert numbers([next(lines)]) == [20]


@given(steps=st.lists(st.tuples(st.integers(0, 9), st.booleans()), max_size=20))
def test_the_saved_offset_is_the_committed_one_once_anything_is_committed(steps: list[tuple[int, bool]]) -> None:
    cursor = Cursor()
    taken, committed = 0, None
    for count, commits in steps:
        cursor.advance(count)
        taken += count
        if commits:
            cursor.commit()
            committed = taken
    expected = taken if committed is None else committed
    state = cursor.state_dict()
    assert (cursor.offset, state["offset"], state["ahead"]) == (taken, expected, taken - expected)


def test_committing_in_parts_keeps_the_rest_ahead() -> None:
    cursor = Cursor(10)
    cursor.advance(5)
    cursor.commit(2)
    assert (cursor.offset, cursor.uncommitted, cursor.state_dict()["offset"]) == (15, 3, 12)
    with pytest.raises(RequestError, match="from 0 to 3"):
        cursor.commit(4)


def test_a_seek_that_fails_is_passed_on_and_leaves_the_cursor() -> None:
    def refuse(offset: int) -> None:
        raise OSError("retention removed it")

    saved = Cursor(70)
    cursor = Cursor(3, seek=refuse)
    with pytest.raises(OSError, match="retention removed it"):
        cursor.load_state_dict(saved.state_dict())
    assert cursor.offset == 3


def test_a_source_of_another_name_is_refused_before_it_is_sought() -> None:
    sought: list[int] = []
    cursor = Cursor(3, seek=sought.append, name="b")
    with pytest.raises(MismatchError, match="name of the source: saved a, now b"):
        cursor.load_state_dict(Cursor(70, name="a").state_dict())
    assert (cursor.offset, sought) == (3, [])
    cursor.load_state_dict(Cursor(70, name="a").state_dict(), permit=frozenset({"dataset"}))
    assert (cursor.offset, sought) == (70, [70])


def test_a_changed_policy_is_named() -> None:
    saved = Cursor(replay=may_repeat(64)).state_dict()
    differences = Cursor(replay="exact").differences(saved)
    assert [(one.word, one.saved, one.current) for one in differences] == [
        ("dataset.replay", "may_repeat(64)", "exact")
    ]


def test_an_exact_source_keeps_the_level_and_others_say_what_they_lose() -> None:
    assert (Cursor().replay.level, Cursor().replay.reason) == ("exact", "")
    repeating, skipping = may_repeat(64), may_skip(1)
    assert (repeating.level, skipping.level) == ("approximate", "approximate")
    assert "64" in repeating.reason and "twice" in repeating.reason
    assert "1" in skipping.reason and "left out" in skipping.reason


@pytest.mark.parametrize(("kind", "count"), [("exact", 1), ("may_repeat", 0), ("may_skip", -1), ("sometimes", 1)])
def test_a_policy_that_means_nothing_is_refused(kind: str, count: int) -> None:
    with pytest.raises(RequestError):
        Replay(kind, count)  # type: ignore[arg-type]


@pytest.mark.parametrize("offset", [-1, 1.5, True, "7"])
def test_an_offset_that_is_no_count_is_refused(offset: object) -> None:
    with pytest.raises(RequestError, match="offset"):
        Cursor(offset)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "change", [{"offset": -1}, {"offset": None}, {"replay": "no"}, {"replay_count": 3}, {"name": 3}, {"version": "1"}]
)
def test_a_state_that_is_no_cursors_is_refused(change: dict[str, object]) -> None:
    with pytest.raises(MismatchError, match="not one of a cursor"):
        Cursor().load_state_dict({**Cursor().state_dict(), **change})


def test_a_state_of_a_newer_version_asks_for_an_upgrade() -> None:
    with pytest.raises(FormatVersionError):
        Cursor().load_state_dict({**Cursor().state_dict(), "version": 2})
