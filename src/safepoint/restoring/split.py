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
from safepoint.restoring.union import is_module, is_optimizer
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
    if live.plain != stored and not _is_taken(live.plain, stored, is_part=live.name in saved.divided):
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


def _is_taken(live: Any, stored: Any, *, is_part: bool) -> bool:
    """Return whether the tree of a module or an optimizer, in JSON form, is what was saved but for the order of names.

    Args:
        live: The tree as it is now.
        stored: The saved one.
        is_part: Whether some names may stand with other ranks alone.
    """
    if not all(map(is_module, (live, stored))) and not all(map(is_optimizer, (live, stored))):
        return False
    return _holds_names(live, stored) and (is_part or _holds_names(stored, live))


def _holds_names(some: dict[str, Any], whole: dict[str, Any]) -> bool:
    """Return whether a tree has only names that another one has too, with the same values."""
    if is_module(some):
        entries = whole["entries"]
        return (
            all(name in entries and _is_entry(one, entries[name]) for name, one in some["entries"].items())
            and _is_among(some["extra"], whole["extra"])
            and set(some["training"]) <= set(whole["training"])
        )
    return (
        all(some[field] == whole[field] for field in ("class", "other", "extra"))
        and _are_groups(some["groups"], whole["groups"])
        and all(_is_among(states, whole["state"].get(module, {})) for module, states in some["state"].items())
    )


def _is_entry(some: dict[str, Any], whole: dict[str, Any]) -> bool:
    return {**some, "ties": None} == {**whole, "ties": None} and set(some["ties"]) <= set(whole["ties"])


def _are_groups(some: list[Any], whole: list[Any]) -> bool:
    """Return whether groups are others or parts of them, in their order; of stages there may be fewer."""
    if len(some) == len(whole):
        return all(map(_is_group, some, whole))
    left = iter(whole)
    return all(any(_is_group(one, other) for other in left) for one in some)


def _is_group(some: dict[str, Any], whole: dict[str, Any]) -> bool:
    one, other = (dict(zip(group["parameters"], group["devices"], strict=True)) for group in (some, whole))
    return _is_among(one, other) and some["options"] == whole["options"]


def _is_among(some: dict[str, Any], whole: dict[str, Any]) -> bool:
    return all(name in whole and value == whole[name] for name, value in some.items())


def _shown(form: Any) -> str:
    text = str(form)
    return text if len(text) <= _SHOWN else text[: _SHOWN - 1] + "…"
