"""The stored tree of a module, parsed."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from safepoint.errors import CorruptionError
from safepoint.format.plain import ScalarLeaf, TensorLeaf
from safepoint.state.item import SavedItem
from safepoint.state.rebuild import check_plain
from safepoint.state.stored import elements, malformed, record

# Where the tensors of extra states stand; no path of a module begins so.
EXTRA_STATE = "@extra_state"

_FIELDS: dict[str, type | tuple[type, ...]] = {
    "kind": str,
    "persistent": bool,
    "requires_grad": bool,
    "value": (TensorLeaf, ScalarLeaf, dict),
    "ties": list,
}


@dataclass(frozen=True, slots=True, eq=False)
class SavedEntry:
    """Hold one tensor of the module: all names it has, first one first. Told apart by identity."""

    kind: str
    is_persistent: bool
    names: tuple[str, ...]
    value: Any
    requires_grad: bool


@dataclass(frozen=True, slots=True)
class SavedModule:
    """Hold a stored tree, parsed: entries by each of their names, extra state and deviating modules by path."""

    entries: Mapping[str, SavedEntry]
    extra: Mapping[str, Any]
    training: list[str]


def parse_module(saved: SavedItem, item: str) -> SavedModule:
    """Return what a stored tree says; entries stand under each of their names."""
    whole = record(saved.plain, {"entries": dict, "extra": dict, "training": list}, item=item)
    entries: dict[str, SavedEntry] = {}
    leaders = elements(list(whole["entries"]), str, item=item)
    for first in leaders:
        fields = record(whole["entries"][first], _FIELDS, item=f"{item}.{first}")
        names = (first, *elements(fields["ties"], str, item=f"{item}.{first}"))
        if names != tuple(sorted(set(names))) or fields["kind"] not in ("parameter", "buffer"):
            raise malformed(f"{item}.{first}", "a parameter or buffer with its names in order", str(names)[:120])
        entry = SavedEntry(fields["kind"], fields["persistent"], names, fields["value"], fields["requires_grad"])
        for name in names:
            if name in entries:
                raise CorruptionError("a stored module names a tensor twice", where=name)
            entries[name] = entry
    extra, training = whole["extra"], whole["training"]
    for listed in (leaders, elements(list(extra), str, item=item), elements(training, str, item=item)):
        if listed != sorted(set(listed)):
            raise malformed(item, "names in order", str(listed)[:120])
    values = [entry.value for entry in dict.fromkeys(entries.values())]
    check_plain(extra, saved.specs, item=item, prefix=EXTRA_STATE, otherwise_named=values)
    return SavedModule(entries, extra, training)
