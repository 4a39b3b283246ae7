"""Drill the examples of several ranks: with the same ranks bit for bit, with others the same samples and losses."""

from __future__ import annotations

import os
import sys
from dataclasses import replace
from itertools import chain
from pathlib import Path

import pytest

from safepoint.ambient import SystemAmbient
from safepoint.drill.plan import Kill
from safepoint.drill.play import Stage, play
from safepoint.drill.process import last_lines
from safepoint.drill.ranks import of_rank, samples_together
from safepoint.drill.scenario import rehearse, run_baseline
from safepoint.drill.trace import Ending, Rehearsal, Start
from safepoint.drill.verdict import Verdict, judge_rehearsal

ROOT = Path(__file__).parents[2]
# An epoch of 1797 images has 18 whole batches and one of 69, which two ranks share as 34 and 35.
IMAGES, GLOBAL_BATCH, UPDATES_PER_EPOCH, UPDATES = 1797, 96, 19, 26

# Each start imports torch in every rank, which takes seconds where other work goes on beside.
pytestmark = pytest.mark.timeout(900)
each_example = pytest.mark.parametrize("name", ["ddp", "fsdp"])


def make_stage(folder: Path, name: str, *options: str, ranks: int) -> Stage:
    path = os.pathsep.join(filter(None, [str(ROOT / "src"), os.environ.get("PYTHONPATH")]))
    environment = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"}
    settings = ("--updates", str(UPDATES), "--save-every", "5", "--global-batch", str(GLOBAL_BATCH))
    # `--run` begins like options of torchrun's own.
    command = (str(ROOT / "examples" / f"{name}.py"), "--run", name, *settings, *options)
    return Stage(command, folder, environment, SystemAmbient(), None, 200.0, ranks)


def samples_of_first_epoch(starts: tuple[Start, ...]) -> list[int]:
    """Return what the chain of starts made of the first epoch, in order; an update made again counts once."""
    last_made = {update.step: samples_together(update)["data"] for start in starts for update in start.updates}
    return list(chain.from_iterable(last_made[step] for step in range(1, UPDATES_PER_EPOCH + 1)))


# In the background the save of step 15 may not have come to its end at the second kill.
KILLS = (Kill(9, "publish", rank=0), Kill(18, rank=1))


@pytest.mark.parametrize(
    ("name", "kills", "resumed_from"),
    [
        ("ddp", KILLS[:1], [{0}, {5}]),
        pytest.param("ddp", KILLS, [{0}, {5}, {15}], marks=pytest.mark.soak),
        pytest.param("fsdp", KILLS, [{0}, {5}, {10, 15}], marks=pytest.mark.soak),
    ],
)
def test_a_job_of_two_ranks_goes_on_as_itself_and_then_as_one_process(
    tmp_path: Path, name: str, kills: tuple[Kill, ...], resumed_from: list[set[int]]
) -> None:
    two = make_stage(tmp_path, name, *(["--background"] if name == "fsdp" else []), ranks=2)
    alone = replace(two, command=(sys.executable, *two.command), ranks=0)
    baseline = run_baseline(two)
    starts = (
        *(play(two, "killed", f"start-{number}", kill=kill) for number, kill in enumerate(kills)),
        play(alone, "killed", "last"),
    )
    rehearsal = Rehearsal(two.command, baseline, starts)
    judgement = judge_rehearsal(rehearsal)
    assert judgement.verdict is Verdict.PASS, (judgement.findings, [last_lines(Path(one.log)) for one in starts])
    assert [one.ending for one in starts] == [*[Ending.KILLED] * len(kills), Ending.FINISHED]
    print(f"counted: {len(kills)} kills")
    resumed = [one.restored.step for one in starts if one.restored]
    assert all(step in expected for step, expected in zip(resumed, resumed_from, strict=True)), resumed
    assert all("the others ended within" in one.place for one in starts[:-1])
    apart = judgement.comparison.apart
    assert apart is not None and apart.updates == UPDATES - resumed[-1]
    assert judgement.comparison.has_seeded_streams
    streams = baseline.updates[0].streams.split(" ")
    assert len(set(streams)) == 2, "each rank draws its own numbers"
    assert baseline.state is not None
    assert {of_rank(item, 1) for item in ("model", "optimizer", "scheduler", "data", "rng")} <= set(baseline.state)
    for made in ((baseline,), starts):
        assert sorted(samples_of_first_epoch(made)) == list(range(IMAGES))
    assert samples_of_first_epoch((baseline,)) == samples_of_first_epoch(starts)


@pytest.mark.soak
@pytest.mark.timeout(0)
@each_example
def test_a_job_of_four_goes_on_with_two_and_then_three_ranks(tmp_path: Path, name: str, seed: int) -> None:
    stage = make_stage(tmp_path, name, "--save-every", "3", ranks=4)
    rehearsal = rehearse(stage, count=2, seed=seed, sizes=(4, 2, 3), kills_ranks="one")
    judgement = judge_rehearsal(rehearsal)
    assert judgement.verdict is Verdict.PASS, (judgement.findings, rehearsal.starts[-1].place)
    assert [one.ranks for one in rehearsal.starts] == [4, 2, 3]
    assert sorted(samples_of_first_epoch(rehearsal.starts)) == list(range(IMAGES))


@pytest.mark.soak
@pytest.mark.timeout(0)
@pytest.mark.parametrize("kills_ranks", ["one", "leader", "all"])
@each_example
def test_random_kills_leave_a_job_of_two_ranks_the_same(tmp_path: Path, name: str, kills_ranks: str, seed: int) -> None:
    rehearsal = rehearse(make_stage(tmp_path, name, ranks=2), count=5, seed=seed, kills_ranks=kills_ranks)
    judgement = judge_rehearsal(rehearsal)
    assert judgement.verdict is Verdict.PASS, (judgement.findings, rehearsal.kills)
    assert judgement.comparison.apart is None
