"""Ballots: one consenting one from each rank, of this very save."""

from __future__ import annotations

import msgspec
import pytest

from safepoint.errors import AbortedError
from safepoint.format.ballot import Ballot, check_ballots

GENERATION = "step-000000000007-i000001-0badcafe"
BALLOTS = [Ballot("run", GENERATION, 1, rank, 3, "layout", ()) for rank in range(3)]


def check(ballots: list[Ballot]) -> None:
    check_ballots(ballots, run="run", generation=GENERATION, incarnation=1, world_size=3)


def test_one_consenting_ballot_from_each_rank_passes_in_any_order() -> None:
    check(BALLOTS)
    check(BALLOTS[::-1])


@pytest.mark.parametrize(
    "change",
    [
        {"run": "other"},
        {"generation": "step-000000000007-i000001-00000000"},
        {"incarnation": 2},
        {"world_size": 4},
        {"rank": 0},
        {"rank": 3},
        {"refusal": "the disk is full"},
    ],
    ids=repr,
)
def test_a_foreign_refusing_or_repeated_ballot_aborts(change: dict[str, object]) -> None:
    """Spec: C4.1"""
    with pytest.raises(AbortedError):
        check([*BALLOTS[:2], msgspec.structs.replace(BALLOTS[2], **change)])


def test_a_missing_or_additional_ballot_aborts() -> None:
    """Spec: C4.1"""
    for ballots in ([], BALLOTS[:2], [*BALLOTS, BALLOTS[0]]):
        with pytest.raises(AbortedError, match="not every rank voted once"):
            check(ballots)


def test_a_refusal_names_the_rank_and_its_reason() -> None:
    with pytest.raises(AbortedError, match=r"rank 2.*the disk is full"):
        check([*BALLOTS[:2], msgspec.structs.replace(BALLOTS[2], refusal="the disk is full")])
