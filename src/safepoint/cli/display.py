"""How answers look: tables on a terminal, plain columns elsewhere, JSON where it is asked for.

rich is imported only when standard output is a terminal: elsewhere nobody sees it, and it would double the time to
start.
"""

from __future__ import annotations

import contextlib
import datetime
import json
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Annotated, Any

import typer

JsonOption = Annotated[bool, typer.Option("--json", help="Print JSON.")]

_STYLES = {
    "committed": "green",
    "yes": "green",
    "holds": "green",
    "keep": "green",
    "damaged": "bold red",
    "does not hold": "bold red",
    "delete": "yellow",
    "pending": "yellow",
    "abandoned": "yellow",
    "superseded": "dim",
    "deleted": "dim",
}
# Left out where a terminal is too narrow for it: wrapped, it would break every row, and --json tells it.
_EXPENDABLE = "generation"
_UNITS = ((10**12, "TB"), (10**9, "GB"), (10**6, "MB"), (10**3, "kB"))
_SPANS = ((86400, "d"), (3600, "h"), (60, "min"))


def print_json(value: Any) -> None:
    """Print a value as JSON, one that no text of a run can break."""
    print(json.dumps(value, indent=2, ensure_ascii=True, allow_nan=False))


def print_table(columns: Sequence[str], rows: Sequence[Sequence[str]], *, numeric: Sequence[str] = ()) -> None:
    """Print a table: fitted to the terminal's width there, in full elsewhere.

    Args:
        columns: Their headings.
        rows: The cells.
        numeric: Headings of columns that are aligned to the right.
    """
    cells = [[_printable(cell) for cell in row] for row in rows]
    if sys.stdout.isatty():
        _print_rich_table(columns, cells, numeric)
        return
    widths = [max(map(len, column)) for column in zip(columns, *cells, strict=True)]
    for row in [list(columns), *cells]:
        padded = (
            cell.rjust(width) if heading in numeric else cell.ljust(width)
            for heading, cell, width in zip(columns, row, widths, strict=True)
        )
        print("  ".join(padded).rstrip())


def print_facts(facts: Mapping[str, str], *, title: str = "") -> None:
    """Print named facts below one another, under a title."""
    if title:
        print_title(title)
    width = max(map(len, facts), default=0)
    for name, text in facts.items():
        print(f"{'  ' if title else ''}{_printable(name).ljust(width)}  {_printable(text)}")


def print_title(text: str) -> None:
    """Print a heading."""
    print(f"\n{text}")


def print_line(text: str) -> None:
    """Print a line whose text may come from a run."""
    print(_printable(text))


def warn(text: str) -> None:
    """Print a warning to standard error."""
    print(f"safepoint: {_printable(text)}", file=sys.stderr)


def counted(count: int, noun: str) -> str:
    """Return a count with its noun, in the plural unless it is one."""
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"


def size_text(size_bytes: int) -> str:
    """Return a size for people; units are powers of ten."""
    for unit, name in _UNITS:
        if size_bytes >= unit:
            return f"{size_bytes / unit:.1f} {name}"
    return f"{size_bytes} B"


def age_s(created: str, now_s: float) -> float | None:
    """Return the age of a recorded time, or None when the text is no time."""
    try:
        moment = datetime.datetime.fromisoformat(created.replace("Z", "+00:00"))
        return now_s - moment.timestamp()
    except (ValueError, OverflowError):
        return None


def age_text(seconds: float | None) -> str:
    """Return an age for people: one number, one unit."""
    if seconds is None:
        return "unknown"
    for span, name in _SPANS:
        if seconds >= span:
            return f"{int(seconds // span)} {name}"
    return f"{int(max(seconds, 0))} s"


@contextlib.contextmanager
def reading_bar(label: str, *, is_shown: bool) -> Iterator[Callable[[int, int], None] | None]:
    """Show how much was read, on standard error; yield what takes (bytes read, bytes in all), None where not shown."""
    if not is_shown:
        yield None
        return
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TransferSpeedColumn

    columns = (TextColumn(label), BarColumn(), DownloadColumn(), TransferSpeedColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("", total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total)


def _printable(text: str) -> str:
    # What a run holds is not to be trusted with a terminal: a name could move the cursor or hide what follows.
    return "".join(letter if letter.isprintable() else f"\\x{ord(letter):02x}" for letter in text)


def _print_rich_table(columns: Sequence[str], rows: Sequence[Sequence[str]], numeric: Sequence[str]) -> None:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    console = Console()
    widths = [max(map(len, column)) for column in zip(columns, *rows, strict=True)]
    if columns[-1] == _EXPENDABLE and sum(widths) + 2 * len(widths) > console.width:
        columns, rows = columns[:-1], [row[:-1] for row in rows]
    table = Table(box=None, pad_edge=False, header_style="bold")
    for heading in columns:
        table.add_column(heading, justify="right" if heading in numeric else "left", overflow="fold")
    for row in rows:
        table.add_row(*(Text(cell, style=_STYLES.get(cell, "")) for cell in row))
    console.print(table)
