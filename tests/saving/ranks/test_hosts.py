"""Ranks on two hosts, of which one is cut off in a phase of a save; one such case is in `test_killed_ranks`."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from tests.saving.ranks.faults import Fault, Told, fault, play
from tests.saving.ranks.hosts import FAR, LEFT_OUT, cut, linked_hosts

pytestmark = [pytest.mark.soak, pytest.mark.timeout(0)]


@pytest.fixture
def hosts() -> Iterator[dict[str, str]]:
    with ExitStack() as stack:
        made = linked_hosts(stack)
        if not made:
            pytest.skip(LEFT_OUT)
        yield made


def play_on_hosts(case: Fault, folder: Path) -> Told:
    whole, told = play([fault(0, "", ""), case], folder)
    assert told.stuck == 0, told
    told.check_goes_on(whole)
    return told


@pytest.mark.parametrize("phase", ["meet", "compare", "stage", "plan", "write"])
def test_a_host_that_is_cut_off_before_it_has_voted_leaves_nothing(
    hosts: dict[str, str], tmp_path: Path, phase: str
) -> None:
    """Spec: C4.1, C4.2"""
    told = play_on_hosts(cut(hosts, rank=FAR, phase=phase), tmp_path)
    assert told.words()[:FAR] == ["AbortedError", "AbortedError"], told
    assert told.words()[FAR] in ("LeaderLostError", "OutcomeUnknownError"), told
    assert not told.is_made


def test_a_host_that_is_cut_off_after_it_has_voted_does_not_know_and_the_next_start_does(
    hosts: dict[str, str], tmp_path: Path
) -> None:
    """Spec: C4.2"""
    told = play_on_hosts(cut(hosts, rank=0, phase="check"), tmp_path)
    assert told.words() == ["saved", "saved", "OutcomeUnknownError"], told
    assert told.is_made
