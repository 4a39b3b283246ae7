"""Managers of several ranks, as threads: what concerns one rank alone concerns all, at once."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

import safepoint as sp
from safepoint.ambient import Ambient
from safepoint.group.base import Group
from safepoint.retention import after_save
from safepoint.storage.memory import MemoryStorage
from safepoint.testing.ranks import RankThread, RankThreads

Act = Callable[[sp.CheckpointManager, int], object]


@pytest.fixture
def errors_of(monkeypatch: pytest.MonkeyPatch) -> Callable[[Act], list[BaseException | None]]:
    """Return what lets two ranks make a manager and act, and returns how each ended."""
    groups: dict[int, Group] = {}
    monkeypatch.setattr("safepoint.manager.find_group", lambda *, ambient, **_: groups[ambient.pid()])

    def run(act: Act) -> list[BaseException | None]:
        storage = MemoryStorage()

        def body(rank: RankThread) -> None:
            groups[rank.ambient.pid()] = rank.group
            manager = sp.CheckpointManager(
                "memory://x", {"d": {"a": 1}}, storage=storage, ambient=rank.ambient, restore_deadline_s=500.0
            )
            try:
                act(manager, rank.rank)
            finally:
                manager._release()

        return [outcome.error for outcome in RankThreads(2).run(body)]

    return run


def test_a_wrong_option_of_one_rank_is_the_error_of_all(errors_of: Callable[[Act], list[BaseException | None]]) -> None:
    """Spec: C11.7"""
    errors = errors_of(lambda manager, rank: manager.restore(skip="d" if rank else ()))
    assert [type(one) for one in errors] == [sp.RequestError] * 2
    assert all("[rank 1: skip]" in str(one) for one in errors)


def test_a_failure_that_one_rank_is_owed_is_the_error_of_all(
    errors_of: Callable[[Act], list[BaseException | None]],
) -> None:
    """Spec: C11.7"""

    def act(manager: sp.CheckpointManager, rank: int) -> None:
        def owes(**_: object) -> None:
            raise sp.OutcomeUnknownError("the leader's word did not come", where="step-7")

        if rank == 1:
            manager._saver.raise_owed = owes  # type: ignore[method-assign, assignment]
        manager.restore()

    errors = errors_of(act)
    assert [type(one) for one in errors] == [sp.OutcomeUnknownError] * 2
    assert all("[rank 1: step-7]" in str(one) for one in errors)


def test_a_restore_waits_as_long_as_it_was_told(errors_of: Callable[[Act], list[BaseException | None]]) -> None:
    error, gone = errors_of(lambda manager, rank: None if rank else manager.restore())
    assert gone is None
    assert isinstance(error, sp.AbortedError) and "within 500 s" in str(error) and "rank 1" in str(error)


def test_no_rank_trains_on_while_the_leader_deletes(
    errors_of: Callable[[Act], list[BaseException | None]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """They would wait for it in a collective, whose time-out may be shorter."""
    took_s = 20.0
    seen_s: dict[int, tuple[float, float]] = {}
    retain = after_save.retain

    def slow(*args: Any, ambient: Ambient, **rest: Any) -> Any:
        ambient.sleep(took_s)
        return retain(*args, ambient=ambient, **rest)

    monkeypatch.setattr(after_save, "retain", slow)

    def act(manager: sp.CheckpointManager, rank: int) -> None:
        manager.restore()
        manager.after_update()
        began_s = manager._ambient.monotonic()
        manager.save()
        seen_s[rank] = began_s, manager._ambient.monotonic()

    assert errors_of(act) == [None, None]
    assert all(seen - began >= took_s for began, seen in seen_s.values())
