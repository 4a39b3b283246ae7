"""``safepoint verify``: read every byte of a checkpoint, and compare it with its digest."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Annotated, Any

import typer

from safepoint.ambient import SystemAmbient
from safepoint.catalog import Generation, GenerationState, examine_all
from safepoint.cli.display import JsonOption, counted, print_json, print_line, reading_bar, size_text, warn
from safepoint.cli.repair import print_repair_plan, record_text
from safepoint.cli.source import Source, choose, open_source
from safepoint.errors import NotFoundError, RequestError, StorageError
from safepoint.format.asked import fits
from safepoint.restoring.records import DamagedRecord, check_records
from safepoint.restoring.repair import RepairPlan, plan_repair
from safepoint.restoring.verify import Verification, note_verified, verify_generation

_VERIFIABLE = (GenerationState.COMMITTED, GenerationState.SUPERSEDED, GenerationState.DAMAGED)
_MOST_FINDINGS_TOLD = 50


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command("verify")(_verify)


def _verify(
    source: Annotated[str, typer.Argument(metavar="RUN[@STEP]")],
    verifies_all: Annotated[
        bool, typer.Option("--all", help="Verify every checkpoint and every record of the run.")
    ] = False,
    is_noted: Annotated[
        bool, typer.Option("--note/--no-note", help="Note beside the checkpoint that every byte was read back.")
    ] = True,
    plans_repair: Annotated[
        bool, typer.Option("--repair-plan", help="Of all checkpoints, tell what is lost, and what can be chosen.")
    ] = False,
    as_json: JsonOption = False,
) -> None:
    """Read and check every byte of the newest checkpoint, of one, or of all.

    Ends with 1 when something does not hold, and with 3 when --repair-plan finds nothing to resume from.
    """
    opened = open_source(source)
    if plans_repair and opened.asked is not None:
        raise RequestError("a repair plan is one of a whole run", where=source, expected=opened.url)
    is_whole_run = opened.asked is None and (verifies_all or plans_repair)
    # Before notes are written: what cannot be read of them is told, and then replaced.
    records = check_records(opened.storage, opened.lineage) if is_whole_run else []
    reports = []
    for generation in _chosen(opened, verifies_all or plans_repair):
        with reading_bar(f"step {generation.name.step}", is_shown=not as_json and sys.stderr.isatty()) as on_progress:
            report = verify_generation(opened.storage, generation, on_progress=on_progress)
        is_verified = is_noted and _note(opened, report)
        reports.append((generation, report, is_verified))
        if not as_json:
            _print_report(generation, report)
    holds = all(report.holds for _, report, _ in reports) and all(entry.is_torn for entry in records)
    plan = _plan(opened, {report.generation: report for _, report, _ in reports}, records) if plans_repair else None
    if as_json:
        answer: dict[str, Any] = {"holds": holds, "checkpoints": [_as_json(*entry) for entry in reports]}
        if is_whole_run:
            answer["records"] = [asdict(entry) for entry in records]
        print_json(answer if plan is None else answer | {"repair": asdict(plan)})
    elif plan is not None:
        print_repair_plan(plan)
    else:
        for entry in records:
            print_line(record_text(entry))
    if plan is not None and opened.damage is not None:
        warn(f"which checkpoints are live cannot be told: {opened.damage}")
    if plan is not None and plan.resumes_at is None:
        raise typer.Exit(NotFoundError.exit_code)
    if not holds:
        raise typer.Exit(1)


def _chosen(source: Source, verifies_all: bool) -> list[Generation]:
    """Return what is verified: without a step, the newest of the live lineage that is committed or damaged."""
    if source.asked is not None and not verifies_all:
        return [choose(source)]
    found = [entry for entry in examine_all(source.storage, source.lineage) if entry.state in _VERIFIABLE]
    if source.asked is not None:
        found = [entry for entry in found if fits(entry.name, source.asked)]
    if not verifies_all:
        source.require_lineage()
        found = [entry for entry in found if source.lineage.is_live(entry.name)][:1]
    if not found:
        raise NotFoundError("the run has no checkpoint to verify", where=source.url)
    return found


def _plan(source: Source, found: Mapping[str, Verification], records: Sequence[DamagedRecord]) -> RepairPlan:
    states = (*_VERIFIABLE, GenerationState.DELETED)
    generations = [entry for entry in examine_all(source.storage, source.lineage) if entry.state in states]
    live = frozenset(entry.text for entry in generations if source.lineage.is_live(entry.name))
    return plan_repair(generations, found, live, records)


def _note(source: Source, report: Verification) -> bool:
    try:
        return note_verified(source.storage, report, run=source.lineage.run or "", ambient=SystemAmbient())
    except StorageError as exc:
        warn(f"the checkpoint holds, but this could not be noted: {exc}")
        return False


def _print_report(generation: Generation, report: Verification) -> None:
    verdict = "holds" if report.holds else "does not hold"
    read = f"{size_text(report.bytes_read)} in {counted(report.objects, 'object')} read"
    print_line(f"step {generation.name.step} {verdict}: {read} [{generation.text}, {generation.state.value}]")
    for finding in report.findings[:_MOST_FINDINGS_TOLD]:
        print_line(f"  {finding}")
    left = len(report.findings) - _MOST_FINDINGS_TOLD
    if left > 0:
        print_line(f"  and {left} more; --json tells all")


def _as_json(generation: Generation, report: Verification, is_verified: bool) -> dict[str, Any]:
    return {
        "generation": generation.text,
        "step": generation.name.step,
        "state": generation.state.value,
        "holds": report.holds,
        "noted": is_verified,
        "bytes_read": report.bytes_read,
        "objects": report.objects,
        "findings": [
            {
                "file": finding.file,
                "what": finding.what,
                "tensor": finding.tensor,
                "rows": finding.rows,
                "expected": finding.expected,
                "found": finding.found,
            }
            for finding in report.findings
        ],
    }
