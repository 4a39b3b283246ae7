"""``safepoint drill``: kill the user's own command, resume it, and compare it with itself uninterrupted."""

from __future__ import annotations

import contextlib
import os
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from safepoint.cli.display import JsonOption, print_json, print_line, print_table

if TYPE_CHECKING:
    from safepoint.drill.trace import Rehearsal, Start
    from safepoint.drill.verdict import Judgement

_DEFAULT_KILLS = 2
_LINES_OF_LOG = 15


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command("drill")(_drill)


def _drill(
    command: Annotated[list[str], typer.Argument(metavar="-- COMMAND...", help="The training command itself.")],
    kill_at: Annotated[
        list[int] | None, typer.Option("--kill-at", help="Kill at this update; may be given several times.")
    ] = None,
    kill_phase: Annotated[
        str | None, typer.Option("--kill-phase", help="Kill where this phase of the next save begins, such as write.")
    ] = None,
    kills: Annotated[int | None, typer.Option("--kills", min=1, help="Kill at so many random instants.")] = None,
    seed: Annotated[int, typer.Option("--seed", help="Seed of the random instants.")] = 0,
    until: Annotated[int | None, typer.Option("--until", min=1, help="End each run at this update.")] = None,
    patience_s: Annotated[
        float, typer.Option("--patience", help="Seconds without a sign of life that count as hanging.")
    ] = 300.0,
    keep_folder: Annotated[
        Path | None, typer.Option("--keep-folder", help="Keep runs and logs in this new or empty folder.")
    ] = None,
    nproc: Annotated[
        int | None, typer.Option("--nproc", min=1, help="Start so many ranks of the command with torchrun.")
    ] = None,
    kill_rank: Annotated[str, typer.Option("--kill-rank", help="Which ranks are killed: one, leader, all.")] = "all",
    world_sizes: Annotated[
        str, typer.Option("--world-sizes", help="How many ranks each start has, such as 4,2,3; kills all but the last.")
    ] = "",
    tolerance: Annotated[
        float | None,
        typer.Option("--tolerance", help="Relative difference that metrics of another number of ranks may have."),
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Rehearse a failure: run the command uninterrupted, then kill and resume it, and compare the two.

    The command runs as it is, but its run is made in a folder of the drill. Ends with 1 unless the verdict is pass.
    """
    from safepoint.ambient import SystemAmbient
    from safepoint.drill.plan import Kill
    from safepoint.drill.play import Stage
    from safepoint.drill.scenario import rehearse
    from safepoint.drill.trace import TOLERANCE
    from safepoint.drill.verdict import judge_rehearsal
    from safepoint.errors import RequestError

    if kills is not None and (kill_at or kill_phase):
        raise RequestError("kills are either chosen or random", expected="--kill-at/--kill-phase, or --kills")
    chosen = tuple(Kill(update, kill_phase) for update in sorted(kill_at or ([0] if kill_phase else [])))
    sizes = _sizes(world_sizes, nproc, kill_rank)
    count = 0 if chosen else kills or (len(sizes) - 1 if sizes else _DEFAULT_KILLS)

    def tell(label: str, start: Start) -> None:
        if not as_json:
            print_line(f"{label}: {start.ending.value} {start.place} ({start.seconds:.1f} s)")

    with _folder(keep_folder) as folder:
        stage = Stage(tuple(command), folder, dict(os.environ), SystemAmbient(), until, patience_s, nproc or 0)
        if not as_json and not chosen:
            print_line(f"{count} random kills, seed {seed}")
        rehearsal = rehearse(stage, kills=chosen, count=count, seed=seed, sizes=sizes, kills_ranks=kill_rank, tell=tell)
        rehearsal = replace(rehearsal, tolerance=TOLERANCE if tolerance is None else tolerance)
        judgement = judge_rehearsal(rehearsal)
        _tell(rehearsal, judgement, as_json)
    if not judgement.holds:
        raise typer.Exit(1)


def _sizes(text: str, nproc: int | None, kill_rank: str) -> tuple[int, ...]:
    from safepoint.errors import RequestError

    if not text and nproc is None and kill_rank != "all":
        raise RequestError("there are no ranks to kill one of", expected="--nproc or --world-sizes", found=kill_rank)
    if text and nproc is not None:
        raise RequestError("the number of ranks is said twice", expected="--nproc or --world-sizes")
    parts = text.split(",") if text else []
    if not all(part.strip().isdigit() and int(part) > 0 for part in parts) or len(parts) == 1:
        raise RequestError("numbers of ranks cannot be read", expected="two or more, such as 4,2,3", found=repr(text))
    return tuple(int(part) for part in parts)


@contextlib.contextmanager
def _folder(kept: Path | None) -> Iterator[Path]:
    from safepoint.errors import RequestError

    if kept is None:
        with tempfile.TemporaryDirectory(prefix="safepoint-drill-") as place:
            yield Path(place)
        return
    kept.mkdir(parents=True, exist_ok=True)
    if any(kept.iterdir()):
        raise RequestError(
            "the drill's folder is not empty, so the command would resume what lies there",
            where=str(kept),
            remedy="Name a new folder.",
        )
    yield kept.resolve()


def _tell(rehearsal: Rehearsal, judgement: Judgement, as_json: bool) -> None:
    from safepoint.drill.process import last_lines
    from safepoint.drill.report import UNSEEN, as_plain, columns, compared, rows, warnings
    from safepoint.drill.verdict import MEANINGS

    if as_json:
        print_json(as_plain(rehearsal, judgement))
        return
    print()
    print_table(columns(rehearsal), rows(rehearsal))
    print()
    print_line(compared(judgement))
    print_line(UNSEEN)
    for warning in warnings(rehearsal, judgement):
        print_line(f"warning: {warning}")
    for finding in judgement.findings:
        print_line(f"- {finding}")
    print_line(f"verdict: {judgement.verdict.value} ({MEANINGS[judgement.verdict]})")
    if not judgement.holds:
        last = rehearsal.starts[-1]
        print("\nthe last lines that the last start printed:", file=sys.stderr)
        print(last_lines(Path(last.log), _LINES_OF_LOG), file=sys.stderr)
