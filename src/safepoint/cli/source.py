"""From what is typed to a run and one of its generations."""

from __future__ import annotations

from dataclasses import dataclass

from safepoint.catalog import (
    Generation,
    GenerationState,
    Lineage,
    examine,
    list_generations,
    read_lineage,
)
from safepoint.errors import CorruptionError, NotFoundError, RequestError
from safepoint.format.names import RUN_RECORD
from safepoint.storage.base import Storage
from safepoint.storage.url import open_source as find_source

# Of several generations with one step, the first state that is found answers.
_ORDER = tuple(GenerationState)
_MOST_STEPS_TOLD = 10


@dataclass(frozen=True, slots=True)
class Source:
    """Hold an opened run, and the step that was asked for. `damage` says why the live lineage cannot be told."""

    url: str
    storage: Storage
    lineage: Lineage
    step: int | None
    damage: CorruptionError | None = None

    def require_lineage(self) -> None:
        """Raise `CorruptionError` where it cannot be told which checkpoints are live."""
        if self.damage is not None:
            raise self.damage


def open_source(text: str) -> Source:
    """Open ``RUN`` or ``RUN@STEP`` for reading.

    Raises:
        NotFoundError: There is no run; nothing was created.
        RequestError: There is none, and what was typed ends in ``@`` and something that is no step.
    """
    url, storage, step = find_source(text, record=RUN_RECORD)
    if storage.root_exists():
        lineage, damage = _read_lineage(storage)
        if lineage.run is not None or list_generations(storage):
            return Source(url, storage, lineage, step, damage)
    elif step is None:
        _refuse_bad_step(text)
    raise NotFoundError("there is no run here", where=url, remedy="Check the path; nothing was created.")


def open_run(text: str) -> Source:
    """Open ``RUN`` for reading; a step is a `RequestError`."""
    source = open_source(text)
    if source.step is not None:
        raise RequestError("this command takes a whole run", where=text, expected=source.url)
    return source


def choose(source: Source) -> Generation:
    """Return the generation of the step asked for, or the newest checkpoint.

    Of several with one step a committed one comes first, then a superseded one, then what is left of others.

    Raises:
        NotFoundError: Nothing has this step, or nothing was ever committed.
        CorruptionError: No step was asked for, and all checkpoints are damaged, or which are live cannot be told.
    """
    names = list_generations(source.storage)
    if source.step is not None:
        found = [examine(source.storage, name, source.lineage) for name in names if name.step == source.step]
        if found:
            return min(found, key=lambda entry: _ORDER.index(entry.state))
        steps = sorted({name.step for name in names}, reverse=True)
        shown = ", ".join(map(str, steps[:_MOST_STEPS_TOLD])) + (", …" if len(steps) > _MOST_STEPS_TOLD else "")
        raise NotFoundError("no checkpoint has this step", where=f"{source.url}@{source.step}", found=f"steps {shown}")
    source.require_lineage()
    damaged = []
    for name in names:
        entry = examine(source.storage, name, source.lineage)
        if entry.state is GenerationState.COMMITTED:
            return entry
        if entry.state is GenerationState.DAMAGED:
            damaged.append(entry)
    if damaged and damaged[0].refusal is not None:
        newest, refusal = damaged[0].text, damaged[0].refusal
        found_text = f"{newest}: {refusal.file}: {refusal.reason}"
        raise CorruptionError("all checkpoints are damaged", where=source.url, found=found_text)
    raise NotFoundError("the run has no checkpoint", where=source.url, remedy="See `safepoint ls` for what is there.")


def _refuse_bad_step(text: str) -> None:
    run, sign, tail = text.rpartition("@")
    # Behind a slash it would be a part of a path, in which an "@" is nothing special.
    if sign and run and "/" not in tail:
        raise RequestError("a step is a number", where=text, expected="RUN@STEP", found=repr(tail))


def _read_lineage(storage: Storage) -> tuple[Lineage, CorruptionError | None]:
    """Return the lineage, without its chain where that cannot be told: a step is to be chosen from what is there."""
    try:
        return read_lineage(storage), None
    except CorruptionError as exc:
        return read_lineage(storage, needs_chain=False), exc
