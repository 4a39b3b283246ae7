"""``safepoint pin``: a checkpoint stays whatever retention decides, with the reason."""

from __future__ import annotations

from typing import Annotated

import typer

from safepoint.cli.display import JsonOption, print_json, print_line
from safepoint.cli.source import open_run
from safepoint.retention.pins import pin


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command("pin")(_pin)


def _pin(
    run: Annotated[str, typer.Argument(metavar="RUN")],
    step: Annotated[int, typer.Argument(metavar="STEP", min=0)],
    reason: Annotated[str, typer.Option("--reason", help="Why it stays: one line.")],
    as_json: JsonOption = False,
) -> None:
    """Keep a checkpoint until it is unpinned, whatever retention decides; also while a job holds the run.

    The pin lies in the checkpoint's own folder and moves with it. What is marked for deletion already is refused.
    """
    source = open_run(run)
    generation = pin(source.url, step, reason=reason, storage=source.storage)
    if as_json:
        print_json({"generation": generation, "step": step, "reason": reason})
        return
    print_line(f"pinned step {step} [{generation}]: {reason}")
