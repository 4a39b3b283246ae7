"""Signals to one process: at which boundary it is saved, how it ends, and that a new start goes on from there."""

from __future__ import annotations

import signal
from pathlib import Path
from typing import Any

import pytest

import safepoint as sp
from tests.manager.jobs import build, die, picture
from tests.manager.jobs import train as train_on
from tests.manager.signalled import (
    Loop,
    interrupted_twice,
    plain_loop,
    still_there,
    stuck,
    train,
    training,
    windows,
    with_a_child,
    with_full_disk,
    with_own_handler,
    with_slow_saves,
)

UNTIL = 12
EVERY = ("TERM", "USR1", "INT")
STOPPED = 75


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Return what the uninterrupted training ends with."""
    job = build(tmp_path_factory.mktemp("whole"), save=sp.every(updates=100))
    job.manager.restore()
    train_on(job, UNTIL)
    found = picture(job)
    job.manager.close()
    return found


def check_goes_on(root: Path, at: int, uninterrupted: Any) -> None:
    """Check that a start on what is left begins at this step and ends bit-equal to the uninterrupted training."""
    job = build(root, seed=1, save=sp.every(updates=100))
    report = job.manager.restore()
    assert (report.step, report.promise.level) == (at, "exact")
    train_on(job, UNTIL)
    assert picture(job) == uninterrupted
    die(job)


def saved_steps(root: Path) -> list[int]:
    return [one.step for one in sp.open_run(root).checkpoints()]


# The update that is under way when the signal comes is done and saved; a loop that does not look makes one more.
@pytest.mark.parametrize(
    ("name", "then", "looks", "made"),
    [
        ("TERM", "stop", True, 4),
        ("TERM", "stop", False, 5),
        pytest.param("USR1", "exit", False, 4, marks=pytest.mark.soak),
        pytest.param("INT", "stop", True, 4, marks=pytest.mark.soak),
    ],
)
def test_a_signal_saves_the_next_boundary_and_ends_with_75(
    tmp_path: Path, uninterrupted: Any, name: str, then: Any, looks: bool, made: int
) -> None:
    with training(train, tmp_path, sp.on_signals(*EVERY, then=then), Loop(looks=looks)) as process:
        process.until("update", 4)
        process.signal(signal.Signals[f"SIG{name}"])
        assert process.end() == STOPPED
    assert len(process.said("update")) == made
    assert saved_steps(tmp_path) == [4]
    check_goes_on(tmp_path, 4, uninterrupted)


@pytest.mark.soak
@pytest.mark.parametrize("workers", ["own", "foreign"])
def test_a_signal_to_the_group_takes_no_batch_of_the_workers(tmp_path: Path, uninterrupted: Any, workers: str) -> None:
    """Of a foreign loader, where it is iterated through `batches`. No worker is left behind."""
    with training(train, tmp_path, sp.on_signals("TERM"), Loop(workers=workers)) as process:
        process.until("update", 3)
        workers_there = process.children()
        assert workers_there
        process.signal(signal.SIGTERM, to_group=True)
        assert process.end() == STOPPED
    assert not still_there(workers_there)
    assert saved_steps(tmp_path) == [3]
    if workers == "own":
        check_goes_on(tmp_path, 3, uninterrupted)


def test_a_signal_to_the_group_in_a_window_leaves_it_the_batches_in_flight(
    tmp_path: Path,
) -> None:
    """The window is finished with them, and its boundary is saved."""
    run = tmp_path / "run"
    with training(windows, run) as process:
        process.until("microbatch", 2)
        workers_there = process.children()
        assert workers_there
        process.signal(signal.SIGTERM, to_group=True)
        assert process.end() == STOPPED
    assert not still_there(workers_there)
    # The window of the signal, and one that a loop which does not look makes for nothing.
    assert process.said("microbatch") == [(number,) for number in range(6)]
    assert saved_steps(run) == [2]
    whole = build(tmp_path / "whole")
    train_on(whole, 6, accumulation=2)
    expected = picture(whole)
    die(whole)
    job = build(run, seed=1)
    assert job.manager.restore().step == 2
    train_on(job, 6, accumulation=2)
    assert picture(job) == expected
    die(job)


@pytest.mark.soak
def test_prepared_workers_of_a_foreign_loader_outlive_a_signal_to_the_group(tmp_path: Path) -> None:
    with training(plain_loop, tmp_path) as process:
        process.until("update", 3)
        process.signal(signal.SIGTERM, to_group=True)
        assert process.end() == STOPPED
    assert len(process.said("update")) == 4
    assert saved_steps(tmp_path) == [3]


def test_a_signal_in_a_validation_saves_the_end_of_the_epoch(tmp_path: Path, uninterrupted: Any) -> None:
    with training(train, tmp_path, sp.on_signals("TERM"), Loop()) as process:
        process.until("validating", 6)
        process.signal(signal.SIGTERM)
        assert process.end() == STOPPED
    assert len(process.said("update")) == 6
    assert saved_steps(tmp_path) == [6]
    check_goes_on(tmp_path, 6, uninterrupted)


@pytest.mark.soak
def test_a_signal_at_an_epochs_last_update_saves_before_the_validation(tmp_path: Path, uninterrupted: Any) -> None:
    """It may take longer than the grace period. Known of a script that has closed an epoch."""
    with training(train, tmp_path, sp.on_signals("TERM"), Loop(until=14)) as process:
        process.until("update", 12)
        process.signal(signal.SIGTERM)
        assert process.end() == STOPPED
    assert process.said("validating") == [(6,)]
    assert saved_steps(tmp_path) == [12]


@pytest.mark.parametrize("place", ["made", pytest.param("restored", marks=pytest.mark.soak)])
def test_a_signal_before_the_first_update_saves_that(tmp_path: Path, place: str) -> None:
    with training(train, tmp_path, sp.on_signals("TERM"), Loop()) as process:
        process.until(place)
        process.signal(signal.SIGTERM)
        assert process.end() == STOPPED
    assert saved_steps(tmp_path) == [1]


@pytest.mark.parametrize(
    ("previous", "code"), [("none", -signal.SIGTERM), pytest.param("own", 3, marks=pytest.mark.soak)]
)
def test_without_a_boundary_the_signal_gets_its_way_when_the_grace_period_is_over(
    tmp_path: Path, previous: str, code: int
) -> None:
    """Also where the main thread is in a call that never returns, so that no handler of Python's ever runs."""
    with training(stuck, tmp_path, previous) as process:
        process.until("restored", 0)
        process.signal(signal.SIGTERM)
        assert process.end() == code
    assert saved_steps(tmp_path) == []


@pytest.mark.parametrize("number", [signal.SIGTERM, pytest.param(signal.SIGINT, marks=pytest.mark.soak)])
def test_more_signals_while_the_last_save_is_written_change_nothing(tmp_path: Path, number: signal.Signals) -> None:
    with training(with_slow_saves, tmp_path, sp.on_signals(*EVERY), 0, 100) as process:
        process.until("update", 2)
        process.signal(number)
        process.until("writing")
        for _ in range(3):
            process.signal(number)
        assert process.end() == STOPPED
    assert saved_steps(tmp_path) == [2]


@pytest.mark.soak
def test_a_second_interrupt_before_the_boundary_interrupts(tmp_path: Path) -> None:
    with training(interrupted_twice, tmp_path) as process:
        process.until("ready")
        process.signal(signal.SIGINT)
        process.until("noted")
        process.signal(signal.SIGINT)
        assert process.end() == 1
    assert process.said("update") == []
    assert saved_steps(tmp_path) == []


# A save takes 20 s of the played clock.
@pytest.mark.parametrize(
    ("grace_s", "code", "steps"), [pytest.param(25, STOPPED, [3, 2], marks=pytest.mark.soak), (19, 143, [2])]
)
def test_a_save_that_has_no_time_is_not_begun(tmp_path: Path, grace_s: float, code: int, steps: list[int]) -> None:
    signals = sp.on_signals("TERM", grace_s=grace_s)
    with training(with_slow_saves, tmp_path, signals, 20.0, 2) as process:
        process.until("update", 3)
        process.signal(signal.SIGTERM)
        assert process.end() == code
    assert saved_steps(tmp_path) == steps
    told = [text for (text,) in process.said("warned")]
    assert told == [] if code == STOPPED else "step 3 is not saved: a save takes 2" in told[0]


@pytest.mark.parametrize(("ends", "code"), [pytest.param(False, STOPPED, marks=pytest.mark.soak), (True, 3)])
def test_the_programs_own_handler_runs_and_what_it_raises_waits_for_the_save(
    tmp_path: Path, ends: bool, code: int
) -> None:
    with training(with_own_handler, tmp_path, Loop(), ends) as process:
        process.until("update", 2)
        process.signal(signal.SIGTERM)
        assert process.end() == code
    assert saved_steps(tmp_path) == [2]
    assert process.said("ran") == [(1,)]
    assert process.said("put back") == [] if ends else [(True,)]


def test_a_child_that_is_forked_off_finds_signals_as_they_were(tmp_path: Path) -> None:
    with training(with_a_child, tmp_path) as process:
        assert process.end() == 0
    assert process.said("child") == [(-signal.SIGUSR1, False)]


def test_a_last_save_that_fails_is_raised_and_is_no_75(tmp_path: Path) -> None:
    with training(with_full_disk, tmp_path) as process:
        process.until("update", 2)
        process.signal(signal.SIGTERM)
        assert process.end() == 1
    assert process.said("failed") == [(True, 128 + signal.SIGTERM)]


@pytest.mark.soak
def test_without_the_setting_a_signal_ends_the_process_as_ever(tmp_path: Path) -> None:
    with training(train, tmp_path, None, Loop()) as process:
        process.until("update", 2)
        process.signal(signal.SIGTERM)
        assert process.end() == -signal.SIGTERM


def test_a_signal_after_the_last_update_saves_at_the_end(tmp_path: Path) -> None:
    with training(train, tmp_path, sp.on_signals("USR1"), Loop(until=2)) as process:
        process.until("closing")
        process.signal(signal.SIGUSR1)
        assert process.end() == STOPPED
    assert saved_steps(tmp_path) == [2]
