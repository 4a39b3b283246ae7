"""A drill from end to end: the uninterrupted start, then starts that are killed, then one that comes to the end."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

from safepoint.drill.plan import Kill, aim_kills, check_aim, check_kills, check_phases, plan_kills
from safepoint.drill.play import Stage, play
from safepoint.drill.process import last_lines
from safepoint.drill.trace import Ending, Rehearsal, Start
from safepoint.errors import RequestError

Tell = Callable[[str, Start], None]


def rehearse(
    stage: Stage,
    *,
    kills: tuple[Kill, ...] = (),
    count: int = 0,
    seed: int = 0,
    sizes: Sequence[int] = (),
    kills_ranks: str = "all",
    tell: Tell = lambda label, start: None,
) -> Rehearsal:
    """Run the command uninterrupted, then kill and resume it, and return what was seen.

    Args:
        kills: Where the starts die, one after the other.
        count: Instead of `kills`: how many random ones, drawn from `seed`.
        sizes: How many ranks each start of the chain has; as many as the stage says if absent. The uninterrupted run
            has as many as the first.
        kills_ranks: Which ranks die: ``all``, the ``leader``, or any ``one``, drawn from `seed`.
        tell: Called after each start, with its name.

    Raises:
        RequestError: The command cannot be drilled: it does not start, does not use safepoint, or fails by itself.
    """
    check_sizes(sizes, len(kills) or count)
    check_aim(kills_ranks)
    check_phases(kills)
    stage = replace(stage, ranks=sizes[0]) if sizes else stage
    baseline = run_baseline(stage)
    tell("uninterrupted", baseline)
    is_random = not kills
    if is_random:
        first_saved = min(baseline.committed, default=0)
        kills = plan_kills(count, seed=seed, updates=baseline.last_step, resumable_from=first_saved + 1)
    kills = aim_kills(kills, at=kills_ranks, sizes=sizes or [max(stage.ranks, 1)] * len(kills), seed=seed)
    starts = resume_through(stage, kills, baseline=baseline, sizes=sizes, tell=tell)
    return Rehearsal(stage.command, baseline, starts, seed if is_random else None)


def check_sizes(sizes: Sequence[int], kills: int) -> None:
    """Raise `RequestError` unless there is one number of ranks for each start: one more than there are kills."""
    if sizes and (len(sizes) != kills + 1 or min(sizes) < 1):
        raise RequestError(
            "the numbers of ranks do not fit the kills",
            where="world sizes",
            expected=f"{kills + 1} numbers, one for each start: {kills} are killed and one comes to the end",
            found=", ".join(map(str, sizes)),
        )


def run_baseline(stage: Stage) -> Start:
    """Run the command uninterrupted.

    Raises:
        RequestError: It does not start, does not use safepoint, fails by itself, or makes no update.
    """
    baseline = play(stage, "uninterrupted", "uninterrupted")
    if not baseline.is_complete:
        raise _unfit(baseline)
    if not baseline.updates:
        raise RequestError(
            "the command makes no update, so there is nothing to compare",
            where=" ".join(stage.command),
            expected="a call of after_update() for each update",
            remedy=_shown(baseline),
        )
    return baseline


def resume_through(
    stage: Stage,
    kills: tuple[Kill, ...],
    *,
    baseline: Start,
    root: str = "killed",
    sizes: Sequence[int] = (),
    tell: Tell = lambda label, start: None,
) -> tuple[Start, ...]:
    """Start the command once for each kill and once more to its end; stop at a start that cannot go on by itself.

    Raises:
        RequestError: A kill is beyond the end of the uninterrupted run.
    """
    check_kills(kills, updates=baseline.last_step)
    starts: list[Start] = []
    for number, kill in enumerate((*kills, None), 1):
        label = f"start-{number}"
        one = replace(stage, ranks=sizes[number - 1]) if sizes else stage
        start = play(one, root, label, kill=kill, update_seconds=baseline.update_seconds)
        starts.append(start)
        tell(label, start)
        if start.ending in (Ending.FAILED, Ending.SILENT):
            break
    return tuple(starts)


def _unfit(baseline: Start) -> RequestError:
    if not baseline.is_connected:
        return RequestError(
            "the command never told an event, so it cannot be watched",
            expected="a safepoint.CheckpointManager in the command's own process, with restore() and after_update()",
            found=f"a command that {_how(baseline)} without one",
            remedy=_shown(baseline),
        )
    return RequestError(
        "the command fails without any kill",
        expected="a run that comes to its end and closes its manager",
        found=f"it {_how(baseline)} {baseline.place}",
        remedy=_shown(baseline),
    )


def _how(start: Start) -> str:
    if start.ending is Ending.SILENT:
        return "went silent"
    return f"ended with exit code {start.exit_code}"


def _shown(start: Start) -> str:
    lines = last_lines(Path(start.log))
    return f"The last lines it printed:\n{lines}" if lines else "It printed nothing."
