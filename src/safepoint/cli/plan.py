"""``safepoint plan``: what an interval between saves costs, and which one costs least."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer

from safepoint.cli.costs import Inputs, Typed, read_inputs
from safepoint.cli.display import JsonOption, counted, print_facts, print_json, print_line, print_table
from safepoint.duration import duration_text
from safepoint.errors import RequestError
from safepoint.planning.figure import draw
from safepoint.planning.forecast import Forecast, Incident, divide, forecast, incident
from safepoint.planning.optimum import Optimum, find_optimum
from safepoint.planning.simulation import Search, draw_gaps, search, simulate

# Beyond this the time of a save is no longer mostly that of its bytes.
_SHORTEST_PERIOD_S = 1.0
_MOST_SCALE = 10.0
_FACTORS = (0.25, 0.5, 1.0, 2.0, 4.0)


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command("plan")(_plan)


def _plan(
    save: Annotated[str | None, typer.Option(help="How long a save takes until it is durable, such as 1m.")] = None,
    restore: Annotated[str | None, typer.Option(help="From a failure until training goes on, such as 4m.")] = None,
    mtbf: Annotated[str | None, typer.Option(help="Mean time between failures of one node, such as 6h.")] = None,
    nodes: Annotated[int, typer.Option(min=1, help="How many nodes can fail.")] = 1,
    interval: Annotated[str | None, typer.Option(help="Time between saves; else the run's, or the best.")] = None,
    includes_save: Annotated[
        bool,
        typer.Option(
            "--interval-includes-save/--interval-excludes-save", help="Whether the interval includes the save's time."
        ),
    ] = False,
    is_background: Annotated[
        bool | None,
        typer.Option(
            "--background/--synchronous",
            help="Whether training goes on while it saves; if nothing is said, as in the run of --from.",
        ),
    ] = None,
    blocked: Annotated[str | None, typer.Option(help="How long a save in the background blocks training.")] = None,
    since_save: Annotated[
        str | None, typer.Option(help="For one incident: time from the last completed save to the failure.")
    ] = None,
    run: Annotated[
        str | None, typer.Option("--from", metavar="RUN", help="Take what is not typed from what this run measured.")
    ] = None,
    size: Annotated[str | None, typer.Option(help="Size of a checkpoint, for rates, such as 80GB.")] = None,
    save_rate: Annotated[str | None, typer.Option(help="Bytes a second of a save, such as 2GB/s.")] = None,
    pause_rate: Annotated[str | None, typer.Option(help="Bytes a second of the copy that blocks training.")] = None,
    restore_rate: Annotated[str | None, typer.Option(help="Bytes a second of a restore, added to --restore.")] = None,
    seed: Annotated[int, typer.Option(help="Seed of the simulated failures.")] = 0,
    svg: Annotated[Path | None, typer.Option(help="Draw the curves into this file.")] = None,
    as_json: JsonOption = False,
) -> None:
    """Plan the interval between saves: what it costs, what a failure loses, and which interval is best."""
    typed = Typed(
        save=save,
        restore=restore,
        mtbf=mtbf,
        nodes=nodes,
        interval=interval,
        includes_save=includes_save,
        is_background=is_background,
        blocked=blocked,
        since_save=since_save,
        run=run,
        size=size,
        save_rate=save_rate,
        pause_rate=pause_rate,
        restore_rate=restore_rate,
    )
    inputs = read_inputs(typed)
    if svg is not None and inputs.costs.mtbf_s is None:
        raise RequestError("curves need a rate of failures", where="--svg", remedy="Add --mtbf.")
    found = forecast(inputs.costs, inputs.work_s)
    told = incident(inputs.costs, inputs.since_save_s) if inputs.since_save_s is not None else None
    if inputs.costs.mtbf_s is None:
        _tell(inputs, found, told, None, as_json=as_json)
        return
    played = _play(inputs, inputs.costs.mtbf_s, seed=seed)
    _tell(inputs, found, told, played, as_json=as_json)
    if svg is not None:
        simulated = [(row["work_s"], row["simulated"]) for row in played[2]]
        draw(svg, inputs.costs, inputs.costs.mtbf_s, work_s=inputs.work_s, simulated=simulated)


def _play(inputs: Inputs, mtbf_s: float, *, seed: int) -> tuple[Optimum, Search, list[dict[str, float]]]:
    """Return the best interval by formula and by simulation, and a row for each of some intervals around the asked."""
    costs, gaps = inputs.costs, draw_gaps(mtbf_s, seed=seed)
    rows = []
    for work_s in (factor * inputs.work_s for factor in _FACTORS):
        if work_s < costs.behind_s:
            continue
        simulated = simulate(costs, work_s, gaps)
        told = {"work_s": work_s, "period_s": work_s + costs.blocked_s, **asdict(divide(costs, work_s, mtbf_s))}
        rows.append({**told, "simulated": simulated.effective, "simulated_error": simulated.error})
    return find_optimum(costs, mtbf_s), search(costs, mtbf_s, gaps), rows


def _tell(
    inputs: Inputs,
    found: Forecast,
    told: Incident | None,
    played: tuple[Optimum, Search, list[dict[str, float]]] | None,
    *,
    as_json: bool,
) -> None:
    if as_json:
        optimum, best, rows = played if played is not None else (None, None, [])
        answer: dict[str, Any] = {
            "costs": asdict(inputs.costs),
            "background": inputs.costs.is_background,
            "interval_includes_save": inputs.includes_save,
            "interval_from": inputs.origin,
            "interval_s": found.period_s if inputs.includes_save else found.work_s,
            "forecast": asdict(found),
            "incident": asdict(told) if told is not None else None,
            "optimum": asdict(optimum) if optimum is not None else None,
            "simulated_optimum": asdict(best) if best is not None else None,
            "intervals": rows,
            "measured": asdict(inputs.measured) if inputs.measured is not None else None,
        }
        print_json(answer)
        return
    _print_assumptions(inputs, found)
    _print_forecast(found, told)
    if played is None:
        print_line("")
        print_line("without a rate of failures (--mtbf) there is no best interval")
        return
    optimum, best, rows = played
    _print_optimum(inputs, optimum, best)
    _print_rows(inputs, rows)


def _print_assumptions(inputs: Inputs, found: Forecast) -> None:
    costs = inputs.costs
    how = f"training stands still for {duration_text(costs.blocked_s)} of it" if costs.is_background else "synchronous"
    word = "includes" if inputs.includes_save else "excludes"
    other = f"{duration_text(found.work_s)} of work, a save every {duration_text(found.period_s)}"
    shown = duration_text(_shown_s(inputs, found.work_s))
    facts = {
        "a save": f"{duration_text(costs.save_s)}, {how}",
        "a restore": duration_text(costs.restore_s),
        "failures": "unknown"
        if costs.mtbf_s is None
        else f"one every {duration_text(costs.mtbf_s)} on average, independent of each other",
        "interval": f"{shown} ({inputs.origin}), which {word} the time of the save: {other}",
    }
    if inputs.measured is not None:
        facts["measured"] = _measured_text(inputs)
    print_facts(facts, title="Assumptions")


def _measured_text(inputs: Inputs) -> str:
    measured = inputs.measured
    if measured is None:
        return ""
    text = f"medians of {counted(measured.saves, 'checkpoint')}; {counted(measured.starts, 'start')}, "
    text += f"of which {measured.deaths} ended without a word, as by a kill (an error raised is none)"
    if measured.synchronous is None and measured.background is None:
        text += (
            "; the journals do not tell what saves took, so that the look at the state and the publishing are left out"
        )
    if measured.period_s is not None and measured.period_s < _SHORTEST_PERIOD_S:
        text += f"; saves {duration_text(measured.period_s)} apart are too close to judge an interval by"
    if inputs.scale > _MOST_SCALE:
        text += f"; their {measured.size_bytes / 1e6:.3g} MB say little of a size {inputs.scale:.3g} times as large"
    if measured.lost_updates is not None:
        text += f"; the last one lost {counted(measured.lost_updates, 'update')}"
        if measured.update_s is not None:
            text += f", about {duration_text(measured.lost_updates * measured.update_s)}"
    return text


def _print_forecast(found: Forecast, told: Incident | None) -> None:
    lost = duration_text(found.half_interval_s) + " (half the interval)"
    if found.lost_s is not None:
        lost = f"{duration_text(found.lost_s)}; by the rule of half the interval {duration_text(found.half_interval_s)}"
    per_save = f", 1 in {1 / found.overhead:.3g} of the time" if found.overhead else ""
    facts = {
        "overhead of saving": f"{found.overhead:.2%}{per_save}",
        "lost by a failure on average": lost,
        "delay until training goes on": duration_text(found.delay_s),
    }
    if found.shares is not None:
        facts["effective training time"] = (
            f"{found.shares.effective:.1%} (saving {found.shares.saving:.1%}, lost {found.shares.lost:.1%}, "
            f"restoring {found.shares.restoring:.1%})"
        )
    print_facts(facts, title="Cost")
    if told is not None:
        parts = {
            "lost": duration_text(told.lost_s),
            "delay": duration_text(told.delay_s),
            "behind in all": duration_text(told.behind_s),
        }
        print_facts(parts, title="This incident")


def _print_optimum(inputs: Inputs, optimum: Optimum, best: Search) -> None:
    found, shortest, longest = (
        duration_text(_shown_s(inputs, work_s)) for work_s in (best.best_s, best.shortest_s, best.longest_s)
    )
    facts = {
        "exact for a constant rate": duration_text(_shown_s(inputs, optimum.exact_s)),
        "Young": duration_text(_shown_s(inputs, optimum.young_s)),
        "Daly": duration_text(_shown_s(inputs, optimum.daly_s)),
        "simulated": f"{found}; as good within {best.within:.1%} of all time: {shortest} to {longest}",
    }
    print_facts(facts, title="Best interval")
    for doubt in optimum.doubts:
        print_line(f"  {doubt}")


def _print_rows(inputs: Inputs, rows: list[dict[str, float]]) -> None:
    print_line("")
    cells = [
        [
            duration_text(_shown_s(inputs, row["work_s"])),
            *(f"{row[name]:.1%}" for name in ("effective", "saving", "lost", "restoring")),
            f"{row['simulated']:.1%} ± {row['simulated_error']:.1%}",
        ]
        for row in rows
    ]
    columns = ["interval", "effective", "saving", "lost", "restoring", "effective, simulated"]
    print_table(columns, cells, numeric=columns)


def _shown_s(inputs: Inputs, work_s: float) -> float:
    """Return an interval as it was asked for: with the time of the save, or without."""
    return work_s + inputs.costs.blocked_s if inputs.includes_save else work_s
