"""The word that ends a gathering, deadlines, and what is left on the board."""

from __future__ import annotations

import pytest

from safepoint.errors import AbortedError, InternalError, LeaderLostError
from safepoint.faults.group import MessageEffect, MessageFault, MessageScript
from safepoint.faults.script import SimulatedCrash
from safepoint.group.agreement import decode_error
from safepoint.testing.ranks import RankOutcome, RankThread, RankThreads

DEADLINE_S = 30.0
GRACE_S = 5.0


def played(world_size: int, *faults: tuple[int, MessageFault]) -> RankThreads:
    return RankThreads(world_size, scripts={rank: MessageScript((fault,)) for rank, fault in faults}, grace_s=GRACE_S)


def gather(rank: RankThread, topic: str = "ballot/g") -> list[bytes] | None:
    return rank.group.gather(topic, b"%d" % rank.rank, deadline_s=DEADLINE_S)


def errors(outcomes: tuple[RankOutcome[list[bytes] | None], ...]) -> list[str]:
    return [f"{type(outcome.error).__name__}: {outcome.error}" for outcome in outcomes]


ABSENT_2 = (
    "AbortedError: 1 of 4 ranks were absent from an exchange [ballot/g]; "
    "expected a message from each rank within 30 s; "
    "found nothing from rank 2. See whether those processes run and reach the host of rank 0."
)


def test_a_dead_rank_is_named_alike_on_all_others_when_the_deadline_is_over() -> None:
    job = played(4, (2, MessageFault(MessageEffect.STOP)))
    began = job.world.seconds
    told = errors(job.run(gather))
    assert told == [ABSENT_2, ABSENT_2, "SimulatedCrash: stopped before: post ballot/g/2", ABSENT_2]
    assert DEADLINE_S <= job.world.seconds - began <= DEADLINE_S + GRACE_S


def test_a_message_that_is_lost_aborts_for_its_sender_too() -> None:
    assert errors(played(4, (2, MessageFault(MessageEffect.LOSE))).run(gather)) == [ABSENT_2] * 4


def test_a_message_that_is_late_within_the_deadline_counts() -> None:
    job = played(4, (2, MessageFault(MessageEffect.DELAY, seconds=DEADLINE_S - 1)))
    assert job.run(gather)[0].returned() == [b"0", b"1", b"2", b"3"]


def test_a_message_that_is_late_after_the_deadline_does_not_count() -> None:
    """The rank is paused, and hears the leader's word when it wakes."""
    job = played(4, (2, MessageFault(MessageEffect.PAUSE, verb="post", seconds=DEADLINE_S + 100)))
    assert errors(job.run(gather)) == [ABSENT_2] * 4


def test_the_exchange_after_an_aborted_one_works() -> None:
    job = played(4, (2, MessageFault(MessageEffect.PAUSE, verb="post", seconds=DEADLINE_S + 10)))

    def twice(rank: RankThread) -> list[bytes] | None:
        with pytest.raises(AbortedError):
            gather(rank)
        return gather(rank, "ballot/h")

    assert job.run(twice)[0].returned() == [b"0", b"1", b"2", b"3"]


def test_a_paused_leader_lets_nobody_believe_in_an_abort_and_may_still_go_on() -> None:
    """The leader is stopped past every deadline, and finds all ballots when it wakes. Spec: C4.2"""
    job = played(3, (0, MessageFault(MessageEffect.PAUSE, verb="look", seconds=DEADLINE_S + GRACE_S + 60)))
    leader, *others = job.run(gather)
    assert leader.returned() == [b"0", b"1", b"2"]
    assert [type(other.error) for other in others] == [LeaderLostError, LeaderLostError]


@pytest.mark.parametrize("effect", [MessageEffect.STOP, MessageEffect.STOP_AFTER])
def test_the_death_of_the_leader_is_a_lost_leader_at_once(effect: MessageEffect) -> None:
    job = played(3, (0, MessageFault(effect, verb="look")))
    began = job.world.seconds
    leader, *others = job.run(gather)
    assert isinstance(leader.error, SimulatedCrash)
    assert [type(other.error) for other in others] == [LeaderLostError, LeaderLostError]
    assert job.world.seconds - began < DEADLINE_S


def test_the_word_of_a_leader_that_dies_may_be_lost_after_it_took_every_message() -> None:
    """Whoever voted yes must not take this for an abort: the leader had all votes. Spec: C4.2"""
    job = played(3, (0, MessageFault(MessageEffect.STOP, verb="post", key="*/closed")))
    assert [type(outcome.error) for outcome in job.run(gather)] == [SimulatedCrash, LeaderLostError, LeaderLostError]


def test_a_rank_that_is_cut_off_loses_the_leader_and_the_others_are_told_its_name() -> None:
    job = played(4, (2, MessageFault(MessageEffect.CUT, seconds=1_000)))
    told = errors(job.run(gather))
    assert told[0] == told[1] == told[3] == ABSENT_2
    assert told[2].startswith("LeaderLostError: ")


def test_an_absent_leader_is_a_lost_leader_to_those_who_listen() -> None:
    job = played(3)

    def listen(rank: RankThread) -> bytes:
        if rank.rank == 0:
            return b""
        return rank.group.spread("plan", None, deadline_s=DEADLINE_S)

    outcomes = job.run(listen)
    assert [type(outcome.error) for outcome in outcomes[1:]] == [LeaderLostError, LeaderLostError]
    assert "plan" in str(outcomes[1].error) and "35 s" in str(outcomes[1].error)


def test_a_word_of_another_exchange_is_passed_over_until_the_right_one_comes() -> None:
    """The leader says it again where it sees that nobody has heard: whoever looked before that waits for it."""
    job = played(3, (0, MessageFault(MessageEffect.FOREIGN, verb="post", key="plan/word")))

    def hear(rank: RankThread) -> bytes:
        if rank.rank == 0:
            rank.group.spread("plan", b"first", deadline_s=DEADLINE_S)
            rank.ambient.sleep(DEADLINE_S / 2)
        return rank.group.spread("plan", b"again" if rank.rank == 0 else None, deadline_s=DEADLINE_S)

    assert [outcome.returned() for outcome in job.run(hear)] == [b"again"] * 3


def test_many_absent_ranks_are_counted_and_the_first_are_named() -> None:
    job = RankThreads(40)

    def some(rank: RankThread) -> list[bytes] | None:
        return gather(rank) if rank.rank < 20 else None

    error = job.run(some)[0].error
    assert error is not None
    listed = ", ".join(f"rank {rank}" for rank in range(20, 36))
    assert "20 of 40 ranks were absent from an exchange [ballot/g]; " in str(error)
    assert f"found nothing from {listed} and 4 more." in str(error)


def test_only_the_leader_spreads() -> None:
    job = played(2)
    outcomes = job.run(lambda rank: rank.group.spread("plan", b"" if rank.rank else None, deadline_s=DEADLINE_S))
    assert [type(outcome.error) for outcome in outcomes] == [InternalError, InternalError]


def test_a_settled_topic_leaves_nothing_on_the_board() -> None:
    job = played(3)

    def generation(rank: RankThread, name: str) -> None:
        rank.group.spread(f"{name}/plan", b"plan" if rank.rank == 0 else None, deadline_s=DEADLINE_S)
        gather(rank, f"{name}/ballot")
        rank.group.spread(f"{name}/verdict", b"done" if rank.rank == 0 else None, deadline_s=DEADLINE_S)

    def two(rank: RankThread) -> None:
        generation(rank, "g/1")
        generation(rank, "g/10")
        rank.group.settle("g/1")

    assert [outcome.returned() for outcome in job.run(two)] == [None] * 3
    assert sorted(job.messages.held) == ["g/10/ballot/closed", "g/10/plan/word", "g/10/verdict/word"]


def test_a_message_that_came_too_late_is_settled_with_its_topic() -> None:
    job = played(3, (1, MessageFault(MessageEffect.PAUSE, verb="post", seconds=DEADLINE_S + 10)))

    def late(rank: RankThread) -> None:
        with pytest.raises(AbortedError):
            gather(rank)
        gather(rank, "ballot/h")
        rank.group.settle("ballot/g")

    assert [outcome.returned() for outcome in job.run(late)] == [None] * 3
    assert sorted(job.messages.held) == ["ballot/h/closed"]


@pytest.mark.parametrize("key", ["*/word", "*/closed"])
def test_a_word_of_another_exchange_is_never_believed(key: str) -> None:
    """The leader's last word on one generation arrives in the place of its word on the next. Spec: C4.2"""
    job = played(2, (0, MessageFault(MessageEffect.FOREIGN, key=key, occurrence=1)))

    def two(rank: RankThread) -> None:
        for generation in ("g", "h"):
            gather(rank, f"{generation}/ballot")
            rank.group.spread(f"{generation}/verdict", None if rank.rank else b"committed", deadline_s=DEADLINE_S)

    leader, other = job.run(two)
    assert leader.error is None
    assert isinstance(other.error, LeaderLostError)
    assert "another exchange" in str(other.error) and other.error.where in ("h/ballot", "h/verdict")


def test_the_leader_leaves_last() -> None:
    """A word that was said is heard, also by a rank that sleeps while the leader closes."""
    job = played(3)

    def leave(rank: RankThread) -> bytes:
        if rank.rank == 2:
            rank.ambient.sleep(20)
        word = rank.group.spread("verdict", b"committed" if rank.rank == 0 else None, deadline_s=DEADLINE_S)
        rank.group.close(deadline_s=DEADLINE_S)
        return word

    assert [outcome.returned() for outcome in job.run(leave)] == [b"committed"] * 3


def test_the_leader_waits_for_a_dead_rank_no_longer_than_its_deadline() -> None:
    job = played(3, (1, MessageFault(MessageEffect.STOP)))
    began = job.world.seconds
    leader, dead, other = job.run(lambda rank: rank.group.close(deadline_s=DEADLINE_S))
    assert (leader.error, other.error, type(dead.error)) == (None, None, SimulatedCrash)
    assert DEADLINE_S <= job.world.seconds - began <= DEADLINE_S + GRACE_S


def test_leaving_a_dead_leader_raises_nothing() -> None:
    job = played(2, (0, MessageFault(MessageEffect.STOP)))
    assert job.run(lambda rank: rank.group.close(deadline_s=DEADLINE_S))[1].error is None


@pytest.mark.parametrize("message", [b"", b"{}", b"\xff", b'{"code":"aborted"}'])
def test_bytes_that_are_no_error_are_an_internal_error(message: bytes) -> None:
    error = decode_error(message, where="plan")
    assert (type(error), error.where) == (InternalError, "plan")
