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
from safepoint.format.asked import Asked, fits, is_asked_text, parse_asked
from safepoint.format.names import RUN_RECORD, GenerationName
from safepoint.storage.base import Storage
from safepoint.storage.url import open_source as find_source

# Of several generations with one step, the first state that is found answers.
_ORDER = tuple(GenerationState)
_MOST_TOLD = 10


@dataclass(frozen=True, slots=True)
class Source:
    """Hold an opened run, and what was asked for of it. `damage` says why the live lineage cannot be told."""

    url: str
    storage: Storage
    lineage: Lineage
    asked: Asked | None
    damage: CorruptionError | None = None

    def require_lineage(self) -> None:
        """Raise `CorruptionError` where it cannot be told which checkpoints are live."""
        if self.damage is not None:
            raise self.damage


def open_source(text: str) -> Source:
    """Open ``RUN`` or ``RUN@STEP`` for reading; a generation's name may stand for the step.

    Raises:
        NotFoundError: There is no run; nothing was created.
        RequestError: There is none, and what was typed ends in ``@`` and something that is no step.
    """
    url, storage, typed = find_source(text, record=RUN_RECORD, is_asked=is_asked_text)
    asked = None if typed is None else parse_asked(typed)
    if storage.root_exists():
        lineage, damage = _read_lineage(storage)
        if lineage.run is not None or list_generations(storage):
            return Source(url, storage, lineage, asked, damage)
    elif asked is None:
        _refuse_bad_step(text)
    raise NotFoundError("there is no run here", where=url, remedy="Check the path; nothing was created.")


def open_run(text: str) -> Source:
    """Open ``RUN`` for reading; a step is a `RequestError`."""
    source = open_source(text)
    if source.asked is not None:
        raise RequestError("this command takes a whole run", where=text, expected=source.url)
    return source


def choose(source: Source) -> Generation:
    """Return the generation that was asked for, or the newest checkpoint.

    Of several with one step a committed one comes first, then a superseded one, then what is left of others.

    Raises:
        NotFoundError: Nothing has this step, or nothing was ever committed.
        CorruptionError: No step was asked for, and all checkpoints are damaged, or which are live cannot be told.
    """
    names = list_generations(source.storage)
    if source.asked is not None:
        found = [examine(source.storage, name, source.lineage) for name in names if fits(name, source.asked)]
        if found:
            return min(found, key=lambda entry: _ORDER.index(entry.state))
        what = "name" if isinstance(source.asked, GenerationName) else "step"
        there = list(map(str, names if what == "name" else sorted({name.step for name in names}, reverse=True)))
        shown = ", ".join(there[:_MOST_TOLD]) + (", …" if len(there) > _MOST_TOLD else "")
        raise NotFoundError(
            f"no checkpoint has this {what}", where=f"{source.url}@{source.asked}", found=f"{what}s {shown}"
        )
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
        expected = "RUN@STEP, or RUN@NAME with a generation's name as `safepoint ls` shows it"
        raise RequestError("neither a step nor a generation's name", where=text, expected=expected, found=repr(tail))


def _read_lineage(storage: Storage) -> tuple[Lineage, CorruptionError | None]:
    """Return the lineage, without its chain where that cannot be told: a step is to be chosen from what is there."""
    try:
        return read_lineage(storage), None
    except CorruptionError as exc:
        return read_lineage(storage, needs_chain=False), exc
