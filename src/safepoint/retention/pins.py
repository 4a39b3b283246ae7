"""Pins: checkpoints that stay whatever the policy decides, each with the reason.

1. A pin stands beside the manifest: it moves with the folder, and holds for every later start.
2. A pin may be set while a job trains. It is confirmed only if no mark for deletion stood there once it had its name;
   a sweep looks for a pin after it has seen a mark. So either the sweep sees the pin, or the pin is refused.
3. If we die within `pin`, the checkpoint is pinned or it is not. One that was marked at that same moment may then be
   swept in spite of its pin, and shows as damaged.
4. Who finds a pin confirms it as little as its own where a mark stands beside it, for which came first is not to be
   seen. Only who set a pin takes it back: another one's may have been confirmed before the mark.

Spec: C12.8.
"""

from __future__ import annotations

import os

from safepoint.ambient import Ambient, SystemAmbient
from safepoint.catalog import GenerationState, Lineage, examine, list_generations, read_lineage, read_mark
from safepoint.errors import CorruptionError, NotFoundError, ObjectExistsError, RequestError
from safepoint.format.asked import Asked, asked_of, fits, told
from safepoint.format.names import PIN, TOMBSTONE, generation_path
from safepoint.format.records import PinRecord
from safepoint.format.version import FORMAT_VERSION
from safepoint.joining.claim import publish_record, utc_text
from safepoint.notes import read_pin
from safepoint.storage.base import Storage
from safepoint.storage.url import open_storage

_NONCE_BYTES = 8
_LONGEST_REASON = 500
# Of several generations with one step, the first state that is found is pinned.
_PINNED_FIRST = (GenerationState.COMMITTED, GenerationState.SUPERSEDED)


def pin(
    run: str | os.PathLike[str],
    step: int | str,
    *,
    reason: str,
    storage: Storage | None = None,
    ambient: Ambient | None = None,
) -> str:
    """Keep a checkpoint whatever retention decides, until `unpin`, and return its generation's name.

    May be called while a job holds the run, and again with the same reason.

    Args:
        run: The run's folder or URL.
        step: The checkpoint's step; of several with one step it is the one on the live lineage. A generation's name
            stands for any of them.
        reason: Why it stays, one line of at most 500 characters; told wherever retention explains itself.

    Raises:
        NotFoundError: The run has no good checkpoint of this step.
        CorruptionError: It has a damaged one.
        RequestError: It is pinned with another reason, or marked for deletion: its data may go at any time. A pin that
            stood there before this call stays.

    Spec: C12.8.
    """
    _check_reason(reason)
    storage, ambient = storage or open_storage(run), ambient or SystemAmbient()
    lineage = _lineage_of(storage)
    generation = _choose(storage, lineage, asked_of(step))
    record = PinRecord(
        format=FORMAT_VERSION,
        run=lineage.run or "",
        generation=generation,
        reason=reason,
        pinned=utc_text(ambient.now()),
        nonce=ambient.token(_NONCE_BYTES),
    )
    is_ours = read_pin(storage, generation) is None and _is_published(storage, record)
    if not is_ours:
        _check_same(storage, generation, reason)
    # Also of a pin that was found: who set it may have died before this.
    storage.sync_folder(generation_path(generation))
    mark = read_mark(storage, generation, _lineage_of(storage))
    if mark is None:
        return generation
    # A sweep that saw the mark before the pin may be deleting already.
    if not is_ours:
        raise _doubtful(generation, mark.reason)
    _remove(storage, generation_path(generation, PIN))
    raise _marked(generation, mark.reason)


def unpin(run: str | os.PathLike[str], step: int | str, *, storage: Storage | None = None) -> list[str]:
    """Let retention decide on the pinned checkpoints of a step again, and return their generations' names.

    A generation's name in place of the step stands for that one alone.
    Nothing is deleted by this. A mark for deletion that was set beside the pin is taken away first: the policy decides
    anew.

    Raises:
        NotFoundError: Nothing of this step is pinned.

    Spec: C12.8.
    """
    storage = storage or open_storage(run)
    _lineage_of(storage)
    asked = asked_of(step)
    names = [str(name) for name in list_generations(storage) if fits(name, asked)]
    pinned = [name for name in names if read_pin(storage, name) is not None]
    if not pinned:
        raise NotFoundError(f"no checkpoint of {told(asked)} is pinned", where=f"{storage.url}@{asked}")
    for generation in pinned:
        # If we die between the two, it is still pinned, and bears no mark.
        _remove(storage, generation_path(generation, TOMBSTONE))
        _remove(storage, generation_path(generation, PIN))
    return pinned


def _check_reason(reason: str) -> None:
    if not isinstance(reason, str) or not reason.strip() or not reason.isprintable() or len(reason) > _LONGEST_REASON:
        raise RequestError(
            "a pin has a reason",
            where="reason",
            expected=f"one line of at most {_LONGEST_REASON} characters",
            found=repr(reason)[:_LONGEST_REASON],
        )


def _lineage_of(storage: Storage) -> Lineage:
    lineage = read_lineage(storage, needs_chain=False) if storage.root_exists() else Lineage(None)
    if lineage.run is None:
        raise NotFoundError("there is no run here", where=storage.url, remedy="Check the path; nothing was created.")
    return lineage


def _choose(storage: Storage, lineage: Lineage, asked: Asked) -> str:
    found = [examine(storage, name, lineage) for name in list_generations(storage) if fits(name, asked)]
    for state in _PINNED_FIRST:
        for entry in found:
            if entry.state is state:
                return entry.text
    for entry in found:
        if entry.tombstone is not None:
            raise _marked(entry.text, entry.tombstone.reason)
        if entry.state is GenerationState.DAMAGED and entry.refusal is not None:
            raise CorruptionError(
                "a damaged checkpoint cannot be pinned",
                where=f"{entry.text}/{entry.refusal.file}",
                found=entry.refusal.reason,
            )
    steps = sorted({name.step for name in list_generations(storage)}, reverse=True)
    shown = ", ".join(map(str, steps[:8])) or "none"
    raise NotFoundError(f"no checkpoint is {told(asked)}", where=f"{storage.url}@{asked}", found=f"steps {shown}")


def _is_published(storage: Storage, record: PinRecord) -> bool:
    """Set a pin, and return whether it is this one that stands there."""
    try:
        publish_record(storage, generation_path(record.generation, PIN), record)
    except ObjectExistsError:
        return False
    return True


def _check_same(storage: Storage, generation: str, reason: str) -> None:
    found = read_pin(storage, generation)
    if found is None or found.reason != reason:
        raise RequestError(
            "the checkpoint is pinned with another reason",
            where=generation,
            expected=reason,
            found=found.reason if found is not None else "a pin that has just gone",
            remedy="Unpin it first.",
        )


def _marked(generation: str, reason: str) -> RequestError:
    return RequestError(
        "the checkpoint is marked for deletion, and its data may go at any time",
        where=generation,
        found=reason,
        remedy="It is not pinned. Copy its folder if it is still whole, or pin another step.",
    )


def _doubtful(generation: str, reason: str) -> RequestError:
    return RequestError(
        "the checkpoint bears a pin and a mark for deletion, and which came first is not to be seen",
        where=generation,
        found=reason,
        remedy="The pin stays, and later saves delete nothing of it; one that is under way may. Once the job has saved "
        "again, look with `safepoint verify` whether it is whole; then unpin it and pin it once more.",
    )


def _remove(storage: Storage, path: str) -> None:
    storage.delete(path)
    storage.sync_folder(path.rpartition("/")[0])
