"""Reading back a state of which a rank holds a part: its boxes against what they were filled with, its plain tree
against the saved one.

Spec: C11.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from safepoint.format.digest import digest_bytes
from safepoint.format.plain import encode_plain
from safepoint.restoring.read import BoxKey
from safepoint.restoring.validate import SavedState
from safepoint.state.snapshot import SnapshotItem

_SHOWN = 200


def differing_part(saved: SavedState, live: SnapshotItem, filled: Mapping[BoxKey, str]) -> tuple[str, str] | None:
    """Return what was expected and found where the live state of an item is not what this rank was given of it.

    One tensor is copied at a time.

    Args:
        saved: The saved state.
        live: The item, captured again.
        filled: The digest of each box that was filled.
    """
    stored = encode_plain(saved.items[live.name].plain)
    if live.plain != stored and not _is_part(live.plain, stored):
        return _shown(stored), _shown(live.plain)
    given = {key: digest for key, digest in filled.items() if key[0] == live.name}
    for tensor in live.tensors:
        spec = tensor.spec
        data = memoryview(bytearray(tensor.source.nbytes))
        tensor.source.copy_into(data)
        expected, found = given.pop((live.name, spec.name, spec.offset, spec.shape), "no such box"), digest_bytes(data)
        if found != expected and data.nbytes:
            return f"{spec.name} at {list(spec.offset)}: {expected}", found
    missing = [key for key in given if 0 not in key[3]]
    return (f"{missing[0][1]} at {list(missing[0][2])}", "absent") if missing else None


def _is_part(live: Any, stored: Any) -> bool:
    """Return whether a tree in JSON form is a part of another one: some of its keys and names, with equal values."""
    if type(live) is not type(stored):
        return False
    if isinstance(live, dict):
        return all(key in stored and _is_part(value, stored[key]) for key, value in live.items())
    if not isinstance(live, list) or live == stored:
        return bool(live == stored)
    if all(type(one) is str for one in [*live, *stored]):
        return set(live) <= set(stored)
    return len(live) == len(stored) and all(map(_is_part, live, stored))


def _shown(form: Any) -> str:
    text = str(form)
    return text if len(text) <= _SHOWN else text[: _SHOWN - 1] + "…"
