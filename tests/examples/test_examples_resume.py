"""Drill the examples: killed at random instants, with and without loader workers, they end as if undisturbed."""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

from safepoint.ambient import SystemAmbient
from safepoint.drill.plan import plan_kills
from safepoint.drill.play import Stage
from safepoint.drill.process import last_lines
from safepoint.drill.scenario import rehearse, resume_through, run_baseline
from safepoint.drill.trace import Rehearsal
from safepoint.drill.verdict import Verdict, judge_rehearsal
from tests.warm import EAGER, ROOT, SOURCE

# Each start imports torch, which takes seconds where other work goes on beside.
pytestmark = pytest.mark.timeout(400)


@dataclass(frozen=True)
class Example:
    """Name an example and its items; `updates` make a small run of it that comes past an epoch's end where it can."""

    name: str
    updates: int
    items: frozenset[str]


DIGITS = Example("digits", 50, frozenset({"model", "optimizer", "scheduler", "data", "rng"}))
GPT = Example("stdlib_gpt", 12, DIGITS.items | {"ema", "scaler"})
each_example = pytest.mark.parametrize("example", [DIGITS, GPT], ids=lambda example: example.name)


def make_stage(folder: Path, example: Example, *options: str) -> Stage:
    path = os.pathsep.join(filter(None, [str(SOURCE), str(EAGER), os.environ.get("PYTHONPATH")]))
    environment = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"}
    command = (sys.executable, str(ROOT / "examples" / f"{example.name}.py"), *options)
    return Stage(command, folder, environment, SystemAmbient(), None, 100.0)


@pytest.mark.parametrize(("example", "workers"), [(DIGITS, 2), (GPT, 0)], ids=["digits", "stdlib_gpt"])
def test_a_random_kill_leaves_the_run_the_same(tmp_path: Path, example: Example, workers: int, seed: int) -> None:
    """The undisturbed run has no workers: their number changes nothing, nor does saving in the background."""
    options = ("--updates", str(example.updates), "--save-every", "5")
    baseline = run_baseline(make_stage(tmp_path, example, *options))
    stage = make_stage(tmp_path, example, *options, "--workers", str(workers), *(["--background"] if workers else []))
    # A save in the background is complete when the next one begins, five updates later.
    kills = plan_kills(1, seed=seed + workers, updates=baseline.last_step, resumable_from=11)
    starts = resume_through(stage, kills, baseline=baseline, root=f"workers-{workers}")
    judgement = judge_rehearsal(Rehearsal(stage.command, baseline, starts))
    assert judgement.verdict is Verdict.PASS, (judgement.findings, kills, last_lines(Path(starts[-1].log)))
    assert set(judgement.comparison.items) == example.items
    assert judgement.comparison.updates >= example.updates
    print(f"counted: {len(kills)} kills")


@pytest.mark.soak
@pytest.mark.timeout(0)
@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("background", [False, True])
@each_example
def test_twenty_random_kills_leave_the_run_the_same(
    tmp_path: Path, example: Example, workers: int, background: bool, seed: int
) -> None:
    options = ("--updates", "60", "--save-every", "3", "--workers", str(workers), *(["--background"] * background))
    rehearsal = rehearse(make_stage(tmp_path, example, *options), count=20, seed=seed + workers)
    judgement = judge_rehearsal(rehearsal)
    assert judgement.verdict is Verdict.PASS, judgement.findings
    assert rehearsal.kills == 20
    print(f"counted: {rehearsal.kills} kills")
    assert set(judgement.comparison.items) == example.items
