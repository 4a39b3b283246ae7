"""From what is typed, and what a run measured, to the costs that are planned with."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from safepoint.cli.quantities import rate, size_bytes
from safepoint.duration import duration_s
from safepoint.errors import RequestError
from safepoint.planning.costs import Costs
from safepoint.planning.optimum import best_work

if TYPE_CHECKING:
    from safepoint.planning.measured import Measured


@dataclass(frozen=True, slots=True)
class Typed:
    """Hold the options as they were typed; None for what was not."""

    save: str | None
    restore: str | None
    mtbf: str | None
    nodes: int
    interval: str | None
    includes_save: bool
    is_background: bool | None
    blocked: str | None
    since_save: str | None
    run: str | None
    size: str | None
    save_rate: str | None
    pause_rate: str | None
    restore_rate: str | None


@dataclass(frozen=True, slots=True)
class Inputs:
    """Hold the costs, the work between saves and where it comes from, and how intervals are to be told.

    `scale` is how many times as large the checkpoints are as those of the run that was measured.
    """

    costs: Costs
    work_s: float
    origin: str
    includes_save: bool
    since_save_s: float | None
    measured: Measured | None
    scale: float


def read_inputs(typed: Typed) -> Inputs:
    """Return what to plan with.

    Raises:
        RequestError: An option cannot be read, contradicts another, or is missing; the option is named.
        NotFoundError: There is no such run, or it has no checkpoint.
    """
    measured = _measured(typed.run) if typed.run is not None else None
    is_background = typed.is_background
    if is_background is None:
        is_background = measured is not None and measured.is_background
    size = size_bytes(typed.size, option="--size") if typed.size is not None else None
    scale = size / measured.size_bytes if size is not None and measured is not None and measured.size_bytes else 1.0
    save_s = _either(typed.save, "--save", typed.save_rate, "--save-rate", size)
    if save_s is None and measured is not None:
        save_s = _save_s(measured, is_background=is_background) * scale
    if save_s is None:
        raise RequestError(
            "nothing says how long a save takes", where="--save", expected="--save, --save-rate or --from"
        )
    costs = Costs(
        save_s=_positive(save_s, "--save"),
        blocked_s=_blocked_s(typed, save_s, size, measured, scale) if is_background else _all_of_it(typed, save_s),
        restore_s=_restore_s(typed, size),
        mtbf_s=_mtbf_s(typed, measured),
    )
    work_s, origin = _work(typed, costs, measured, is_scaled=size is not None)
    since_save_s = duration_s(typed.since_save, option="--since-save") if typed.since_save is not None else None
    return Inputs(costs, work_s, origin, typed.includes_save, since_save_s, measured, scale)


def _measured(run: str) -> Measured:
    # What reads a run takes longer to import than all that is planned without one.
    from safepoint.cli.source import open_run
    from safepoint.planning.measured import measure

    source = open_run(run)
    return measure(source.storage, source.lineage, url=source.url)


def _either(text: str | None, option: str, speed: str | None, speed_option: str, size: float | None) -> float | None:
    """Return a duration that is typed itself, or as a rate."""
    if text is not None and speed is not None:
        raise RequestError("a time is given twice", where=option, expected=f"{option} or {speed_option}")
    if speed is None:
        return duration_s(text, option=option) if text is not None else None
    if size is None:
        raise RequestError("a rate needs a size", where=speed_option, remedy="Add --size.")
    return size / rate(speed, option=speed_option)


def _save_s(measured: Measured, *, is_background: bool) -> float:
    """Return how long a save takes: of a synchronous one all that training waits for."""
    if is_background:
        return measured.background.total_s if measured.background is not None else measured.phases_s
    return measured.synchronous.blocked_s if measured.synchronous is not None else measured.phases_s


def _all_of_it(typed: Typed, save_s: float) -> float:
    for text, option in ((typed.blocked, "--blocked"), (typed.pause_rate, "--pause-rate")):
        if text is not None:
            raise RequestError("training waits for all of a synchronous save", where=option, expected="--background")
    return save_s


def _blocked_s(typed: Typed, save_s: float, size: float | None, measured: Measured | None, scale: float) -> float:
    blocked_s = _either(typed.blocked, "--blocked", typed.pause_rate, "--pause-rate", size)
    if blocked_s is None and measured is not None and measured.background is not None:
        # Of so short a save the medians of both may cross.
        blocked_s = min(measured.background.blocked_s * scale, save_s)
    if blocked_s is None:
        raise RequestError(
            "nothing says how long a save in the background blocks training",
            where="--background",
            expected="--blocked, --pause-rate or --from a run that saved in the background",
            found="" if measured is None else "the run's journals tell of no save in the background",
        )
    if blocked_s > save_s:
        raise RequestError(
            "a save cannot block training for longer than it lasts",
            where="--blocked",
            expected=f"at most {save_s:g} s",
            found=f"{blocked_s:g} s",
        )
    return blocked_s


def _restore_s(typed: Typed, size: float | None) -> float:
    if typed.restore is None and typed.restore_rate is None:
        raise RequestError(
            "nothing says how long a restore takes", where="--restore", expected="--restore or --restore-rate"
        )
    # Starting the job again takes its time whatever the size.
    start_s = duration_s(typed.restore, option="--restore") if typed.restore is not None else 0.0
    return start_s + (_either(None, "--restore", typed.restore_rate, "--restore-rate", size) or 0.0)


def _mtbf_s(typed: Typed, measured: Measured | None) -> float | None:
    if typed.mtbf is not None:
        return _positive(duration_s(typed.mtbf, option="--mtbf"), "--mtbf") / typed.nodes
    if typed.nodes != 1:
        raise RequestError("the number of nodes says nothing alone", where="--nodes", remedy="Add --mtbf.")
    return measured.mtbf_s if measured is not None else None


def _work(typed: Typed, costs: Costs, measured: Measured | None, *, is_scaled: bool) -> tuple[float, str]:
    """Return the work between saves, and where it comes from: ``typed``, ``measured`` or ``best``.

    What a run measured between saves of another size says nothing about this one.
    """
    if typed.interval is not None:
        origin = "typed"
        work_s = duration_s(typed.interval, option="--interval") - (costs.blocked_s if typed.includes_save else 0.0)
    elif measured is not None and measured.period_s is not None and not is_scaled:
        origin = "measured"
        work_s = measured.period_s - costs.blocked_s
    elif costs.mtbf_s is not None:
        return best_work(costs, costs.mtbf_s), "best"
    else:
        found = "" if measured is None else "--from a run that did not die"
        if measured is not None and measured.period_s is None:
            found += " and has too few checkpoints to tell an interval"
        elif measured is not None:
            found += ", whose interval is that of another size of checkpoints"
        raise RequestError(
            "nothing to plan", where="--interval", expected="--interval, --mtbf or --from a long run", found=found
        )
    if work_s <= 0 or work_s < costs.behind_s:
        least_s = costs.save_s if typed.includes_save else costs.behind_s
        if origin == "measured" and measured is not None:
            raise RequestError(
                "the run saved so often that it says nothing of an interval",
                where="--from",
                expected="more time between saves than a save takes",
                found=f"a save every {measured.period_s:g} s",
                remedy="Type --interval, or ask a run that is longer or saves less often.",
            )
        raise RequestError(
            "the interval leaves no time between saves", where="--interval", expected=f"more than {least_s:g} s"
        )
    return work_s, origin


def _positive(seconds: float, option: str) -> float:
    if seconds <= 0:
        raise RequestError("a time makes no sense", where=option, expected="more than 0 s", found=f"{seconds:g} s")
    return seconds
