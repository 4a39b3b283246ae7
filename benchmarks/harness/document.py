"""The document that each question prints, its targets, and the options that all questions share."""

from __future__ import annotations

import argparse
import json
import math
import re
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from harness.machine import describe
from harness.rounds import Series, rounded, spread

_UNITS = {"": 1, "k": 1 << 10, "m": 1 << 20, "g": 1 << 30}
RESULTS = Path(__file__).parents[1] / "results"


@dataclass(frozen=True, slots=True)
class Settings:
    """Hold the options of a question: size of the state, rounds that are kept, where files are written, its time.

    No further round is begun when `seconds` would be over before its end.
    """

    size_bytes: int
    rounds: int
    folder: Path
    seconds: float = math.inf


@dataclass(frozen=True, slots=True)
class Target:
    """Say what is aimed at, and what was measured, round by round; no value where it cannot be measured.

    Args:
        row: What the target is about.
        compared: What the values are: a ratio of what to what, or a quantity.
        bound: The aim.
        is_floor: Whether values are to be at least the bound, or at most.
        values: One for each round.
        unit: Of bound and values; empty for a ratio.
        note: What a reader has to know, such as why there is no value.
    """

    row: str
    compared: str
    bound: float
    is_floor: bool
    values: Sequence[float]
    unit: str = ""
    note: str = ""

    def document(self) -> dict[str, object]:
        """Return the target as it is printed; it is met if the median keeps to the bound."""
        aim = f"{'≥' if self.is_floor else '≤'} {self.bound:g}{' ' + self.unit if self.unit else ''}"
        shown = {"row": self.row, "compared": self.compared, "aim": aim, "unit": self.unit, "note": self.note}
        if not self.values:
            return {**shown, "median": None, "min": None, "max": None, "met": False}
        median = statistics.median(self.values)
        is_met = median >= self.bound if self.is_floor else median <= self.bound
        return {**shown, **spread(self.values, 4), "rounds": rounded(self.values, 4), "met": is_met}


@dataclass(frozen=True, slots=True)
class Answer:
    """Hold what a question found; `absent` says by name why something was not measured."""

    state: Mapping[str, object]
    series: Series
    targets: Sequence[Target] = ()
    absent: Mapping[str, str] = field(default_factory=dict)
    notes: Sequence[str] = ()
    further: Mapping[str, object] = field(default_factory=dict)


def options(description: str, *, size: str, rounds: int = 5) -> argparse.ArgumentParser:
    """Return a parser of the options that all questions share, with the defaults of one of them."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", default=size, help=f"bytes of the state, such as 64MiB; {size}")
    parser.add_argument("--rounds", type=int, default=rounds, help=f"rounds that are kept; {rounds}")
    parser.add_argument(
        "--folder", type=Path, default=RESULTS, help="where files are written; the disk that is measured"
    )
    parser.add_argument("--seconds", type=float, default=math.inf, help="begin no round that would end later; no limit")
    return parser


def settings(parsed: argparse.Namespace) -> Settings:
    """Return what was asked for."""
    return Settings(parse_size(parsed.size), parsed.rounds, parsed.folder, parsed.seconds)


def parse_size(text: str) -> int:
    """Return the bytes of a text such as ``64MiB``, ``1g`` or ``4096``."""
    found = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([kmg]?)(?:i?b)?", text.strip().lower())
    if found is None:
        raise argparse.ArgumentTypeError(f"not a size: {text}")
    return int(float(found[1]) * _UNITS[found[2]])


def show(description: str, asked: Settings, answer: Answer) -> None:
    """Print the document of one question."""
    made, notes = answer.series.rounds, list(answer.notes)
    if made < asked.rounds:
        notes.append(f"there was time for {made} of {asked.rounds} rounds")
    found = {
        "question": description.splitlines()[0],
        "state": {"size_bytes": asked.size_bytes, **answer.state},
        "rounds": made,
        "targets": [target.document() for target in answer.targets],
        "measures": answer.series.document(),
        **answer.further,
        "absent": dict(answer.absent),
        "notes": notes,
        "machine": describe(asked.folder),
    }
    print(json.dumps(found, indent=1, ensure_ascii=False))
