"""Each phase of a save, each kind of rank, killed and stopped, with processes: all or nothing, and no wrong word.

A stopped rank goes on later: when the others have ended, or when a new start of the job has.
"""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path

import pytest

from tests.saving.ranks.faults import LAST, STRUCK, Told, fault, play
from tests.saving.ranks.hosts import FAR, LEFT_OUT, cut, cut_name, linked_hosts

LEADER_PHASES = ("meet", "compare", "stage", "plan", "write", "vote", "check", "publish")
# Where a phase of the leader begins, the others have not voted, may have, or have: they hear the leader late, or never.
BEFORE_THE_VOTE, AFTER_THE_VOTE = LEADER_PHASES[:4], LEADER_PHASES[6:]
RANK_PHASES = LEADER_PHASES[:6]
SIGNALS = ("SIGKILL", "SIGSTOP")

WHOLE = fault(0, "", "")
SAMPLE = (
    fault(0, "vote", "SIGKILL"),
    fault(1, "write", "SIGSTOP"),
    fault(0, "publish", "SIGSTOP"),
    fault(0, "publish", "SIGSTOP", late=True),
)
ALL = (
    *(fault(0, phase, number) for phase in LEADER_PHASES for number in SIGNALS),
    *(fault(1, phase, number) for phase in RANK_PHASES for number in SIGNALS),
    *(fault(0, phase, "SIGSTOP", late=True) for phase in ("vote", *AFTER_THE_VOTE)),
)


def check(told: Told, whole: Told) -> None:
    """Check what the ranks said of their second save, what is there of it, and how the next start went on."""
    case, survivors = told.case, [rank for rank in range(len(told.first)) if rank != told.case.rank]
    is_leader, is_stopped = case.rank == 0, case.fault == "SIGSTOP"
    assert told.stuck == 0, told
    words = told.words()

    lost = {words[rank] for rank in survivors}
    if not is_leader:
        assert lost == {"AbortedError"}, told
    elif case.phase in BEFORE_THE_VOTE:
        assert lost == {"LeaderLostError"}, told
    elif case.phase in AFTER_THE_VOTE:
        assert lost == {"OutcomeUnknownError"}, told
    assert lost <= {"AbortedError", "LeaderLostError", "OutcomeUnknownError"}, told

    struck = words[case.rank]
    if told.is_made:
        assert is_leader and is_stopped and not case.late, told
        assert struck == "saved" and lost == {"OutcomeUnknownError"}, told
    elif is_stopped:
        assert struck in ("AbortedError", "LeaderLostError", "OutcomeUnknownError", "FencedError"), told
    else:
        assert struck is None, told
    if is_leader and is_stopped and case.phase in AFTER_THE_VOTE:
        assert struck == ("FencedError" if case.late else "saved"), told

    told.check_goes_on(whole)


@pytest.fixture(scope="module")
def sample(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Told]:
    """Play some cases beside each other, most of whose time is waiting, and return what was told, by name."""
    with ExitStack() as stack:
        hosts = linked_hosts(stack)
        cases = [*SAMPLE, *([cut(hosts, rank=FAR, phase="vote")] if hosts else [])]
        told = play([WHOLE, *cases], tmp_path_factory.mktemp("sample"))
    return {one.case.name: one for one in told}


def check_uninterrupted(told: Told) -> None:
    assert {tuple(words[-1][:2]) for words in told.first} == {(LAST, "saved")}
    assert len({words[-1][2] for words in told.first}) == 1


def test_ranks_that_are_killed_and_stopped_in_a_save_leave_all_of_it_or_nothing(sample: dict[str, Told]) -> None:
    """Spec: C4.1, C4.2, C5.2"""
    check_uninterrupted(sample[WHOLE.name])
    for case in SAMPLE:
        check(sample[case.name], sample[WHOLE.name])
    print(f"counted: {len(SAMPLE)} ranks killed or stopped")


def test_a_host_that_is_cut_off_before_it_has_voted_aborts_the_save_for_the_rest(sample: dict[str, Told]) -> None:
    """Spec: C4.1, C4.2"""
    told = sample.get(cut_name(FAR, "vote"))
    if told is None:
        pytest.skip(LEFT_OUT)
    assert told.stuck == 0, told
    assert told.words() == ["AbortedError", "AbortedError", "OutcomeUnknownError"], told
    assert not told.is_made
    (text,) = {text for step, _, text in told.first[0] + told.first[1] if step == STRUCK}
    assert "nothing from rank 2" in text
    told.check_goes_on(sample[WHOLE.name])


@pytest.mark.soak
@pytest.mark.timeout(0)
def test_each_phase_of_a_save_with_each_kind_of_rank_killed_and_stopped(tmp_path: Path) -> None:
    """Spec: C4.1, C4.2, C5.2"""
    whole, *rest = play([WHOLE, *ALL], tmp_path)
    check_uninterrupted(whole)
    for told in rest:
        check(told, whole)
    print(f"counted: {len(rest)} ranks killed or stopped")
