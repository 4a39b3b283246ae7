"""Replicas are compared: one bit on one rank is found, and named on all."""

from __future__ import annotations

import pytest

from safepoint.contract import judge
from safepoint.errors import AbortedError
from safepoint.faults.group import MessageEffect, MessageFault
from safepoint.saving.context import SaveResult
from tests.saving.ranks.job import Held, Holding, Ranks, box, manifests, replicated, weights_at, whole

FIRST, SECOND = weights_at(1), weights_at(2)


def differing(*ranks: int, at_step: int = 10, is_leaders: bool = False) -> Holding:
    """Return what ranks hold of which these have one bit of the second tensor flipped."""

    def holds(rank: int, world_size: int, step: int) -> list[Held]:
        second = bytearray(SECOND)
        second[50] ^= int(rank in ranks and step == at_step)
        tensors = [
            box("a", FIRST, 0, 96),
            box("b", bytes(second), 0, 96, is_leaders=is_leaders),
            box("c", FIRST, 0, 96),
        ]
        return [Held("model", "module", None, tensors)]

    return holds


@pytest.mark.parametrize(("ranks", "sides"), [((2,), "ranks 0, 1 unlike rank 2"), ((0,), "rank 0 unlike ranks 1, 2")])
def test_one_bit_on_one_rank_refuses_the_save_and_names_tensor_and_ranks(ranks: tuple[int, ...], sides: str) -> None:
    """Spec: C5.1, C5.4"""
    job = Ranks(3, differing(*ranks))
    for outcome in job.run(lambda rank: (rank.try_to_save(10), rank.save(20))):
        error, _ = outcome.returned()  # type: ignore[misc]
        assert isinstance(error, AbortedError)
        assert f"model/b at [0]: {sides}" in str(error)
    assert [one.step for one in manifests(job.storage)] == [20]
    assert len(job.storage.list("generations")) == 1, "the refused one is taken back by all ranks"
    assert manifests(job.storage)[0].agreement == "3 replicated boxes compared, equal"


def of_rank(rank: int, world_size: int, step: int) -> list[Held]:
    """Return weights of which every rank has its own."""
    return [Held("model", "module", None, [box("w", bytes([rank]) * 96, 0, 96), box("v", bytes([rank]) * 7, 0, 7)])]


def test_a_difference_may_be_noted_instead() -> None:
    """Spec: C5.4"""
    job = Ranks(3, differing(2), refuses_difference=False)
    for outcome in job.run(lambda rank: rank.save(10)):
        outcome.returned()
    (manifest,) = manifests(job.storage)
    assert "model/b at [0]: ranks 0, 1 unlike rank 2" in manifest.agreement
    promise = judge(manifest.conditions, manifest.conditions)
    assert [reason.word for reason in promise.reasons] == ["replicas"]
    assert promise.level == "approximate"
    assert "model/b at [0]: ranks 0, 1 unlike rank 2" in str(promise.reasons[0])


@pytest.mark.parametrize(("every", "refuses"), [(1, False), (0, True), (0, False), (2, True)])
def test_what_is_stored_is_of_one_rank_where_ranks_may_differ(every: int, refuses: bool) -> None:
    """Spec: C5.4"""
    job = Ranks(3, of_rank, compares_every=every, refuses_difference=refuses)
    steps = (10, 20) if every == 2 else (20,)
    for outcome in job.run(lambda rank: [rank.try_to_save(step) for step in steps]):
        assert isinstance(outcome.returned()[-1], SaveResult)  # type: ignore[index]
    (manifest,) = manifests(job.storage)
    assert whole(job.storage, manifest, "model", "w") == bytes(96)
    assert whole(job.storage, manifest, "model", "v") == bytes(7)


def test_sums_that_cannot_be_read_abort_the_save_on_every_rank() -> None:
    """Spec: C4.1, C7.1"""
    fault = MessageFault(MessageEffect.FOREIGN, key="save/*/sums/1")
    texts = {
        str(outcome.error) for outcome in Ranks(3, differing(2), faults={1: fault}).run(lambda rank: rank.save(10))
    }
    (text,) = texts
    assert "the checksums of a rank cannot be decoded" in text


def test_what_is_the_leader_s_may_differ_and_its_bytes_are_stored() -> None:
    """Spec: C5.4"""
    job = Ranks(3, differing(1, 2, is_leaders=True))
    for outcome in job.run(lambda rank: rank.save(10)):
        outcome.returned()
    (manifest,) = manifests(job.storage)
    assert whole(job.storage, manifest, "model", "b") == SECOND
    assert manifest.agreement == (
        "3 replicated boxes compared, equal, but for buffers, of which the lowest rank's are stored"
    )


@pytest.mark.parametrize(("every", "compared"), [(0, []), (1, [10, 20, 30, 40]), (3, [10, 40])])
def test_they_are_compared_as_often_as_was_asked_for_and_the_time_is_told(every: int, compared: list[int]) -> None:
    job = Ranks(2, replicated, compares_every=every)
    for outcome in job.run(lambda rank: [rank.save(step) for step in (10, 20, 30, 40)]):
        outcome.returned()
    found = manifests(job.storage)[::-1]
    assert [one.step for one in found if one.agreement.endswith("equal")] == compared
    assert [one.step for one in found if one.agreement == "not compared"] == [
        step for step in (10, 20, 30, 40) if step not in compared
    ]
    assert [one.step for one in found if "compare" in one.timings_s] == compared


def test_a_difference_between_some_holders_of_a_part_is_found() -> None:
    """Two ranks hold the first half and two the second, as in a hybrid of both kinds.

    Spec: C5.1
    """

    def holds(rank: int, world_size: int, step: int) -> list[Held]:
        weights = bytearray(FIRST)
        weights[60] ^= int(rank == 3)
        start = 48 * (rank // 2)
        return [Held("model", "module", None, [box("w", bytes(weights), start, start + 48)])]

    for outcome in Ranks(4, holds).run(lambda rank: rank.save(10)):
        assert isinstance(outcome.error, AbortedError)
        assert "model/w at [48]: rank 2 unlike rank 3" in str(outcome.error)


def test_a_rank_that_dies_when_its_sums_are_asked_for_aborts_the_save() -> None:
    """Spec: C4.1"""
    fault = MessageFault(MessageEffect.STOP, key="save/*/sums/1")
    job = Ranks(3, differing(2), faults={1: fault})
    outcomes = job.run(lambda rank: rank.save(10))
    assert [isinstance(outcome.error, AbortedError) for outcome in outcomes] == [True, False, True]
    assert manifests(job.storage) == []
