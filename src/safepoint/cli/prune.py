"""``safepoint prune``: retention by hand, by the same rules and with all reasons."""

from __future__ import annotations

from dataclasses import asdict
from typing import Annotated, Literal

import typer

from safepoint.ambient import SystemAmbient
from safepoint.catalog import examine_all
from safepoint.cli.display import JsonOption, counted, print_json, print_line, print_table, size_text, warn
from safepoint.cli.source import Source, open_run
from safepoint.errors import FencedError, NotFoundError, RequestError
from safepoint.joining.holder import find_holder
from safepoint.retention.explain import explain_retention
from safepoint.retention.policy import Best, Decision, Keep, keep
from safepoint.retention.retain import RetentionReport, plan_retention, retain


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command("prune")(_prune)


def _prune(
    run: Annotated[str, typer.Argument(metavar="RUN")],
    keep_last: Annotated[int, typer.Option("--keep-last", help="How many of the newest checkpoints stay.")],
    every: Annotated[int | None, typer.Option("--every", help="Keep one for each multiple of so many steps.")] = None,
    best: Annotated[str | None, typer.Option("--best", help="Keep the best by a metric, as in loss:min.")] = None,
    within: Annotated[
        str | None, typer.Option("--within", help="Keep what was saved within this time before the newest, as in 36h.")
    ] = None,
    is_dry: Annotated[bool, typer.Option("--dry-run", help="Only tell what would be decided, and why.")] = False,
    as_json: JsonOption = False,
) -> None:
    """Mark checkpoints for deletion, and delete the data of those marked earlier.

    What is marked can no longer be resumed from; its data go at the next save, or when this command is called again. At
    least two checkpoints that share nothing stay. Refuses while a job holds the run, and where no checkpoint has the
    metric of --best.
    """
    policy = keep(keep_last, best=_best(best), every=every, within=within)
    source = open_run(run)
    source.require_lineage()
    if policy.best is not None:
        _check_best(source, policy)
    else:
        _warn_of_metrics(source)
    if is_dry:
        _explain(source, policy, as_json=as_json)
        return
    report = _retain(source, policy)
    if as_json:
        print_json(asdict(report))
    else:
        _print_report(report)
    for warning in report.warnings:
        warn(warning)
    if report.stopped:
        warn(f"nothing was marked: {report.stopped}")
        raise typer.Exit(1)
    if report.warnings:
        raise typer.Exit(5)


def _check_best(source: Source, policy: Keep) -> None:
    """Raise `RequestError` where no checkpoint is the best: the one that is meant would go."""
    unmet = plan_retention(source.storage, source.lineage, policy).unmet
    if unmet:
        raise RequestError("a rule keeps nothing", where="--best", found=unmet, remedy="Nothing was marked.")


def _warn_of_metrics(source: Source) -> None:
    """Say that a job's own rule of the best one is not known here, where checkpoints bear metrics."""
    found = examine_all(source.storage, source.lineage)
    names = {name for entry in found if entry.manifest is not None for name in entry.manifest.metrics}
    if names:
        warn(
            "a job's own keep= is not recorded, and only what is typed here holds: nothing is kept for its metric. "
            f"The checkpoints have {', '.join(sorted(names))}: --best keeps the best one"
        )


def _explain(source: Source, policy: Keep, *, as_json: bool) -> None:
    lineage = source.lineage
    incarnation = lineage.chain[-1].incarnation if lineage.chain else 0
    explained = explain_retention(source.storage, lineage, policy, incarnation=incarnation)
    if as_json:
        print_json(asdict(explained))
    else:
        _print_decisions(explained.decisions)
        if explained.swept.freed_bytes:
            print_line(f"{size_text(explained.swept.freed_bytes)} of what was marked earlier would go at once")
    if explained.swept.stopped:
        warn(f"nothing would be marked or deleted: {explained.swept.stopped}")
        raise typer.Exit(1)


def _retain(source: Source, policy: Keep) -> RetentionReport:
    lineage = source.lineage
    if lineage.run is None or not lineage.chain:
        raise NotFoundError("no start of the run has recorded anything, so nothing can be deleted", where=source.url)
    ambient = SystemAmbient()
    holder = find_holder(source.storage, lineage, ambient)
    if holder is not None:
        raise FencedError(
            "a job holds the run, and does its own retention",
            where=source.url,
            found=str(holder),
            remedy="Stop it first, or give its manager another keep=.",
        )
    incarnation = lineage.chain[-1].incarnation
    return retain(source.storage, run=lineage.run, incarnation=incarnation, policy=policy, ambient=ambient)


def _best(text: str | None) -> Best | None:
    if text is None:
        return None
    metric, _, mode = text.rpartition(":")
    modes: dict[str, Literal["min", "max"]] = {"min": "min", "max": "max"}
    if not metric or mode not in modes:
        raise RequestError("--best is not usable", expected="METRIC:min or METRIC:max", found=text)
    return metric, modes[mode]


def _print_decisions(decisions: tuple[Decision, ...]) -> None:
    if not decisions:
        print_line("nothing to decide on")
        return
    rows = [
        [str(entry.step), "keep" if entry.is_kept else "delete", "; ".join(entry.reasons), entry.generation]
        for entry in decisions
    ]
    print_table(["step", "decision", "why", "generation"], rows, numeric=["step"])


def _print_report(report: RetentionReport) -> None:
    _print_decisions(report.decisions)
    if report.swept.deleted:
        size = size_text(report.swept.freed_bytes)
        print_line(f"deleted what was marked earlier: {counted(len(report.swept.deleted), 'generation')}, {size}")
    if report.marked:
        marked = counted(len(report.marked), "checkpoint")
        print_line(f"marked {marked}; the data go at the next save, or when this is called again")
