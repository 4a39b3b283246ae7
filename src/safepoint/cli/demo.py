"""``safepoint demo``: the whole story on a real training run, told act by act."""

from __future__ import annotations

import importlib.util
import os
import sys
import tempfile
import textwrap
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from safepoint.cli.display import JsonOption, print_json, print_line, print_table

if TYPE_CHECKING:
    from safepoint.drill.demo import Act

_WIDTH = 110


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command("demo")(_demo)


def _demo(as_json: JsonOption = False) -> None:
    """Train, kill, resume, compare, damage, refuse, fall back: on this machine's processor.

    Needs scikit-learn, and about a minute on two cores. Ends with 1 unless every act came out as announced.
    """
    from safepoint.ambient import SystemAmbient
    from safepoint.drill.demo import Demonstration, perform, training_script
    from safepoint.errors import RequestError

    if importlib.util.find_spec("sklearn") is None:
        raise RequestError(
            "the demo trains on the digits that come with scikit-learn, which is not installed",
            remedy="pip install 'safepoint[examples]'",
        )
    ambient = SystemAmbient()
    began = ambient.monotonic()
    if not as_json:
        _print_introduction()
    acts: list[Act] = []
    with tempfile.TemporaryDirectory(prefix="safepoint-demo-") as folder:
        demonstration = Demonstration(Path(folder), sys.executable, training_script(), dict(os.environ), ambient)
        for act in perform(demonstration):
            acts.append(act)
            if not as_json:
                _print_act(len(acts), act)
    seconds = ambient.monotonic() - began
    holds = all(act.holds for act in acts)
    if as_json:
        print_json({"holds": holds, "seconds": round(seconds, 1), "acts": [asdict(act) for act in acts]})
    else:
        _print_closing(acts, seconds, holds)
    if not holds:
        raise typer.Exit(1)


def _print_introduction() -> None:
    print_line("safepoint saves training runs so that they can resume, and proves that they do. Here is the proof:")
    print_line("a real training run is killed and damaged, and each time it must become the run that it was.")


def _print_act(number: int, act: Act) -> None:
    print()
    _print_wrapped(f"{number}. ", act.title)
    _print_wrapped("   expected: ", act.expected)
    _print_wrapped("   seen:     ", act.seen)
    for message in act.messages:
        _print_wrapped("   | ", message)
    print_line("   holds" if act.holds else "   DOES NOT HOLD")
    sys.stdout.flush()


def _print_wrapped(head: str, text: str) -> None:
    indent = " " * len(head) if not head.endswith("| ") else head
    wrapped = textwrap.wrap(text, _WIDTH, initial_indent=head, subsequent_indent=indent, break_on_hyphens=False)
    for line in wrapped or [head]:
        print_line(line)


def _print_closing(acts: list[Act], seconds: float, holds: bool) -> None:
    print()
    rows = [[str(number), act.title, "holds" if act.holds else "does not hold"] for number, act in enumerate(acts, 1)]
    print_table(["act", "what was done", "outcome"], rows, numeric=["act"])
    print()
    told = "everything held" if holds else "not everything held"
    print_line(f"{told}, in {seconds:.0f} s. Try it on your own command: safepoint drill -- python train.py")
