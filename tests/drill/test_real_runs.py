"""Cut a real, tiny training where it hurts, and find a training that does not save what it needs."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from safepoint.ambient import SystemAmbient
from safepoint.drill.plan import Kill
from safepoint.drill.play import Stage, play
from safepoint.drill.process import last_lines
from safepoint.drill.scenario import resume_through, run_baseline
from safepoint.drill.trace import Ending, Rehearsal, Start
from safepoint.drill.verdict import Verdict, judge_rehearsal
from tests.warm import EAGER, SOURCE

SCRIPT = Path(__file__).parent / "scripts" / "epochs.py"
UPDATES_PER_EPOCH = 4

# Each start imports torch, which takes seconds where other work goes on beside.
pytestmark = pytest.mark.timeout(400)


@pytest.fixture(scope="module")
def stage(tmp_path_factory: pytest.TempPathFactory) -> Stage:
    path = os.pathsep.join(filter(None, [str(SOURCE), str(EAGER), os.environ.get("PYTHONPATH")]))
    environment = {**os.environ, "PYTHONPATH": path}
    command = (sys.executable, str(SCRIPT))
    return Stage(command, tmp_path_factory.mktemp("drill"), environment, SystemAmbient(), None, 100.0)


@pytest.fixture(scope="module")
def baseline(stage: Stage) -> Iterator[Start]:
    found = run_baseline(stage)
    assert found.last_step == 4 * UPDATES_PER_EPOCH
    yield found


def with_options(stage: Stage, *options: str) -> Stage:
    return replace(stage, command=(*stage.command, *options))


def resumed_from(starts: tuple[Start, ...]) -> list[int]:
    return [start.restored.step for start in starts if start.restored is not None]


CUTS = (
    (Kill(4), 3),  # at the first epoch's end, before validation and schedule; nothing of step 4 is saved
    (Kill(5), 4),  # at the first update after an epoch's end whose validation and schedule are saved
    (Kill(4), 4),  # directly after the resume at step 4, before any batch
    (Kill(9), 8),  # twice within the third epoch
    (Kill(11), 10),
)


@pytest.mark.parametrize("count", [3, pytest.param(len(CUTS), marks=pytest.mark.soak)])
def test_cuts_at_an_epochs_end_within_one_epoch_and_directly_after_a_resume(
    stage: Stage, baseline: Start, count: int
) -> None:
    kills = tuple(kill for kill, _ in CUTS[:count])
    starts = resume_through(stage, kills, baseline=baseline, root=f"cuts-{count}")
    judgement = judge_rehearsal(Rehearsal(stage.command, baseline, starts))
    assert judgement.verdict is Verdict.PASS, (judgement.findings, last_lines(Path(starts[-1].log)))
    assert resumed_from(starts) == [0, *(step for _, step in CUTS[:count])]
    assert set(judgement.comparison.items) == {"model", "optimizer", "scheduler", "data", "rng"}


PLACES = (
    ("before the validation", 4),
    # Resumed at an epoch's end, the first validation that the start passes is that of the same epoch again.
    ("after the validation", 4),
    ("after the schedule", 4),
    ("after the restore", 4),
    ("inside a window:1", 5),
)


@pytest.mark.parametrize(
    "places", [(PLACES[0], PLACES[2], PLACES[4]), pytest.param(PLACES, marks=pytest.mark.soak)], ids=["some", "all"]
)
def test_cuts_inside_a_window_and_around_validation_and_schedule(
    stage: Stage, baseline: Start, places: tuple[tuple[str, int], ...]
) -> None:
    starts, root = [], f"places-{len(places)}"
    for number, (place, _) in enumerate(places):
        start = play(with_options(stage, "--saves-early", "--die", place), root, f"place-{number}")
        assert start.ending is Ending.FAILED and start.exit_code == -9, (place, last_lines(Path(start.log)))
        starts.append(replace(start, ending=Ending.KILLED))
    starts.append(play(stage, root, "last"))
    judgement = judge_rehearsal(Rehearsal(stage.command, baseline, tuple(starts)))
    assert judgement.verdict is Verdict.PASS, (judgement.findings, last_lines(Path(starts[-1].log)))
    assert resumed_from(tuple(starts)) == [0, *(step for _, step in places)]


@pytest.mark.parametrize(
    ("options", "step", "subject"),
    [
        (("--reseeds",), 7, "random streams"),
        # The rate itself comes back with the optimizer; it goes wrong at the next step of the forgotten schedule, which
        # follows update 8, and shows in the loss of the update after the next.
        pytest.param(("--forget", "scheduler"), 10, "metric loss", marks=pytest.mark.soak),
    ],
)
def test_a_training_that_resumes_as_another_run_is_caught_at_its_first_wrong_update(
    stage: Stage, baseline: Start, options: tuple[str, ...], step: int, subject: str
) -> None:
    faulty = with_options(stage, *options)
    starts = resume_through(faulty, (Kill(6),), baseline=baseline, root="".join(options))
    judgement = judge_rehearsal(Rehearsal(faulty.command, baseline, starts))
    assert judgement.verdict is Verdict.SILENT_DIVERGENCE, judgement.findings
    divergence = judgement.comparison.divergence
    assert divergence is not None and (divergence.start, divergence.step) == (2, step), str(divergence)
    assert subject in [value.subject for value in divergence.values]


def test_a_training_that_does_not_save_its_data_position_refuses_to_resume(stage: Stage, baseline: Start) -> None:
    faulty = with_options(stage, "--forget", "data")
    starts = resume_through(faulty, (Kill(6),), baseline=baseline, root="forgetful")
    assert judge_rehearsal(Rehearsal(faulty.command, baseline, starts)).verdict is Verdict.HARD_FAIL
    assert "its position is not saved" in last_lines(Path(starts[-1].log))
