"""The report over the documents of all questions: a table of targets, tables of what was measured, and plots."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

Document = Mapping[str, Any]

# What a plot and a table show of a question: quantity, its unit on paper, and the factor to it.
SHOWN = {
    "memory_and_disk": ("seconds", "s", 1.0),
    "synchronous_save": ("seconds", "s", 1.0),
    "background_save": ("blocked", "ms", 1e3),
    "background_at_once": ("blocked", "ms", 1e3),
    "background_memory": ("extra_bytes", "MiB", 2**-20),
    "restore": ("cold", "s", 1.0),
    "restore_memory": ("extra_bytes", "MiB", 2**-20),
    "small_tensors": ("save", "s", 1.0),
    "partial_change": ("seconds", "s", 1.0),
    "small_state": ("seconds", "ms", 1e3),
    "growth": ("seconds_per_gb", "s/GB", 1.0),
    "ranks": ("seconds", "s", 1.0),
}
_OURS, _RAW, _OTHER = "#1b7f5c", "#9a9a9a", "#3b6ea8"


def summary(documents: Mapping[str, Document]) -> list[dict[str, Any]]:
    """Return every target with its question."""
    return [{"from": name, **target} for name, found in documents.items() for target in found.get("targets", [])]


def markdown(documents: Mapping[str, Document]) -> str:
    """Return the tables: the targets, and what each question measured."""
    lines = ["# Measured", "", *machine_lines(documents), "", "## Targets", "", *target_rows(summary(documents)), ""]
    for name, found in documents.items():
        lines += [f"## {found.get('question', name)}", "", f"`benchmarks/{name}.py`{state_text(found)}", ""]
        for quantity, by_name in found.get("measures", {}).items():
            lines += [*quantity_rows(name, quantity, by_name), ""]
        if "step_times" in found:
            lines += [*step_rows(found["step_times"]), ""]
        for absent, why in found.get("absent", {}).items():
            lines += [f"Not measured: {absent}: {why}.", ""]
        for note in found.get("notes", []):
            lines += [f"Note: {note}.", ""]
    return "\n".join(lines)


def machine_lines(documents: Mapping[str, Document]) -> list[str]:
    """Describe the machine once; all questions ran on it."""
    machine = next((found["machine"] for found in documents.values() if "processors" in found.get("machine", {})), {})
    flat = {**machine, **machine.get("versions", {})}
    return [f"- {name}: {value}" for name, value in flat.items() if not isinstance(value, Mapping)]


def target_rows(targets: Iterable[Mapping[str, Any]]) -> list[str]:
    """Return the table of targets."""
    rows = ["| what | aim | median | min | max | | compared |", "|---|---|---|---|---|---|---|"]
    for one in targets:
        values = [shown(one[part]) for part in ("median", "min", "max")]
        verdict = "met" if one["met"] else "missed"
        rows.append(
            f"| {one['row']} | {one['aim']} | {' | '.join(values)} | {verdict} | {one['note'] or one['compared']} |"
        )
    return rows


def quantity_rows(name: str, quantity: str, by_name: Mapping[str, Mapping[str, float]]) -> list[str]:
    """Return the table of one quantity of one question."""
    asked, unit, factor = SHOWN.get(name, (quantity, "", 1.0))
    title = f"{quantity} ({unit})" if quantity == asked and unit else quantity
    factor = factor if quantity == asked else 1.0
    rows = [f"| {title} | median | min | max |", "|---|---|---|---|"]
    for candidate, values in by_name.items():
        cells = [shown(values[part] * factor) for part in ("median", "min", "max")]
        rows.append(f"| {candidate} | {' | '.join(cells)} |")
    return rows


def step_rows(times: Mapping[str, Mapping[str, float]]) -> list[str]:
    """Return the table of step times, in milliseconds."""
    parts = ("p50", "p90", "p99", "max")
    rows = [f"| step time (ms) | {' | '.join(parts)} |", "|---|---|---|---|---|"]
    return rows + [
        f"| {name} | {' | '.join(shown(1e3 * found[part]) for part in parts)} |" for name, found in times.items()
    ]


def state_text(found: Document) -> str:
    """Say what state a question saved."""
    state = {**found.get("state", {})}
    return "".join(f", {name} {value}" for name, value in state.items() if isinstance(value, int | float))


def shown(value: float | None) -> str:
    """Return a number with three digits that matter; a dash for none."""
    if value is None:
        return "–"
    return f"{value:.3g}" if abs(value) < 1000 else f"{value:,.0f}"


def plots(documents: Mapping[str, Document], folder: Path) -> list[Path]:
    """Draw one SVG for each question: bars of medians, with lines from the least to the greatest round.

    Returns nothing where matplotlib is not installed.
    """
    try:
        import matplotlib
    except ImportError:
        return []
    matplotlib.use("svg")
    from matplotlib import pyplot

    drawn = []
    for name, (quantity, unit, factor) in SHOWN.items():
        by_name = documents.get(name, {}).get("measures", {}).get(quantity)
        if not by_name:
            continue
        figure, axes = pyplot.subplots(figsize=(7, 0.6 + 0.34 * len(by_name)))
        draw_bars(axes, by_name, factor)
        axes.set_xlabel(f"{quantity.replace('_', ' ')}, {unit}; median, with the least and greatest round")
        axes.set_title(documents[name]["question"], fontsize=9, loc="left")
        path = folder / f"{name}.svg"
        figure.savefig(path, bbox_inches="tight", metadata={"Date": None})
        pyplot.close(figure)
        drawn.append(path)
    return drawn


def draw_bars(axes: Any, by_name: Mapping[str, Mapping[str, float]], factor: float) -> None:
    """Draw one quantity, the fastest on top."""
    ordered = sorted(by_name.items(), key=lambda pair: -pair[1]["median"])
    for place, (name, values) in enumerate(ordered):
        middle, least, greatest = (values[part] * factor for part in ("median", "min", "max"))
        color = _OURS if is_ours(name) else _RAW if is_limit(name) else _OTHER
        axes.barh(place, middle, color=color)
        axes.plot([least, greatest], [place, place], color="black", linewidth=1)
    axes.set_yticks(range(len(ordered)), [name for name, _ in ordered], fontsize=8)
    axes.spines[["top", "right"]].set_visible(False)


def is_ours(name: str) -> bool:
    """Return whether a candidate is safepoint, or a state or job that only safepoint saves."""
    return (
        name in ("safepoint", "full", "incremental")
        or name.startswith(("one_rank", "fsdp2", "ddp"))
        or name[0].isdigit()
    )


def is_limit(name: str) -> bool:
    """Return whether a candidate is what the machine can do at most."""
    return name.startswith(("raw_", "copy_", "digest_", "write_", "read_", "needed_", "without_"))
