"""Compare evidence that was made by hand: each value that may differ, and the first place where it does."""

from __future__ import annotations

from dataclasses import replace

import pytest

from safepoint.drill.compare import compare
from safepoint.drill.events import Restored, Update
from tests.drill.rehearsals import STATE, killed, rehearsal, resumed, update


def test_equal_evidence_is_equal_and_counted() -> None:
    comparison = compare(rehearsal(killed(4), resumed(3, update(4), update(5), update(6))))
    assert comparison.divergence is None
    assert (comparison.updates, comparison.repeated, comparison.items) == (7, 1, ("model", "streams"))


@pytest.mark.parametrize(
    ("other", "subject", "sides"),
    [
        # One unit in the last place: no rounding hides it.
        (update(5, loss=0.2 + 2**-55), "metric loss", ((0.2).hex(), (0.2 + 2**-55).hex())),
        (update(5, ids=(6, 5)), "ids of data", ("5 6", "6 5")),
        (update(5, streams="t"), "random streams", ("s5", "t5")),
        (Update(5, {}, {"data": (5, 6)}, "s5"), "metric loss", ((0.2).hex(), "nothing")),
    ],
)
def test_the_first_differing_value_is_named_with_both_sides(
    other: Update, subject: str, sides: tuple[str, str]
) -> None:
    later = update(6, loss=9.0)
    divergence = compare(rehearsal(killed(4), resumed(3, update(4), other, later))).divergence
    assert divergence is not None
    assert (divergence.start, divergence.step, divergence.is_before_any_kill) == (2, 5, False)
    assert [(value.subject, value.expected, value.found) for value in divergence.values] == [(subject, *sides)]


def test_a_differing_final_state_is_named_by_item() -> None:
    last = resumed(3, update(4), update(5), update(6), state={**STATE, "model": "ab"})
    divergence = compare(rehearsal(killed(4), last)).divergence
    assert divergence is not None and divergence.step is None
    assert [value.subject for value in divergence.values] == ["item model"]


def test_an_item_that_is_missing_at_the_end_is_a_difference() -> None:
    last = resumed(3, update(4), update(5), update(6), state={"model": "aa"})
    divergence = compare(rehearsal(killed(4), last)).divergence
    assert divergence is not None
    assert [str(value) for value in divergence.values] == ["item streams: expected bb, found nothing"]


def test_an_update_that_was_left_out_is_a_difference() -> None:
    divergence = compare(rehearsal(killed(4), resumed(3, update(5), update(6)))).divergence
    assert divergence is not None
    assert [(value.subject, value.expected, value.found) for value in divergence.values] == [("step", "4", "5")]


@pytest.mark.parametrize("last", [5, 7])
def test_a_run_that_ends_at_another_update_is_a_difference(last: int) -> None:
    updates = tuple(update(step) for step in range(4, last + 1))
    assert compare(rehearsal(killed(4), resumed(3, *updates))).divergence is not None


def test_a_difference_before_any_kill_is_told_apart() -> None:
    first = killed(2, updates=(update(1), update(2, loss=0.0)))
    again = tuple(update(step) for step in range(1, 7))
    divergence = compare(rehearsal(first, resumed(0, *again))).divergence
    assert divergence is not None and divergence.is_before_any_kill


def test_what_a_restore_does_not_promise_is_not_compared() -> None:
    numbers = resumed(3, update(4, loss=2.0), update(5), update(6), state={"model": "ac"}, promise="same_data")
    assert compare(rehearsal(killed(4), numbers)).divergence is None
    samples = resumed(3, update(4, ids=(1, 1)), update(5), update(6), promise="same_data")
    assert compare(rehearsal(killed(4), samples)).divergence is not None
    anything = resumed(3, update(4, ids=(1, 1)), update(5), update(6), promise="approximate")
    assert compare(rehearsal(killed(4), anything)).divergence is None


def test_streams_that_nobody_seeds_are_compared_along_the_chain() -> None:
    def own(step: int, streams: str = "t") -> Update:
        return update(step, streams=streams)

    first = killed(4, updates=tuple(own(step) for step in range(1, 5)))
    faithful = resumed(3, own(4), own(5), own(6), state={**STATE, "rng": "cc"})
    comparison = compare(rehearsal(first, faithful))
    assert (comparison.divergence, comparison.has_seeded_streams) == (None, False)

    faithless = resumed(3, own(4, "u"), own(5, "u"), own(6, "u"))
    divergence = compare(rehearsal(first, faithless)).divergence
    assert divergence is not None
    assert [str(value) for value in divergence.values] == ["random streams: expected t4, found u4"]


def test_streams_that_nobody_seeds_begin_anew_with_a_fresh_start() -> None:
    first = killed(2, updates=(update(1, streams="t"), update(2, streams="t")))
    again = tuple(update(step, streams="u") for step in range(1, 7))
    fresh = replace(resumed(0, *again), restored=Restored(0, is_fresh=True))
    assert compare(rehearsal(first, fresh)).divergence is None
