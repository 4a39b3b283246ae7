"""Where the time goes, over the interval between saves, as a picture."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from safepoint.errors import RequestError
from safepoint.planning.costs import Costs
from safepoint.planning.forecast import Shares, divide
from safepoint.planning.optimum import best_work

_POINTS = 160
_SIZE_INCHES = (7.0, 4.2)
_HOUR_S, _MINUTE_S = 3600.0, 60.0


def curve(costs: Costs, mtbf_s: float, *, around_s: Sequence[float]) -> list[tuple[float, Shares]]:
    """Return where the time goes for works between saves from far below to far above those named, in seconds."""
    low = max(costs.behind_s, min(around_s) / 10)
    high = max(around_s) * 10
    works = [low * (high / low) ** (number / (_POINTS - 1)) for number in range(_POINTS)]
    return [(work_s, divide(costs, work_s, mtbf_s)) for work_s in works]


def draw(path: Path, costs: Costs, mtbf_s: float, *, work_s: float, simulated: Sequence[tuple[float, float]]) -> None:
    """Draw where the time goes into an SVG file; the same numbers give the same file.

    Args:
        path: The file; one that is there is replaced.
        work_s: The interval that was asked for.
        simulated: Works between saves, and the effective share that a simulation found for each.

    Raises:
        RequestError: matplotlib is not installed.
        OSError: The file cannot be written.
    """
    try:
        import matplotlib
        from matplotlib.figure import Figure
    except ImportError as exc:
        raise RequestError(
            "curves need matplotlib, which is not installed",
            where="--svg",
            found=str(exc),
            remedy="Install it with: pip install 'safepoint[report]'",
        ) from exc
    best_s = best_work(costs, mtbf_s)
    unit_s, unit = (_HOUR_S, "hours") if best_s > _HOUR_S else (_MINUTE_S, "minutes")
    points = curve(costs, mtbf_s, around_s=[best_s, work_s])
    figure = Figure(figsize=_SIZE_INCHES, layout="constrained")
    axes = figure.add_subplot()
    intervals = [one / unit_s for one, _ in points]
    for name in ("effective", "saving", "lost", "restoring"):
        axes.plot(intervals, [100 * getattr(shares, name) for _, shares in points], label=name)
    axes.plot(
        [one / unit_s for one, _ in simulated],
        [100 * share for _, share in simulated],
        linestyle="none",
        marker="o",
        markersize=4,
        color="black",
        label="effective, simulated",
    )
    axes.axvline(best_s / unit_s, color="grey", linestyle="--", label="optimum")
    axes.axvline(work_s / unit_s, color="grey", linestyle=":", label="interval asked for")
    axes.set_xscale("log")
    axes.set_ylim(0, 100)
    axes.set_xlabel(f"work between two saves, {unit}")
    axes.set_ylabel("share of all time, %")
    axes.legend(loc="center left", fontsize="small")
    # Else names in the file would be random, and it would hold the time at which it was drawn.
    with matplotlib.rc_context({"svg.hashsalt": "safepoint"}):
        figure.savefig(path, format="svg", metadata={"Date": None})
