"""A rank reads back what it was given: less of it is a failure, unless other ranks have the rest."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from safepoint.errors import InternalError
from safepoint.format.plain import encode_plain
from safepoint.state.item import Permits, SavedItem
from safepoint.storage.memory import MemoryStorage
from tests.build import begin, write_generation
from tests.restoring.ranks.jobs import Part, same, start


class Takes(Part):
    """An item that takes something else than what it is given."""

    __slots__ = ("taken",)

    def __init__(self, taken: object) -> None:
        super().__init__("model", {})
        self.taken = taken

    def apply(self, saved: SavedItem, permits: Permits) -> Sequence[str]:
        self.plain = self.taken
        return []


def run_with(*trees: object, of: int) -> MemoryStorage:
    """Return a run of so many ranks, the first of which stored a tree each."""
    storage = MemoryStorage()
    stored = [{"model": encode_plain(tree)} for tree in trees] + [{}] * (of - len(trees))
    write_generation(storage, 1, chain=begin(storage), ranks=[{}] * of, plain_of_ranks=stored)
    return storage


def module(*names: str, value: object = 1, **extra: object) -> dict[str, Any]:
    entries = {
        name: {"kind": "buffer", "persistent": True, "requires_grad": False, "value": value, "ties": []}
        for name in sorted(names)
    }
    return {"entries": entries, "extra": extra, "training": []}


def optimizer(*names: str, step: int = 3, **other: object) -> dict[str, Any]:
    group = {"parameters": [f"m/{name}" for name in names], "devices": ["cpu"] * len(names), "options": {"lr": 0.5}}
    state = {"m": {name: {"step": step} for name in names}}
    return {"class": "Adam", "groups": [group], "state": state, "other": other, "extra": {}}


LESS = {
    "a key of the user's": ({"a": 1, "b": 2}, {"a": 1}),
    "an element of a list": ({"names": ["b", "a", "b"]}, {"names": ["a", "b"]}),
    "an entry of a module": (module("a", "b"), module("a")),
    "a key of an extra state": (module("a", x={"s": 1, "t": 2}), module("a", x={"s": 1})),
    "a state of an optimizer": (optimizer("a", "b"), optimizer("a")),
}
OTHER = {
    "a key of an extra state": LESS["a key of an extra state"],
    "another value of an entry": (module("a", value=["x", "y"]), module("a", value=["y", "x"])),
    "another value of a state": (optimizer("a"), optimizer("a", step=4)),
    "a key of other values of an optimizer": (optimizer("a", x=1), optimizer("a")),
}


def check_is_refused(storage: MemoryStorage, taken: object, ranks: int) -> None:
    started = start([storage] * ranks, [{"model": Takes(taken)} for _ in range(ranks)])
    assert all(isinstance(outcome.error, InternalError) for outcome in started.outcomes), started.errors()
    assert same(started.errors())


@pytest.mark.parametrize("case", sorted(LESS))
@pytest.mark.parametrize("saved", [2, 3])
def test_ranks_that_each_have_the_whole_are_refused_with_less(case: str, saved: int) -> None:
    """Spec: C11.8"""
    given, taken = LESS[case]
    check_is_refused(run_with(given, of=saved), taken, ranks=saved)


@pytest.mark.parametrize("case", sorted(LESS))
def test_one_process_that_has_the_whole_is_refused_with_less(case: str) -> None:
    """Spec: C11.8"""
    given, taken = LESS[case]
    check_is_refused(run_with(given, of=2), taken, ranks=1)


@pytest.mark.parametrize("case", sorted(OTHER))
def test_a_part_of_the_names_has_the_values_that_were_saved(case: str) -> None:
    """Spec: C11.8"""
    given, taken = OTHER[case]
    check_is_refused(run_with(given, of=2), taken, ranks=3)


def test_a_rank_of_several_may_have_some_of_the_names_and_one_process_them_in_another_order() -> None:
    for make in (module, optimizer):
        for storage in (run_with(make("a", "b"), of=3), run_with(make("a"), make("b"), of=2)):
            start([storage] * 2, [{"model": Takes(make(name))} for name in "ab"]).reports()
        start([run_with(make("b"), make("a"), of=2)], [{"model": Takes(make("a", "b"))}]).reports()
