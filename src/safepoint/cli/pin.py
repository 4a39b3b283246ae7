"""``safepoint pin``: a checkpoint stays whatever retention decides, with the reason."""

from __future__ import annotations

from typing import Annotated

import typer

from safepoint.cli.display import JsonOption, print_json, print_line
from safepoint.cli.source import open_run
from safepoint.format.asked import as_argument, parse_asked, step_of
from safepoint.retention.pins import pin


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command("pin")(_pin)


def _pin(
    run: Annotated[str, typer.Argument(metavar="RUN")],
    step: Annotated[str, typer.Argument(metavar="STEP", help="The step, or a generation's name.")],
    reason: Annotated[str, typer.Option("--reason", help="Why it stays: one line.")],
    as_json: JsonOption = False,
) -> None:
    """Keep a checkpoint until it is unpinned, whatever retention decides; also while a job holds the run.

    The pin lies in the checkpoint's own folder and moves with it. What is marked for deletion already is refused.
    """
    source = open_run(run)
    asked = parse_asked(step)
    generation = pin(source.url, as_argument(asked), reason=reason, storage=source.storage)
    if as_json:
        print_json({"generation": generation, "step": step_of(asked), "reason": reason})
        return
    print_line(f"pinned step {step_of(asked)} [{generation}]: {reason}")
