"""The application, and how its errors end: one paragraph on standard error, and the exit code of the error's class.

Exit codes: 0 holds; 1 does not hold; 2 the call is wrong; 3 nothing found; 4 refused by contract; 5 storage, or an
answer that cannot be written; 6 fenced; 7 aborted or unknown outcome; 8 torn; 9 format too new; 70 our bug; 130
interrupted; 141 nobody reads the answer any more.
"""

from __future__ import annotations

import os
import sys
import traceback
from collections.abc import Sequence
from typing import Annotated

import typer

from safepoint import __version__
from safepoint.errors import InternalError, SafepointError, StorageError

COMMANDS = ("ls", "show", "verify", "diff", "prune", "pin", "unpin", "plan", "drill", "demo")

_TRACEBACK = "--traceback"
# What a shell tells of a tool that a broken pipe has ended: 128 and the number of the signal.
_BROKEN_PIPE = 141


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
        if sys.stdout is None:  # so Python starts where it is closed
            raise StorageError("the answer cannot be written", where="standard output", found="it is closed")
        code = _run(own + words[end:])
        # What is still in the buffer belongs to the answer: when Python ends, it is too late to tell of a failure.
        sys.stdout.flush()
        return code
    except BrokenPipeError:
        _forget_output()
        return _BROKEN_PIPE
    except SafepointError as exc:
        _tell(str(exc), shows_traceback)
        return exc.exit_code
    except OSError as exc:
        # Files are opened by name, so an error without one comes from the output, which was open before.
        if exc.filename is None:
            _forget_output()
        _tell(str(_translated(exc)), shows_traceback)
        return StorageError.exit_code
    # The edge of the process: without it Python would end with 1, which here means that a check does not hold.
    except Exception as exc:  # noqa: BLE001
        hint = "" if shows_traceback else f" Run it again with {_TRACEBACK} and report what it shows."
        _tell(f"safepoint failed: {type(exc).__name__}: {exc}.{hint}", shows_traceback)
        return InternalError.exit_code


def make_app(commands: Sequence[str] = COMMANDS) -> typer.Typer:
    """Return the application with all its commands, or with some."""
    app = typer.Typer(
        add_completion=False,
        no_args_is_help=True,
        pretty_exceptions_enable=False,
        rich_markup_mode="rich" if sys.stdout.isatty() else None,
        help="Look at training runs, check them, and rehearse their failure.",
    )
    app.callback()(_options)
    for command in commands:
        _register(command, app)
    return app


def _register(command: str, app: typer.Typer) -> None:
    """Import the module of one command and add it."""
    if command == "ls":
        from safepoint.cli.ls import register
    elif command == "show":
        from safepoint.cli.show import register
    elif command == "verify":
        from safepoint.cli.verify import register
    elif command == "diff":
        from safepoint.cli.diff import register
    elif command == "prune":
        from safepoint.cli.prune import register
    elif command == "pin":
        from safepoint.cli.pin import register
    elif command == "unpin":
        from safepoint.cli.unpin import register
    elif command == "plan":
        from safepoint.cli.plan import register
    elif command == "drill":
        from safepoint.cli.drill import register
    else:
        from safepoint.cli.demo import register
    register(app)


def _run(words: list[str]) -> int:
    # The other commands' modules would take longer to import than a reading command takes to answer.
    app = make_app(words[:1]) if words[:1] and words[0] in COMMANDS else make_app()
    try:
        typer.main.get_command(app).main(args=words, prog_name="safepoint")
    except SystemExit as exc:
        # typer makes an exit code of a broken pipe that here means that a check does not hold.
        if isinstance(exc.__context__, BrokenPipeError):
            raise exc.__context__ from None
        return exc.code if isinstance(exc.code, int) else 0 if exc.code is None else 1
    return 0


def _translated(exc: OSError) -> StorageError:
    if exc.filename is None:
        return StorageError("the answer cannot be written", where="standard output", found=exc.strerror or str(exc))
    return StorageError("a file cannot be used", where=str(exc.filename), found=exc.strerror)


def _forget_output() -> None:
    """Let what is still in the buffer vanish, or Python would fail at its end to write it once more."""
    if sys.__stdout__ is not None:
        sink = os.open(os.devnull, os.O_WRONLY)
        os.dup2(sink, sys.__stdout__.fileno())
        os.close(sink)


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
