"""Judge rehearsals that were made by hand."""

from __future__ import annotations

from dataclasses import replace

from safepoint.drill.events import Restored
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


def test_a_drill_in_which_no_start_resumed_has_shown_nothing() -> None:
    again = tuple(update(step) for step in range(1, 7))
    fresh = replace(resumed(0, *again), restored=Restored(0, is_fresh=True))
    judgement = judge_rehearsal(rehearsal(killed(2), fresh))
    assert judgement.verdict is Verdict.HARD_FAIL
    (finding,) = judgement.findings
    assert finding.startswith("no start resumed from a checkpoint, so nothing was shown of a resume")
    assert finding.endswith("save more often, or kill later")


def test_a_kill_before_the_first_checkpoint_is_no_failure_where_another_start_resumed() -> None:
    judgement = judge_rehearsal(rehearsal(killed(2), killed(4, committed=(3,)), resumed(3, *REST)))
    assert (judgement.verdict, judgement.findings) == (Verdict.PASS, ())


def test_a_start_over_stays_lost_work_with_its_reason() -> None:
    again = tuple(update(step) for step in range(1, 7))
    fresh = replace(resumed(0, *again), restored=Restored(0, is_fresh=True))
    judgement = judge_rehearsal(rehearsal(killed(4, committed=(3,)), fresh))
    assert judgement.verdict is Verdict.LOST_WORK
    assert judgement.findings == ("start 2 resumed from nothing (a fresh start); step 3 had been committed",)
