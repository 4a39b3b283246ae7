"""``safepoint unpin``: retention decides on a pinned checkpoint again."""

from __future__ import annotations

from typing import Annotated

import typer

from safepoint.cli.display import JsonOption, print_json, print_line
from safepoint.cli.source import open_run
from safepoint.format.asked import as_argument, parse_asked, step_of
from safepoint.retention.pins import unpin


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command("unpin")(_unpin)


def _unpin(
    run: Annotated[str, typer.Argument(metavar="RUN")],
    step: Annotated[str, typer.Argument(metavar="STEP", help="The step, or a generation's name.")],
    as_json: JsonOption = False,
) -> None:
    """Let retention decide on a pinned checkpoint again; nothing is deleted by this."""
    source = open_run(run)
    asked = parse_asked(step)
    generations = unpin(source.url, as_argument(asked), storage=source.storage)
    if as_json:
        print_json({"generations": generations, "step": step_of(asked)})
        return
    for generation in generations:
        print_line(f"unpinned step {step_of(asked)} [{generation}]")
