"""Another run's checkpoint, from which a run begins.

1. A run that has a checkpoint of its own goes on from that one, so that the same command starts and resumes.
2. The other run is only read: it is not joined, and nothing is created in it.
3. A run whose own checkpoints are damaged or lost does not fall back to the other one.

Spec: C10.7
"""

from __future__ import annotations

import os
from dataclasses import dataclass, replace

from safepoint.catalog import Lineage, list_generations, read_lineage
from safepoint.errors import RequestError
from safepoint.format.asked import is_asked_text, parse_asked, told
from safepoint.format.names import RUN_RECORD
from safepoint.restoring.match import Choice
from safepoint.restoring.restore import RestoreContext, Restored, restore
from safepoint.restoring.select import Wish, check_run_is_there
from safepoint.storage.base import Storage
from safepoint.storage.url import open_source


@dataclass(frozen=True, slots=True)
class Source:
    """Hold another run and which of its checkpoints is wanted. `text` is what the user wrote, fit for a record."""

    text: str
    storage: Storage
    wish: Wish

    def check_is_there(self, own: Storage) -> None:
        """Raise `NotFoundError`, before anything is created, where a run without generations has no source either."""
        if not (own.root_exists() and list_generations(own)):
            check_run_is_there(self.storage, self.wish)


def look_for(source: str | os.PathLike[str] | None, *, own: Storage, wish: Wish, is_leader: bool) -> Source | None:
    """Return the source, having seen on the leader that there are the runs that a restore needs.

    Raises:
        RequestError: As `as_source` does.
        NotFoundError: A run is not there; nothing was created.
    """
    found = as_source(source, own=own, wish=wish)
    if is_leader:
        check_run_is_there(own, wish)
        if found is not None:
            found.check_is_there(own)
    return found


def as_source(source: str | os.PathLike[str] | None, *, own: Storage, wish: Wish) -> Source | None:
    """Return the source that ``RUN`` or ``RUN@STEP`` names; None for None.

    Args:
        own: The run that begins.
        wish: What is wanted of that run, which must be its newest checkpoint.

    Raises:
        RequestError: The text names no other run, or a step of the own run is wanted at the same time.
    """
    if source is None:
        return None
    text = os.fspath(source) if isinstance(source, str | os.PathLike) else source
    if not isinstance(text, str):
        raise RequestError("a source is no path", where="source", expected="RUN or RUN@STEP", found=repr(source)[:80])
    if wish.asked is not None:
        raise RequestError(
            "a restore names a step of its own run and a source",
            where=text,
            found=told(wish.asked),
            remedy="The source's step is written RUN@STEP. To go back in the own run, leave source= out.",
        )
    _, storage, typed = open_source(text, record=RUN_RECORD, is_asked=is_asked_text)
    asked = None if typed is None else parse_asked(typed)
    if _place(storage.url) == _place(own.url):
        raise RequestError(
            "the source is the run itself",
            where=text,
            expected="another run",
            remedy="To go back in a run say restore(step=..., branch=True).",
        )
    # A path may hold bytes that are no text, which a record cannot.
    shown = text.encode("utf-8", "backslashreplace").decode("utf-8")
    return Source(shown, storage, Wish(asked, branch=asked is not None, required=True))


def begin(
    context: RestoreContext, lineage: Lineage, wish: Wish, choice: Choice, *, source: Source | None, restarts: bool
) -> Restored:
    """Restore what the run goes on from: its own newest checkpoint, else the source's.

    Args:
        lineage: That of the own run.
        choice: What is left out; with a source, only of what is taken from it.
        restarts: Whether the run's own checkpoints are passed over.

    Raises:
        SafepointError: As `restore` does, of either run.

    Spec: C10.7
    """
    if source is None:
        return Restored() if restarts else restore(context, lineage, wish, choice)
    whole = Choice(late=choice.late)
    own = Restored() if restarts else restore(context, lineage, wish, whole)
    if own.saved is not None:
        own.notes.append(f"source {source.text} was not used: the run goes on from a checkpoint of its own")
        return own
    found = context.ranks.by_leader(lambda: _lineage_of(source), Lineage(None))
    run = source.text if source.wish.asked is None else source.text.rpartition("@")[0]
    restored = restore(replace(context, storage=source.storage, source=run), found, source.wish, choice)
    restored.source, restored.storage = source.text, source.storage
    restored.refused = own.refused | restored.refused
    restored.notes = own.notes + restored.notes
    # Nothing of the other run is left behind by what this one does.
    restored.superseded = ()
    return restored


def _lineage_of(source: Source) -> Lineage:
    check_run_is_there(source.storage, source.wish)
    return read_lineage(source.storage, needs_chain=source.wish.asked is None)


def _place(url: str) -> str:
    return url if "://" in url else os.path.realpath(url)
