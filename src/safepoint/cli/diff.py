"""``safepoint diff``: what two checkpoints have in common."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import asdict
from typing import Annotated, Any

import typer

from safepoint.catalog import Generation
from safepoint.cli.display import (
    JsonOption,
    counted,
    print_facts,
    print_json,
    print_line,
    print_table,
    print_title,
    reading_bar,
)
from safepoint.cli.source import Source, choose, open_source
from safepoint.errors import CorruptionError
from safepoint.restoring.compare import Comparison, TensorComparison, compare_checkpoints
from safepoint.restoring.verify import verify_generation

_MOST_ROWS = 50
_MOST_FINDINGS_TOLD = 10


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command("diff")(_diff)


def _diff(
    first: Annotated[str, typer.Argument(metavar="RUN@A")],
    second: Annotated[str, typer.Argument(metavar="RUN@B")],
    tells_all: Annotated[bool, typer.Option("--all", help="Print all tensors and values, however many.")] = False,
    trusts_records: Annotated[
        bool,
        typer.Option(
            "--trust-records", help="Read no bytes whose recorded digests are equal: damage to them is not seen."
        ),
    ] = False,
    as_json: JsonOption = False,
) -> None:
    """Compare two checkpoints, of one run or of two, having read and checked every byte of both.

    Ends with 0 when all bits are equal, and with 1 when some are not or a checkpoint is damaged.
    """
    one, other = open_source(first), open_source(second)
    generations = choose(one), choose(other)
    sides = list(zip((one, other), generations, strict=True))
    names = _names(sides)
    if trusts_records:
        _check_sizes(sides, names)
    else:
        _check_bytes(sides, names, is_shown=not as_json and sys.stderr.isatty())
    comparison = compare_checkpoints(one.storage, generations[0], other.storage, generations[1])
    if as_json:
        answer = _as_json(comparison, generations[0].text, generations[1].text)
        print_json(answer | {"bytes_checked": not trusts_records})
    elif comparison.is_equal:
        counts = f"{counted(len(comparison.tensors), 'tensor')} in {counted(len(comparison.items), 'item')}"
        read = "recorded digests are equal" if trusts_records else "bits are equal"
        print_line(f"all {read}: {counts}" + ("; what they speak of was not read" if trusts_records else ""))
    else:
        _print_comparison(comparison, names[0], names[1], tells_all=tells_all)
    if not comparison.is_equal:
        raise typer.Exit(1)


def _names(sides: Sequence[tuple[Source, Generation]]) -> list[str]:
    """Return what the two are called: by step, or by generation where they have one step of one run."""
    names = [f"{source.url}@{generation.name.step}" for source, generation in sides]
    return names if names[0] != names[1] else [f"{source.url}@{generation.text}" for source, generation in sides]


def _check_bytes(sides: Sequence[tuple[Source, Generation]], names: Sequence[str], *, is_shown: bool) -> None:
    """Read every byte of both checkpoints; raise `CorruptionError` with what does not hold of either."""
    findings, damaged = list[str](), list[str]()
    for (source, generation), place in zip(sides, names, strict=True):
        with reading_bar(f"step {generation.name.step}", is_shown=is_shown) as on_progress:
            report = verify_generation(source.storage, generation, on_progress=on_progress)
        findings += [f"{place}: {finding}" for finding in report.findings]
        damaged += [place] * (not report.holds)
    if findings:
        told = "\n  - ".join(["", *findings[:_MOST_FINDINGS_TOLD]])
        left = len(findings) - _MOST_FINDINGS_TOLD
        raise CorruptionError(
            "what is damaged is not compared",
            where=" and ".join(dict.fromkeys(damaged)),
            found=told + (f"\n  - and {left} more" if left > 0 else ""),
            remedy="`safepoint verify` tells all; --trust-records compares what the records say.",
        )


def _check_sizes(sides: Sequence[tuple[Source, Generation]], names: Sequence[str]) -> None:
    """Raise `CorruptionError` where a file is missing, or has another size than its record says."""
    for (_, generation), where in zip(sides, names, strict=True):
        refusal = generation.refusal
        if refusal is not None:
            raise CorruptionError(
                "what is damaged is not compared", where=where, found=f"{refusal.file}: {refusal.reason}"
            )


def _print_comparison(comparison: Comparison, first: str, second: str, *, tells_all: bool) -> None:
    limit = len(comparison.tensors) + len(comparison.plain) if tells_all else _MOST_ROWS
    print_table(
        ["item", "tensors", "equal", "differ", "greatest difference", "plain values that differ"],
        [_item_row(comparison, item) for item in comparison.items],
        numeric=["tensors", "equal", "differ", "greatest difference", "plain values that differ"],
    )
    only = {f"only in {first}": comparison.only_first, f"only in {second}": comparison.only_second}
    named = {title: ", ".join(items) for title, items in only.items() if items}
    if named:
        print_facts(named, title="Items")
    moved = [tensor for tensor in comparison.tensors if tensor.verdict != "equal"]
    if moved:
        print_title("Tensors that differ")
        rows = [[f"{tensor.item}/{tensor.name}", *_told(tensor)] for tensor in moved]
        print_table(["tensor", "what", "elements", "greatest difference"], rows[:limit], numeric=["elements"])
        _tell_rest(len(rows), limit)
    still = [f"{tensor.item}/{tensor.name}" for tensor in comparison.tensors if tensor.verdict == "equal"]
    if still and moved:
        print_title(f"Tensors that never moved: {len(still)} of {len(comparison.tensors)}")
        for name in still[:limit]:
            print_line(f"  {name}")
        _tell_rest(len(still), limit)
    if comparison.plain:
        print_title("Plain values that differ")
        rows = _plain_rows(comparison, folds=not tells_all)
        print_table(["value", first, second], rows[:limit])
        _tell_rest(len(rows), limit)


def _plain_rows(comparison: Comparison, *, folds: bool) -> list[list[str]]:
    """Return a row for each plain value that differs; with `folds`, one for all of an item that changed alike.

    Alike are values of one key, such as every parameter's ``step``, that were the same before and are the same after.
    """
    alike: dict[tuple[str, ...], list[str]] = {}
    for entry in comparison.plain:
        leaf = entry.difference
        key = leaf.path.rpartition(".")[2] if folds else leaf.path
        alike.setdefault((entry.item, key, leaf.first, leaf.second), []).append(leaf.path)
    rows = []
    for (item, key, first, second), paths in alike.items():
        others = f" and {len(paths) - 1} more .{key}" if len(paths) > 1 else ""
        rows.append([f"{item}: {paths[0]}{others}", first, second])
    return rows


def _item_row(comparison: Comparison, item: str) -> list[str]:
    tensors = [tensor for tensor in comparison.tensors if tensor.item == item]
    equal = sum(1 for tensor in tensors if tensor.verdict == "equal")
    greatest = [tensor.distance.greatest for tensor in tensors if tensor.distance.greatest is not None]
    plain = sum(1 for entry in comparison.plain if entry.item == item)
    return [
        item,
        str(len(tensors)),
        str(equal),
        str(len(tensors) - equal),
        f"{max(greatest):.6g}" if greatest else "",
        str(plain),
    ]


def _told(tensor: TensorComparison) -> tuple[str, str, str]:
    if tensor.verdict == "values":
        greatest = "" if tensor.distance.greatest is None else f"{tensor.distance.greatest:.6g}"
        if tensor.distance.not_finite:
            greatest += f" ({tensor.distance.not_finite} not finite)"
        return tensor.first, f"{tensor.distance.differing} of {tensor.elements}", greatest.strip()
    if tensor.verdict in ("type", "shape"):
        return f"{tensor.first} and {tensor.second}", "", ""
    return "only in the first" if tensor.verdict == "only_first" else "only in the second", "", ""


def _tell_rest(count: int, limit: int) -> None:
    if count > limit:
        print_line(f"  and {count - limit} more; --all or --json tells them")


def _as_json(comparison: Comparison, first: str, second: str) -> dict[str, Any]:
    return {
        "equal": comparison.is_equal,
        "first": first,
        "second": second,
        "items": comparison.items,
        "only_first": comparison.only_first,
        "only_second": comparison.only_second,
        "tensors": [_tensor_as_json(tensor) for tensor in comparison.tensors],
        "plain": [{"item": entry.item, **asdict(entry.difference)} for entry in comparison.plain],
    }


def _tensor_as_json(tensor: TensorComparison) -> dict[str, Any]:
    greatest = tensor.distance.greatest
    # JSON has no infinity; the greatest difference of two finite numbers may overflow to one.
    return {
        "item": tensor.item,
        "name": tensor.name,
        "verdict": tensor.verdict,
        "first": tensor.first,
        "second": tensor.second,
        "elements": tensor.elements,
        "differing": tensor.distance.differing,
        "greatest_difference": "inf" if greatest == float("inf") else greatest,
        "not_finite": tensor.distance.not_finite,
    }
