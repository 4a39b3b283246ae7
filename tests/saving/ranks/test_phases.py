"""Each phase of a save, each rank, each mishap of a message or its rank: all or nothing, and no wrong word.

The second of three saves meets the fault. Afterwards the ranks wait until the clock has passed everything.
"""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from safepoint.errors import AbortedError, LeaderLostError, OutcomeUnknownError, SafepointError
from safepoint.faults.group import (
    OF_MESSAGES,
    MessageEffect,
    MessageFault,
    MessageScript,
    random_message_scripts,
)
from safepoint.faults.script import SimulatedCrash
from safepoint.saving.context import SaveResult
from safepoint.storage.base import Storage
from safepoint.testing.ambient import FakeWorld
from safepoint.testing.ranks import RankOutcome
from tests.saving.ranks.job import DEADLINE_S, Rank, Ranks, manifests, sharded, weights_at, whole

RANKS = 3
PAUSE_S = 6 * DEADLINE_S
STEPS = (10, 20, 30)

# Those of the second save: attempts are counted from 0, and a generation's name begins with its step.
LEADER_WORDS = (
    "plan/1/1/word",
    "plan/1/1/offers/parts/closed",
    "plan/1/1/offers/whole/word",
    "save/step-000000000020-*/open/word",
    "save/step-000000000020-*/ballot/closed",
    "save/step-000000000020-*/counted/word",
    "save/step-000000000020-*/verdict/word",
)
RANK_MESSAGES = ("plan/1/1/offers/parts/{rank}", "save/step-000000000020-*/ballot/{rank}")
EFFECTS = (
    MessageEffect.LOSE,
    MessageEffect.DELAY,
    MessageEffect.REPEAT,
    MessageEffect.FOREIGN,
    MessageEffect.PAUSE,
    MessageEffect.CUT,
    MessageEffect.STOP,
    MessageEffect.STOP_AFTER,
)


def places() -> list[tuple[int, str, str]]:
    """Return (rank, verb, key) of each message that a save sends, and of each word that a rank waits for."""
    found = [(0, "post", key) for key in LEADER_WORDS]
    found += [(rank, "post", key.format(rank=rank)) for rank in range(1, RANKS) for key in RANK_MESSAGES]
    return found + [(rank, "look", key) for rank in range(1, RANKS) for key in LEADER_WORDS]


class Told:
    """What the ranks of one job said of each step."""

    def __init__(self) -> None:
        self.words: dict[int, dict[int, SaveResult | SafepointError]] = {step: {} for step in STEPS}
        self.lasted_s: list[float] = []

    def act(self, rank: Rank) -> None:
        """Save three times, each at a time that all ranks reach."""
        ambient, began = rank.thread.ambient, rank.thread.ambient.monotonic()
        for number, step in enumerate(STEPS):
            start = ambient.monotonic()
            self.words[step][rank.thread.rank] = rank.try_to_save(step)
            self.lasted_s.append(ambient.monotonic() - start)
            ambient.sleep(max(0.0, began + (number + 1) * 3 * PAUSE_S - ambient.monotonic()))


def check(storage: Storage, told: Told, outcomes: Sequence[RankOutcome[object]]) -> None:
    """Check that what the ranks were told is true, and that what is there is whole."""
    committed = {manifest.step: manifest for manifest in manifests(storage)}
    for step, words in told.words.items():
        results = [word for word in words.values() if isinstance(word, SaveResult)]
        errors = [word for word in words.values() if isinstance(word, SafepointError)]
        assert results == results[:1] * len(results), "all hear the same result"
        if step in committed:
            assert whole(storage, committed[step], "model", "w") == weights_at(step)
            assert all(isinstance(error, OutcomeUnknownError) for error in errors), (step, errors)
        else:
            assert not results, step
        heard = [error for error in errors if not isinstance(error, OutcomeUnknownError | LeaderLostError)]
        # A rank that missed attempts takes part in a later one of the leader's, and hears how that one ended.
        assert len({str(error) for error in heard}) == len({error.where for error in heard}), heard
    assert all(outcome.error is None or isinstance(outcome.error, SimulatedCrash) for outcome in outcomes)


def can_happen(effect: MessageEffect, *, verb: str) -> bool:
    """Return whether an effect can befall a verb: some happen to what is sent only."""
    return verb != "look" or effect not in OF_MESSAGES


@pytest.mark.parametrize(
    ("effect", "rank", "verb", "key"),
    [(effect, *place) for effect in EFFECTS for place in places() if can_happen(effect, verb=place[1])],
    ids=str,
)
def test_all_or_nothing_and_nobody_hears_what_is_not_true(
    effect: MessageEffect, rank: int, verb: str, key: str
) -> None:
    """Spec: C4.1, C4.2, C7.1"""
    fault = MessageFault(effect, verb=verb, key=key, seconds=PAUSE_S)
    job, told = Ranks(RANKS, sharded, faults={rank: fault}), Told()
    outcomes = job.run(told.act)
    assert [number for thread in job.threads.ranks for number in thread.board.fired], "the fault happened"
    check(job.storage, told, outcomes)
    steps = [manifest.step for manifest in manifests(job.storage)]
    assert 10 in steps
    is_dead = any(isinstance(outcome.error, SimulatedCrash) for outcome in outcomes)
    assert is_dead or 30 in steps, "the next save works"
    assert max(told.lasted_s) <= 6 * DEADLINE_S + PAUSE_S
    if is_dead:
        restart(job)


def restart(job: Ranks) -> None:
    """Start the job again, as one that ended; its first save is made."""
    again = Ranks(RANKS, sharded, storage=job.storage, world=FakeWorld(job.world.seconds), first_pid=100)
    for outcome in again.run(lambda rank: rank.save(40)):
        outcome.returned()
    assert whole(job.storage, manifests(job.storage)[0], "model", "w") == weights_at(40)


@pytest.mark.parametrize("rank", range(RANKS))
def test_a_dead_rank_aborts_the_save_for_all_within_the_deadline(rank: int) -> None:
    """Spec: C4.1"""
    fault = MessageFault(MessageEffect.STOP, key="plan/1/1/offers/parts/*")
    job, told = Ranks(RANKS, sharded, faults={rank: fault}), Told()
    job.run(told.act)
    assert sorted(told.words[20]) == [other for other in range(RANKS) if other != rank]
    assert all(isinstance(error, AbortedError) for error in told.words[20].values())
    assert [manifest.step for manifest in manifests(job.storage)] == [10]


def test_a_leader_that_sleeps_past_every_deadline_and_then_publishes_has_told_nobody_that_it_failed() -> None:
    """Spec: C4.2"""
    fault = MessageFault(MessageEffect.PAUSE, verb="post", key="save/step-000000000020-*/counted/word", seconds=PAUSE_S)
    job, told = Ranks(RANKS, sharded, faults={0: fault}), Told()
    job.run(told.act)
    assert [manifest.step for manifest in manifests(job.storage)] == [30, 20, 10]
    assert isinstance(told.words[20][0], SaveResult)
    assert [type(told.words[20][rank]) for rank in (1, 2)] == [OutcomeUnknownError] * 2
    assert all(isinstance(word, SaveResult) for word in told.words[30].values())


def test_a_leader_that_cannot_tell_the_outcome_knows_it_all_the_same() -> None:
    """Spec: C4.2"""
    fault = MessageFault(MessageEffect.CUT, verb="post", key="save/step-000000000020-*/verdict/word", seconds=PAUSE_S)
    job, told = Ranks(RANKS, sharded, faults={0: fault}), Told()
    job.run(told.act)
    assert isinstance(told.words[20][0], SaveResult)
    assert [type(told.words[20][rank]) for rank in (1, 2)] == [OutcomeUnknownError] * 2


def test_a_leader_that_is_frozen_when_it_has_deleted_holds_nobody_for_as_long_as_it_may_delete() -> None:
    word = MessageFault(MessageEffect.PAUSE, verb="post", key="save/*/swept/word", seconds=900.0)
    beats = MessageFault(MessageEffect.PAUSE, verb="post", key="alive/0", seconds=900.0, occurrence=1)
    job, lasted_s = Ranks(RANKS, sharded, faults={0: MessageScript((word, beats))}), [0.0] * RANKS

    def act(rank: Rank) -> SaveResult | None:
        began_s = rank.thread.ambient.monotonic()
        try:
            return rank.save(10)
        finally:
            lasted_s[rank.thread.rank] = rank.thread.ambient.monotonic() - began_s

    assert all(isinstance(outcome.returned(), SaveResult) for outcome in job.run(act))
    assert max(lasted_s[1:]) <= 60.0


@pytest.mark.parametrize("seed", range(200))
def test_two_hundred_seeded_mishaps(seed: int) -> None:
    """Replay one with: pytest "tests/saving/ranks/test_phases.py::test_two_hundred_seeded_mishaps[SEED]"

    Spec: C4.1, C4.2, C7.1
    """
    scripts = random_message_scripts(seed, world_size=RANKS, operation_count=60, longest_s=PAUSE_S)
    job, told = Ranks(RANKS, sharded, faults=scripts), Told()
    outcomes = job.run(told.act)
    is_started = all(outcome.error is None or isinstance(outcome.error, SimulatedCrash) for outcome in outcomes)
    if is_started:
        check(job.storage, told, outcomes)
    assert all(isinstance(outcome.error, SafepointError | SimulatedCrash | type(None)) for outcome in outcomes), scripts
    restart(job)
