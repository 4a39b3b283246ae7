"""``safepoint ls``: which generations a run has, and what each of them is."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Annotated

import typer

from safepoint.ambient import SystemAmbient
from safepoint.catalog import Generation, GenerationState, examine_all
from safepoint.cli.display import JsonOption, age_s, age_text, print_json, print_line, print_table, size_text
from safepoint.cli.needs import needs_text
from safepoint.cli.source import Source, open_run
from safepoint.contract import needed_words
from safepoint.format.asked import arguments_of
from safepoint.format.names import GenerationName, generation_path, is_object_name
from safepoint.notes import read_pin, read_verified
from safepoint.storage.base import Entry


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command("ls")(_ls)


@dataclass(frozen=True, slots=True)
class _Row:
    """Hold what is told of one generation; fields are those of the JSON form."""

    generation: str
    step: int
    state: str
    size_bytes: int
    created: str | None
    age_s: float | None
    world_size: int | None
    contract: str | None
    needs: dict[str, str]
    verified: str | None
    pinned: str | None
    refers_to: list[str]
    file: str | None
    reason: str | None


def _ls(run: Annotated[str, typer.Argument(metavar="RUN")], as_json: JsonOption = False) -> None:
    """List the checkpoints of a run, newest first, and what else lies beside them."""
    source = open_run(run)
    found = examine_all(source.storage, source.lineage)
    now_s = SystemAmbient().now()
    rows = [_row(source, entry, now_s) for entry in found]
    resumes_at = next((entry.name.step for entry in found if entry.state is GenerationState.COMMITTED), None)
    if as_json:
        print_json(
            {
                "url": source.url,
                "run": source.lineage.run,
                "newest_incarnation": source.lineage.newest,
                "resumes_at": resumes_at,
                "generations": [asdict(row) for row in rows],
                "damage": [{"file": entry.file, "reason": entry.reason} for entry in source.lineage.damage],
            }
        )
        return
    _print_rows(rows)
    for refusal in source.lineage.damage:
        print_line(f"{refusal.file}: {refusal.reason}")
    if source.damage is not None:
        print_line(f"which checkpoints are live cannot be told: {source.damage}")
        return
    usable = [
        (entry.name, row) for entry, row in zip(found, rows, strict=True) if entry.state is GenerationState.COMMITTED
    ]
    _print_start(usable)


def _row(source: Source, entry: Generation, now_s: float) -> _Row:
    manifest = entry.manifest
    verified = read_verified(source.storage, entry.text) if manifest is not None else None
    pin = read_pin(source.storage, entry.text)
    if manifest is not None:
        size_bytes = sum(item.size_bytes for item in manifest.objects if item.generation == entry.text)
    else:
        size_bytes = sum(item.size_bytes for item in _objects(source, entry))
    return _Row(
        generation=entry.text,
        step=entry.name.step,
        state=entry.state.value,
        size_bytes=size_bytes,
        created=manifest.created if manifest is not None else None,
        age_s=age_s(manifest.created, now_s) if manifest is not None else None,
        world_size=manifest.world_size if manifest is not None else None,
        contract=manifest.contract if manifest is not None else None,
        needs=needed_words(manifest) if manifest is not None else {},
        verified=verified.verified if verified is not None else None,
        pinned=pin.reason if pin is not None else None,
        refers_to=manifest.ancestors if manifest is not None else [],
        file=entry.refusal.file if entry.refusal is not None else None,
        reason=entry.refusal.reason if entry.refusal is not None else _deleted_reason(entry),
    )


def _print_start(usable: list[tuple[GenerationName, _Row]]) -> None:
    """Say what a start resumes from, and which words it has to permit, by what the checkpoint tells of itself."""
    if not usable:
        print_line("no checkpoint to resume from")
        return
    newest = usable[0][1]
    if not newest.needs:
        print_line(f"resumes at step {newest.step}")
        return
    print_line(f"resumes at step {newest.step} only if the contract permits {needs_text(newest.needs)}")
    older = next((name for name, row in usable if not row.needs), None)
    if older is not None:
        asked = arguments_of([name for name, _ in usable])[older]
        print_line(f"step {older.step} needs no such permit: restore(step={asked!r}, branch=True)")


def _objects(source: Source, entry: Generation) -> list[Entry]:
    """Return what of a folder a manifest would name: the same size is told whether or not it can be read."""
    return [item for item in source.storage.list(generation_path(entry.text)) if is_object_name(item.name)]


def _deleted_reason(entry: Generation) -> str | None:
    return entry.tombstone.reason if entry.tombstone is not None else None


def _print_rows(rows: list[_Row]) -> None:
    cells = [
        [
            str(row.step),
            row.state,
            size_text(row.size_bytes),
            age_text(row.age_s) if row.created is not None else "",
            str(row.world_size) if row.world_size is not None else "",
            row.contract or "",
            "yes" if row.verified is not None else "",
            row.generation,
        ]
        for row in rows
    ]
    if not rows:
        return
    columns = ["step", "state", "size", "age", "world", "asked", "verified", "generation"]
    if any(row.needs for row in rows):
        columns.insert(6, "needs permit")
        cells = [[*cell[:6], ", ".join(row.needs), *cell[6:]] for cell, row in zip(cells, rows, strict=True)]
    print_table(columns, cells, numeric=["step", "size", "age", "world"])
    for row in rows:
        if row.pinned is not None:
            print_line(f"step {row.step} is pinned: {row.pinned}")
        if row.refers_to:
            print_line(f"step {row.step} refers to files of {', '.join(row.refers_to)}")
        if row.reason is not None:
            place = f"{row.file}: " if row.file is not None else ""
            print_line(f"step {row.step} is {row.state}: {place}{row.reason}")
