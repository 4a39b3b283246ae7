"""Objects of the user's own after a restore: what they tell is compared with what they were given."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

import safepoint as sp


class Deaf:
    """Does not take what it is given."""

    def __init__(self, n: int) -> None:
        self.n = n

    def state_dict(self) -> dict[str, int]:
        return {"n": self.n}

    def load_state_dict(self, state: dict[str, int]) -> None:
        pass


class Lazy:
    """Takes what it is given when it is next iterated."""

    def __init__(self, n: int) -> None:
        self.n = self.given = n

    def state_dict(self) -> dict[str, int]:
        return {"n": self.n}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.given = state["n"]

    def __iter__(self) -> Iterator[int]:
        self.n = self.given
        yield self.n


def saved_item(url: Path, entry: object) -> None:
    manager = sp.CheckpointManager(url, {"meter": entry})
    manager.save()
    manager.close()


def test_an_object_that_did_not_take_its_state_lowers_the_promise_by_its_word(tmp_path: Path) -> None:
    saved_item(tmp_path, Deaf(9))
    manager = sp.CheckpointManager(tmp_path, {"meter": Deaf(0)})
    with pytest.raises(sp.ContractError, match=r"load_state_dict\(\) was given") as caught:
        manager.restore()
    assert [one.word for one in caught.value.differences] == ["meter.state"]
    assert "Nothing was changed" not in str(caught.value)
    with pytest.raises(sp.InternalError, match="mixture"):
        manager.after_update()
    manager.close()

    manager = sp.CheckpointManager(tmp_path, {"meter": Deaf(0)}, contract=sp.Contract(permit={"meter.state"}))
    report = manager.restore()
    assert report.promise.level == "approximate"
    assert [one.word for one in report.reasons] == ["meter.state"]
    assert "load_state_dict() was given" in str(report)
    manager.after_update()
    manager.close()


def test_an_iterable_that_takes_its_state_when_it_is_next_iterated_is_noted_and_lowers_nothing(tmp_path: Path) -> None:
    """So do loaders and data sets of others: they tell the state that they were given only while they are iterated."""
    saved_item(tmp_path, Lazy(9))
    lazy = Lazy(0)
    manager = sp.CheckpointManager(tmp_path, {"meter": lazy})
    report = manager.restore()
    assert report.promise.level == "exact"
    assert len(report.notes) == 1 and "meter" in report.notes[0] and report.notes[0] in str(report)
    assert next(iter(lazy)) == 9
    manager.close()
