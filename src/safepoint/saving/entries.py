"""Entries: values in the plain trees of modules and optimizers that ranks hold in common, and whether they are equal.

A tensor without axes lies in the tree, and so do the options of an optimizer. Trees may differ because ranks hold
different parts; an entry that several ranks list must have one value. Tensors are compared by their bytes, elsewhere.

Spec: C5.4.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import msgspec

from safepoint.errors import AbortedError
from safepoint.format.digest import digest_bytes
from safepoint.group.agreement import join
from safepoint.group.base import Group
from safepoint.saving.plan import Agreed
from safepoint.saving.replicas import describe_sides
from safepoint.state.snapshot import SnapshotItem

_COMPARED = frozenset({"module", "optimizer"})


class _Told(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """Tell the digest of each entry of one item, and of each group of an optimizer its parameters and options."""

    entries: dict[str, str]
    groups: list[tuple[list[str], dict[str, str]]] = []


def compare_entries(group: Group, agreed: Agreed, *, refuses: bool, deadline_s: float) -> str:
    """Compare the entries of items whose trees differ between ranks, and return the first that differs, with the ranks.

    The ranks talk only where there is such an item, and the save compares replicas at all.

    Raises:
        AbortedError: An entry differs, and that is refused; on all ranks.

    Spec: C5.4.
    """
    differing = {name for name, item in agreed.plan.items.items() if item.keeper is None and item.kind != "per_rank"}
    if not differing or not agreed.plan.compares:
        return ""
    own = {one.name: _told(one) for one in agreed.snapshot.items if one.name in differing and one.type in _COMPARED}

    def merge(parts: list[bytes]) -> bytes:
        found = _first_difference([msgspec.msgpack.decode(part, type=dict[str, _Told]) for part in parts])
        if found and refuses:
            raise AbortedError(
                "ranks that hold the same entry hold different values",
                where=found,
                remedy="Find what changed it on one rank alone, or go back to the last checkpoint on all ranks.",
            )
        return found.encode("utf-8", "backslashreplace")

    topic = f"save/{agreed.plan.generation}/entries"
    return join(group, topic, lambda: msgspec.msgpack.encode(own), merge, deadline_s=deadline_s).decode("utf-8")


def _told(item: SnapshotItem) -> _Told:
    shared = dict(_shared(item.plain))
    tree = dict(_pairs(item.plain))
    if item.type == "module":
        entries = {name: dict(_pairs(entry)) for name, entry in _pairs(tree.get("entries", {}))}
        kept = {name: entry for name, entry in entries.items() if name not in item.leaders}
        # What a tensor is tied to depends on what else the rank holds.
        return _Told({name: _digest({**entry, "ties": None}, shared) for name, entry in kept.items()})
    groups = [
        (group["parameters"], {key: _digest(value, shared) for key, value in _pairs(group["options"])})
        for group in tree.get("groups", [])
    ]
    states = {
        f"state of {module}/{name}": _digest(value, shared)
        for module, named in _pairs(tree.get("state", {}))
        for name, value in _pairs(named)
    }
    return _Told(states, groups)


def _first_difference(told: Sequence[dict[str, _Told]]) -> str:
    values: dict[str, dict[int, str]] = {}
    for rank, items in enumerate(told):
        for item, one in items.items():
            for entry, digest in _entries(one):
                values.setdefault(f"{item}: {entry}", {})[rank] = digest
    for place in sorted(values):
        if len(set(values[place].values())) > 1:
            return f"{place}: {describe_sides(values[place])}"
    return ""


def _entries(told: _Told) -> Iterator[tuple[str, str]]:
    yield from told.entries.items()
    for parameters, options in told.groups:
        for name in parameters:
            yield from ((f"{option} of the group of {name}", digest) for option, digest in options.items())


def _digest(tree: Any, shared: dict[Any, Any]) -> str:
    return digest_bytes(msgspec.json.encode(_bare(tree, shared)))


def _bare(tree: Any, shared: dict[Any, Any]) -> Any:
    """Return a value without what depends on the rest of its tree: numbers of shared values, names of tensors."""
    if isinstance(tree, list):
        return [_bare(one, shared) for one in tree]
    if not isinstance(tree, dict):
        return tree
    if len(tree) == 1:
        ((tag, content),) = tree.items()
        if tag in ("$tensor", "$view"):
            return {tag: None}
        if tag == "$shared":
            return _bare(content[1], shared)
        if tag == "$same":
            # A value may contain itself.
            return _bare(shared[content], {**shared, content: None})
    return {key: _bare(value, shared) for key, value in tree.items()}


def _shared(tree: Any) -> Iterator[tuple[Any, Any]]:
    """Yield the number of each shared value of a tree in JSON form, and the value."""
    if isinstance(tree, list):
        for one in tree:
            yield from _shared(one)
    elif isinstance(tree, dict):
        if len(tree) == 1 and "$shared" in tree:
            yield tuple(tree["$shared"])
        for value in tree.values():
            yield from _shared(value)


def _pairs(tree: Any) -> list[tuple[Any, Any]]:
    """Return the keys and values of a dict in JSON form."""
    if len(tree) == 1:
        ((tag, content),) = tree.items()
        if tag == "$shared":
            return _pairs(content[1])
        if tag in ("$dict", "$ordered"):
            return [(key, value) for key, value in content]
    return list(tree.items())
