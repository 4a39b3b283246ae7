"""The application, and how its errors end: one paragraph on standard error, and the exit code of the error's class.

Exit codes: 0 holds; 1 does not hold; 2 the call is wrong; 3 nothing found; 4 refused by contract; 5 storage; 6 fenced;
7 aborted or unknown outcome; 8 torn; 9 format too new; 70 our bug; 130 interrupted.
"""

from __future__ import annotations

import sys
import traceback
from collections.abc import Sequence
from typing import Annotated

import typer

import safepoint.cli.demo as demo
import safepoint.cli.diff as diff
import safepoint.cli.drill as drill
import safepoint.cli.ls as ls
import safepoint.cli.prune as prune
import safepoint.cli.show as show
import safepoint.cli.verify as verify
from safepoint import __version__
from safepoint.errors import InternalError, SafepointError

_TRACEBACK = "--traceback"


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code.

    Args:
        arguments: The words of the command line, without the program's name; those of this process by default.
    """
    words = list(sys.argv[1:] if arguments is None else arguments)
    # Everything behind "--" belongs to the user's own command.
    end = words.index("--") if "--" in words else len(words)
    shows_traceback = _TRACEBACK in words[:end]
    own = [word for word in words[:end] if word != _TRACEBACK]
    try:
        typer.main.get_command(make_app()).main(args=own + words[end:], prog_name="safepoint")
    except SystemExit as exc:
        return exc.code if isinstance(exc.code, int) else 0 if exc.code is None else 1
    except SafepointError as exc:
        _tell(str(exc), shows_traceback)
        return exc.exit_code
    # The edge of the process: without it Python would end with 1, which here means that a check does not hold.
    except Exception as exc:  # noqa: BLE001
        hint = "" if shows_traceback else f" Run it again with {_TRACEBACK} and report what it shows."
        _tell(f"safepoint failed: {type(exc).__name__}: {exc}.{hint}", shows_traceback)
        return InternalError.exit_code
    return 0


def make_app() -> typer.Typer:
    """Return the application with all its commands."""
    app = typer.Typer(
        add_completion=False,
        no_args_is_help=True,
        pretty_exceptions_enable=False,
        rich_markup_mode="rich" if sys.stdout.isatty() else None,
        help="Look at training runs, check them, and rehearse their failure.",
    )
    app.callback()(_options)
    for command in (ls, show, verify, diff, prune, drill, demo):
        command.register(app)
    return app


def _options(
    version: Annotated[bool, typer.Option("--version", is_eager=True, callback=_print_version)] = False,
    with_traceback: Annotated[
        bool, typer.Option(_TRACEBACK, help="Show where an error came from; may stand anywhere.")
    ] = False,
) -> None:
    """Look at training runs, check them, and rehearse their failure."""


def _print_version(is_asked: bool) -> None:
    if is_asked:
        print(f"safepoint {__version__}")
        raise typer.Exit


def _tell(text: str, shows_traceback: bool) -> None:
    if shows_traceback:
        traceback.print_exc()
    print(f"safepoint: {text}", file=sys.stderr)
