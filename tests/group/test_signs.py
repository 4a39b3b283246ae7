"""Signs of life: a rank that is slow is waited for, one that is frozen or gone is named soon."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

import pytest

from safepoint.errors import AbortedError, LeaderLostError
from safepoint.faults.group import MessageEffect, MessageFault, MessageScript
from safepoint.faults.script import SimulatedCrash
from safepoint.group.signs import Pulse
from safepoint.testing.ranks import RankThread, RankThreads

DEADLINE_S = 1800.0
SILENCE_S = 60.0
FROZEN_S = 1000.0
# A count is looked at eight times within the silence, but at least every five seconds.
LOOK_S = 5.0
BEGUN_S = 30.0

SILENT_2 = (
    "AbortedError: 1 of 3 ranks show no sign of life [read]; "
    "expected one from each rank that is waited for within 60 s; "
    "found nothing from rank 2. See whether those processes run and reach the host of rank 0."
)


def gather(rank: RankThread, topic: str = "read") -> list[bytes] | None:
    with rank.group.watched(silence_s=SILENCE_S):
        return rank.group.gather(topic, b"%d" % rank.rank, deadline_s=DEADLINE_S)


def frozen(rank: int, key: str) -> MessageScript:
    """Stop a rank for a while with all its threads, once its count has moved."""
    pause = MessageFault(MessageEffect.PAUSE, verb="post", key=key, seconds=FROZEN_S)
    beats = MessageFault(MessageEffect.PAUSE, verb="post", key=f"alive/{rank}", occurrence=1, seconds=FROZEN_S)
    return MessageScript((pause, beats))


def played(
    scripts: dict[int, MessageScript], act: Callable[[RankThread], object], *, ranks: int = 3
) -> tuple[list[object], list[float]]:
    """Return what each of some ranks returned or raised, and how long that took on the shared clock."""
    job, lasted_s = RankThreads(ranks, scripts=scripts), [0.0] * ranks

    def timed(rank: RankThread) -> object:
        began = rank.ambient.monotonic()
        try:
            return act(rank)
        finally:
            lasted_s[rank.rank] = rank.ambient.monotonic() - began

    return [one.value if one.error is None else one.error for one in job.run(timed)], lasted_s


def test_a_rank_that_reads_for_long_is_waited_for() -> None:
    def read(rank: RankThread) -> list[bytes] | None:
        with rank.group.watched(silence_s=SILENCE_S):
            if rank.rank == 2:
                rank.ambient.sleep(10 * SILENCE_S)
            return gather(rank)

    assert played({}, read)[0] == [[b"0", b"1", b"2"], None, None]


def test_a_rank_that_can_have_no_thread_for_its_signs_is_waited_for_and_shows_them_once_it_can(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    start, refusals = threading.Thread.start, [1]

    def refuse(thread: threading.Thread) -> None:
        if thread.name == "safepoint-alive" and threading.current_thread().name == "rank-2" and refusals:
            refusals.clear()
            raise RuntimeError("can't start new thread")
        start(thread)

    def read(rank: RankThread) -> list[list[bytes] | None]:
        found = []
        for topic in ("once", "again"):
            with rank.group.watched(silence_s=SILENCE_S):
                if rank.rank == 2:
                    rank.ambient.sleep(10 * SILENCE_S)
                found.append(gather(rank, topic))
        return found

    monkeypatch.setattr(threading.Thread, "start", refuse)
    assert played({}, read)[0] == [[[b"0", b"1", b"2"]] * 2, [None] * 2, [None] * 2]
    assert not refusals


def test_a_leader_that_reads_for_long_is_waited_for() -> None:
    def read(rank: RankThread) -> bytes:
        with rank.group.watched(silence_s=SILENCE_S):
            if rank.rank == 0:
                rank.ambient.sleep(10 * SILENCE_S)
            return rank.group.spread("read", b"word" if rank.rank == 0 else None, deadline_s=DEADLINE_S)

    assert played({}, read)[0] == [b"word"] * 3


def test_a_frozen_rank_is_named_on_all_when_it_was_silent_for_long_and_hears_it_when_it_wakes() -> None:
    told, lasted_s = played({2: frozen(2, "read/2")}, gather)
    assert [str(error) for error in told] == [SILENT_2.removeprefix("AbortedError: ")] * 3
    assert all(isinstance(error, AbortedError) for error in told)
    assert all(SILENCE_S <= one <= SILENCE_S + 3 * LOOK_S for one in lasted_s[:2])


def test_a_rank_that_died_is_named_as_soon() -> None:
    def die(rank: RankThread) -> list[bytes] | None:
        with rank.group.watched(silence_s=SILENCE_S):
            if rank.rank == 2:
                # Its count, which another thread makes, has moved by then.
                rank.ambient.sleep(BEGUN_S)
            return gather(rank)

    told, lasted_s = played({2: MessageScript((MessageFault(MessageEffect.STOP, key="read/2"),))}, die)
    assert str(told[0]) == str(told[1]) == SILENT_2.removeprefix("AbortedError: ")
    assert max(lasted_s) <= BEGUN_S + SILENCE_S + 3 * LOOK_S


def test_a_frozen_leader_is_lost_to_the_others_as_soon() -> None:
    told, lasted_s = played({0: frozen(0, "read/closed")}, gather)
    assert told[0] == [b"0", b"1", b"2"]
    for error, one in zip(told[1:], lasted_s[1:], strict=True):
        assert isinstance(error, LeaderLostError) and "rank 0 within 60 s" in str(error)
        assert SILENCE_S <= one <= SILENCE_S + 3 * LOOK_S


@pytest.mark.parametrize("has_been_there", [False, True])
def test_a_rank_that_is_elsewhere_in_its_program_is_not_judged(has_been_there: bool) -> None:
    def come_late(rank: RankThread) -> list[bytes] | None:
        if has_been_there:
            gather(rank, "first")
        if rank.rank == 2:
            rank.ambient.sleep(10 * SILENCE_S)
        return gather(rank)

    assert played({}, come_late)[0] == [[b"0", b"1", b"2"], None, None]


def test_a_job_that_was_stopped_as_a_whole_takes_nobody_for_gone() -> None:
    """The leader stops while it looks, and so does the count; the leader is the first to go on."""
    looks = MessageFault(MessageEffect.PAUSE, verb="look", key="alive/2", seconds=FROZEN_S)
    beats = MessageFault(MessageEffect.PAUSE, verb="post", key="alive/2", seconds=FROZEN_S + LOOK_S, occurrence=1)

    def read(rank: RankThread) -> list[bytes] | None:
        with rank.group.watched(silence_s=SILENCE_S):
            if rank.rank == 2:
                rank.ambient.sleep(FROZEN_S + 3 * SILENCE_S)
            return gather(rank)

    assert played({0: MessageScript((looks,)), 2: MessageScript((beats,))}, read)[0][0] == [b"0", b"1", b"2"]


def test_a_count_that_does_not_arrive_for_a_while_goes_on() -> None:
    cut = MessageFault(MessageEffect.CUT, verb="post", key="alive/2", occurrence=1, seconds=SILENCE_S / 2)

    def read(rank: RankThread) -> list[bytes] | None:
        with rank.group.watched(silence_s=SILENCE_S):
            if rank.rank == 2:
                rank.ambient.sleep(10 * SILENCE_S)
            return gather(rank)

    assert played({2: MessageScript((cut,))}, read)[0][0] == [b"0", b"1", b"2"]


def test_the_death_of_the_thread_that_counts_is_raised_where_the_next_block_begins() -> None:
    """Else the others would take this rank for gone, and nobody here would know why."""
    (job,) = RankThreads(1).ranks

    class Broken:
        def __getattr__(self, name: str) -> Callable[..., None]:
            raise SimulatedCrash(name)

    pulse = Pulse(Broken(), 0, job.ambient)  # type: ignore[arg-type]  # a board that nobody can use
    with pulse.beating(SILENCE_S):
        while pulse._failure is None:
            pass
    with pytest.raises(SimulatedCrash), pulse.beating(SILENCE_S):
        pass


def test_the_played_time_does_not_pass_by_a_thread_that_has_only_been_started() -> None:
    """A count that begins when hours are over would be that of a rank which was frozen meanwhile."""

    def act(rank: RankThread) -> float:
        seen_s: list[float] = []

        def count() -> None:
            time.sleep(0.05)
            seen_s.append(rank.ambient.monotonic())

        thread = threading.Thread(target=count, name="safepoint-alive", daemon=True)
        began = rank.ambient.monotonic()
        thread.start()
        rank.ambient.sleep(DEADLINE_S)
        thread.join()
        return seen_s[0] - began

    (waited_s,) = played({}, act, ranks=1)[0]
    assert isinstance(waited_s, float) and waited_s < DEADLINE_S
