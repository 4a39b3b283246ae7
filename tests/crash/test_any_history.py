"""Random histories of a run: short ones here, long ones in the soak; one that fails is made small and printed."""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, settings
from hypothesis.stateful import run_state_machine_as_test

from tests.crash.history import COUNTS, History

SLOW = [HealthCheck.too_slow, HealthCheck.filter_too_much, HealthCheck.data_too_large]


def play(examples: int, steps: int) -> None:
    COUNTS.clear()
    options = settings(max_examples=examples, stateful_step_count=steps, suppress_health_check=SLOW)
    run_state_machine_as_test(History, settings=options)
    print("counted:", dict(sorted(COUNTS.items())))


def test_whatever_happens_to_a_run_it_goes_on_from_the_newest_good_save() -> None:
    """Spec: C8.1, C9.2, C10.1, C12.7"""
    play(examples=12, steps=20)
    assert all(COUNTS[name] > 5 for name in ("saves", "restores", "power cuts")), COUNTS


@pytest.mark.soak
def test_whatever_happens_to_a_run_for_long_it_goes_on_from_the_newest_good_save() -> None:
    """Spec: C8.1, C9.2, C10.1, C12.7"""
    play(examples=400, steps=50)
