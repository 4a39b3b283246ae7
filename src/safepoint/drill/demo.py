"""The demonstration: one real training run that is killed, resumed, compared, damaged, and resumed again.

Each act says what is done, what should happen and what was seen; it holds when the two agree. Nothing is played: every
start is a process of its own, every kill is a SIGKILL, every number comes from what the processes told.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from safepoint.ambient import Ambient
from safepoint.drill.compare import Comparison, compare
from safepoint.drill.damage import data_file, empty, flip_bit, manifest_file, newest_generation, remove
from safepoint.drill.plan import Kill
from safepoint.drill.play import Stage, play
from safepoint.drill.scenario import run_baseline
from safepoint.drill.trace import Rehearsal, Start
from safepoint.state.item import STREAMS_ITEM

UPDATES, SAVE_EVERY = 60, 10
BETWEEN_SAVES, WITHIN_SAVE = Kill(27), Kill(40, "write")

# The long job: it saves every hundred updates and dies thirty updates after the save of step 1100.
LONG_UPDATES, LONG_SAVE_EVERY, DIES_AT = 1200, 100, Kill(1130)
TORN_STEP, WHOLE_STEP = 1100, 1000

_ITEMS = ("model", "optimizer", "scheduler", "data", STREAMS_ITEM)
_BIT_FROM_END_BYTES = 1000


@dataclass(frozen=True, slots=True)
class Act:
    """Hold one act: what was done, what should happen, what was seen, in words, and the messages that prove it."""

    title: str
    expected: str
    seen: str
    holds: bool
    messages: tuple[str, ...] = ()
    seconds: float = 0.0


@dataclass(frozen=True, slots=True)
class Demonstration:
    """Hold where and with what the demonstration runs.

    Args:
        python: The interpreter, with the option list that starts it.
        script: The training script.
    """

    folder: Path
    python: str
    script: Path
    environment: Mapping[str, str]
    ambient: Ambient

    def stage(self, *options: str) -> Stage:
        """Return the stage of the training script with some options."""
        return Stage((self.python, str(self.script), *options), self.folder, self.environment, self.ambient)


def training_script() -> Path:
    """Return the training script: that of the checkout, or the copy of it that an installed package carries."""
    here = Path(__file__).resolve()
    example = here.parents[3] / "examples" / "digits.py"
    return example if example.is_file() else here.with_name("training.py")


def perform(demonstration: Demonstration) -> Iterator[Act]:
    """Yield the acts as they are done.

    Two processes run at a time: those of the last two acts run beside the others.

    Raises:
        RequestError: The training script cannot run at all.
    """
    short = demonstration.stage(
        *("--run", "digits", "--updates", str(UPDATES), "--save-every", str(SAVE_EVERY), "--workers", "2")
    )
    long = demonstration.stage(
        *("--run", "job", "--updates", str(LONG_UPDATES), "--save-every", str(LONG_SAVE_EVERY), "--batch-size", "8")
    )
    with ThreadPoolExecutor(1) as beside:
        job = beside.submit(_play_job, long)
        baseline = run_baseline(short)
        damaged = beside.submit(_play_damaged, short)
        yield _trained(baseline)
        starts: list[Start] = []
        for number, kill in enumerate((BETWEEN_SAVES, WITHIN_SAVE, None), 1):
            starts.append(play(short, "killed", f"killed-{number}", kill=kill))
            if kill is not None:
                yield _killed(starts[-1], kill)
        yield _compared(Rehearsal(short.command, baseline, tuple(starts)))
        yield _fell_back(damaged.result(), baseline)
        yield _job_resumed(*job.result())


def _trained(baseline: Start) -> Act:
    loss = float.fromhex(baseline.updates[-1].metrics["loss"])
    return Act(
        "Train a small network on handwritten digits, undisturbed",
        f"{UPDATES} updates, a checkpoint every {SAVE_EVERY}",
        f"{len(baseline.updates)} updates, checkpoints of {_steps(baseline.committed)}, loss {loss:.4f}",
        len(baseline.updates) == UPDATES and baseline.committed == tuple(range(SAVE_EVERY, UPDATES + 1, SAVE_EVERY)),
        seconds=baseline.seconds,
    )


def _killed(start: Start, kill: Kill) -> Act:
    newest = kill.update // SAVE_EVERY * SAVE_EVERY
    if kill.phase is None:
        title = f"Train it again, and kill -9 it between two saves, after update {kill.update}"
    else:
        title = f"Go on, and kill -9 it in the middle of the save of step {newest}"
        newest -= SAVE_EVERY
    came_from = "" if start.restored is None or start.restored.is_fresh else f"resumed from {start.restored.step}, "
    return Act(
        title,
        f"the newest checkpoint is step {newest}",
        f"{came_from}killed {start.place}; newest checkpoint seen: step {max(start.committed, default=0)}",
        max(start.committed, default=0) == newest,
        seconds=start.seconds,
    )


def _compared(rehearsal: Rehearsal) -> Act:
    comparison = compare(rehearsal)
    resumed = [start.restored.step for start in rehearsal.starts[1:] if start.restored is not None]
    wanted = [BETWEEN_SAVES.update // SAVE_EVERY * SAVE_EVERY, WITHIN_SAVE.update - SAVE_EVERY]
    equal = f"{comparison.updates} updates compared, {_difference(comparison)}"
    return Act(
        "Go on to the end, and compare with the undisturbed run, bit for bit",
        f"resumed from {_steps(wanted)}; every loss, sample id and random stream of every update equal; in the end"
        " weights, moments, schedule, data position and random streams equal",
        f"resumed from {_steps(resumed)}; {equal}; final state compared of {', '.join(comparison.items)}",
        resumed == wanted
        and comparison.divergence is None
        and set(_ITEMS) <= set(comparison.items)
        and comparison.has_seeded_streams,
        seconds=rehearsal.starts[-1].seconds,
    )


def _flip(generation: Path) -> None:
    path = data_file(generation)
    flip_bit(path, path.stat().st_size - _BIT_FROM_END_BYTES)


# What befalls the newest checkpoint, the one before it, and the one before that.
_DAMAGES: tuple[Callable[[Path], None], ...] = (
    _flip,
    lambda generation: remove(data_file(generation)),
    lambda generation: empty(manifest_file(generation)),
)
_DAMAGED_STEPS = tuple(UPDATES - SAVE_EVERY * number for number in range(len(_DAMAGES)))


def _play_damaged(stage: Stage) -> Start:
    """Damage each of the newest checkpoints of a copy of the undisturbed run in another way, and resume it."""
    shutil.copytree(stage.folder / "uninterrupted", stage.folder / "damaged")
    for step, damage in zip(_DAMAGED_STEPS, _DAMAGES, strict=True):
        damage(newest_generation(stage.folder / "damaged" / "digits", step=step))
    return play(stage, "damaged", "damaged")


def _fell_back(start: Start, baseline: Start) -> Act:
    comparison = compare(Rehearsal((), baseline, (start,)))
    restored = start.restored
    refused = restored.refused if restored is not None else ()
    step = restored.step if restored is not None else 0
    older = _DAMAGED_STEPS[-1] - SAVE_EVERY
    flipped, removed, emptied = _DAMAGED_STEPS
    return Act(
        f"Flip a single bit in checkpoint {flipped}, remove a file of {removed}, empty the manifest of {emptied}",
        f"all three are refused, with the reasons; step {older} is taken; the end is still that of the undisturbed run",
        f"refused {len(refused)} checkpoints, resumed from step {step};"
        f" {comparison.updates} updates and the final state compared, {_difference(comparison)}",
        len(refused) == len(_DAMAGES)
        and step == older
        and comparison.updates == UPDATES - older
        and comparison.divergence is None
        and set(_ITEMS) <= set(comparison.items),
        tuple(f"refused {text}" for text in refused),
        start.seconds,
    )


def _play_job(stage: Stage) -> tuple[Start, list[str], Start]:
    """Train to the death of the long job, take a part of its newest checkpoint away, and resume it."""
    dead = play(stage, "job", "job-1", kill=DIES_AT)
    generation = newest_generation(stage.folder / "job" / "job")
    names = sorted(path.name for path in generation.iterdir())
    remove(data_file(generation))
    return dead, names, play(stage, "job", "job-2", kill=DIES_AT)


def _job_resumed(dead: Start, names: list[str], resumed: Start) -> Act:
    comparison = compare(Rehearsal((), dead, (resumed,)))
    restored = resumed.restored
    step, replayed = (restored.step, restored.replayed) if restored is not None else (0, 0)
    lost = DIES_AT.update - WHOLE_STEP
    said = Path(resumed.log).read_text("utf-8", "replace").splitlines()
    report = tuple(line for line in said if not line.startswith(("step ", "epoch ")))
    return Act(
        f"A job died at update {DIES_AT.update}; the folder of step {TORN_STEP} holds {len(names) - 1} of its"
        f" {len(names)} files",
        f"step {WHOLE_STEP} is taken, {lost} updates are said to be done again, and they come out the same",
        f"died {dead.place}; resumed from step {step}, {replayed} updates announced; {comparison.updates} compared with"
        f" those of the dead job, {_difference(comparison)}",
        dead.last_step == DIES_AT.update
        and (step, replayed, comparison.updates) == (WHOLE_STEP, lost, lost)
        and comparison.divergence is None,
        report,
        dead.seconds + resumed.seconds,
    )


def _difference(comparison: Comparison) -> str:
    return "no difference" if comparison.divergence is None else f"BUT {comparison.divergence}"


def _steps(steps: tuple[int, ...] | list[int]) -> str:
    return "steps " + ", ".join(map(str, steps)) if steps else "no step"
