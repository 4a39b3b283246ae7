"""Judge rehearsals that were made by hand."""

from __future__ import annotations

from safepoint.drill.trace import Ending
from safepoint.drill.verdict import Verdict, judge_rehearsal
from tests.drill.rehearsals import killed, rehearsal, resumed, update

REST = (update(4), update(5), update(6))


def test_a_faithful_continuation_passes() -> None:
    judgement = judge_rehearsal(rehearsal(killed(4, committed=(3,)), resumed(3, *REST)))
    assert (judgement.verdict, judgement.findings) == (Verdict.PASS, ())


def test_resuming_further_back_than_committed_is_lost_work_although_all_values_agree() -> None:
    again = tuple(update(step) for step in range(1, 7))
    judgement = judge_rehearsal(rehearsal(killed(4, committed=(3,)), resumed(0, *again)))
    assert judgement.verdict is Verdict.LOST_WORK
    assert judgement.findings == ("start 2 resumed from step 0; step 3 had been committed",)


def test_a_save_in_flight_at_the_kill_may_count_or_not() -> None:
    assert judge_rehearsal(rehearsal(killed(4, committed=(2,)), resumed(4, *REST[1:]))).holds
    assert judge_rehearsal(rehearsal(killed(4, committed=(2,)), resumed(2, update(3), *REST))).holds


def test_a_loss_is_seen_across_several_kills() -> None:
    second = resumed(3, update(4), ending=Ending.KILLED)
    judgement = judge_rehearsal(rehearsal(killed(4, committed=(3,)), second, resumed(2, update(3), *REST)))
    assert judgement.verdict is Verdict.LOST_WORK


def test_a_start_that_ends_by_itself_is_a_hard_fail_above_all_else() -> None:
    broken = resumed(0, update(1, loss=5.0), ending=Ending.FAILED, exit_code=4)
    judgement = judge_rehearsal(rehearsal(killed(4, committed=(3,)), broken))
    assert judgement.verdict is Verdict.HARD_FAIL
    assert judgement.findings[0] == "start 2 ended by itself after update 1, with exit code 4"
    assert len(judgement.findings) == 3


def test_a_silent_start_is_a_hard_fail() -> None:
    judgement = judge_rehearsal(rehearsal(killed(4), resumed(3, ending=Ending.SILENT)))
    assert judgement.verdict is Verdict.HARD_FAIL
