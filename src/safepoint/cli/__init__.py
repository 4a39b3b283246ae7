"""The command line: one file per command.

A command's file has one public function, ``register(app)``, which adds the command to the application. Importing the
file is cheap: torch, numpy and rich are imported when they are used. A command prints its answer to standard output,
ends with `typer.Exit(code)` when the answer is not "holds", and lets errors of safepoint pass: `main` tells them.
"""

from safepoint.cli.entry import main

__all__ = ["main"]
