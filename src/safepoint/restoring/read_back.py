"""Read back: capture the live objects again, and compare them with what was saved.

1. Plain trees are compared with the saved ones, and boxes of tensors with what they were filled with; that this is what
   was saved was checked when it arrived.
2. Bytes that arrived in the live memory itself were digested there. They are digested again only where something may
   have been written to them since, or where every byte is asked for.
3. What safepoint set itself and finds otherwise is an `InternalError`, also where the checkpoint's own tree is one that
   no save writes: a `CorruptionError` would take the start to an older checkpoint for a fault that may be here.

Spec: C11.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import dataclass
from itertools import chain, repeat
from operator import attrgetter
from typing import Any, Protocol, runtime_checkable

import msgspec

from safepoint.contract import Reason
from safepoint.errors import CorruptionError, InternalError
from safepoint.format.plain import decode_plain, encode_plain
from safepoint.restoring.apply import in_order
from safepoint.restoring.arrival import Arrival, BoxKey, are_there
from safepoint.restoring.together import merged_findings, merged_names
from safepoint.restoring.trees import differing_values
from safepoint.restoring.union import is_module, is_optimizer
from safepoint.restoring.validate import SavedState
from safepoint.state.item import CapturedTensor, Item, Source, TensorSpec, placed
from safepoint.state.portions import portions_of
from safepoint.state.snapshot import SnapshotItem, capture_item

_LONGEST_PATH = 200
_USERS_OWN = "stateful"

_SPEC, _SOURCE = attrgetter("spec"), attrgetter("source")
_NAME, _DTYPE, _OFFSET, _SHAPE = map(attrgetter, ("name", "dtype", "offset", "shape"))


@dataclass(frozen=True, slots=True)
class ReadBack:
    """Say how many items are equal, which differ and may, and which objects did not take their state."""

    equal: int
    notes: tuple[str, ...]
    reasons: tuple[Reason, ...]


@runtime_checkable
class Keeping(Protocol):
    """An item that may keep, deliberately, what the checkpoint does not know."""

    @property
    def keeps_own(self) -> bool:
        """Return whether it does, so that it is not what was saved although all is well."""


@runtime_checkable
class Forgiving(Protocol):
    """An item that may tell another state than it was given although all is well."""

    @property
    def why_else(self) -> str:
        """Return why, for people; empty where it may not."""


def read_back(
    saved: SavedState,
    items: Sequence[Item],
    *,
    changed: frozenset[str],
    arrivals: Mapping[BoxKey, Arrival],
    is_split: bool = False,
    is_full: bool = False,
    undisturbed: Callable[[], AbstractContextManager[object]] = nullcontext,
) -> ReadBack:
    """Capture the live state again and compare it with what was saved.

    Args:
        saved: The saved state.
        items: What was restored.
        changed: Items in which a permitted difference makes the live state another one.
        arrivals: What the targets were filled with.
        is_split: Whether no rank has the whole state, so that names may stand in another order.
        is_full: Digest every byte once more, also where what arrived in live memory still lies there.
        undisturbed: Puts the random streams back after a block; the one that does needs torch.

    Raises:
        InternalError: An item that safepoint itself sets is not what was saved.

    Spec: C11.
    """
    equal, notes, reasons = 0, [], []
    # Random streams first: to tell its state an object may draw, which is undone in the end.
    compared = [item for item in reversed(in_order(items)) if item.name not in changed and not _keeps_own(item)]
    left = dict(arrivals)
    with undisturbed():
        differing = {}
        for item in compared:
            # What an object of the user's own hands out may be anything, wherever it lies.
            trusts = not is_full and item.type != _USERS_OWN
            differing[item.name] = _difference(saved, capture_item(item), left, is_split=is_split, trusts=trusts)
    for item in compared:
        found = differing[item.name]
        if found is None:
            equal += 1
        elif item.type == _USERS_OWN:
            why_else = item.why_else if isinstance(item, Forgiving) else ""
            if why_else:
                notes.append(f"{item.name}: {why_else}")
            else:
                text = "its state_dict() differs from what its load_state_dict() was given"
                reasons.append(Reason(f"{item.name}.state", "approximate", f"{item.name}: {text}", "", ""))
        else:
            raise InternalError(
                "a restored item is not what was saved",
                where=item.name,
                expected=found[0],
                found=found[1],
                remedy="Something wrote to it while it was restored, or the checkpoint holds what no save of this "
                "version writes, or this is a bug: report it. Choose another one with restore(step=...).",
            )
    return ReadBack(equal, tuple(notes), tuple(reasons))


def merged_read_backs(parts: list[ReadBack]) -> ReadBack:
    """Return what all ranks found: an item counts as equal where it is that on every rank."""
    return ReadBack(
        min(part.equal for part in parts),
        tuple(merged_names([part.notes for part in parts])),
        tuple(merged_findings([part.reasons for part in parts])),
    )


def _keeps_own(item: Item) -> bool:
    return isinstance(item, Keeping) and item.keeps_own


def _difference(
    saved: SavedState, live: SnapshotItem, left: dict[BoxKey, Arrival], *, is_split: bool, trusts: bool
) -> tuple[str, str] | None:
    """Return what was expected and found where the live state of an item is not what this rank was given of it.

    One tensor is copied at a time, where it has to be.

    Args:
        saved: The saved state.
        live: The item, captured again.
        left: What boxes were filled with; those of the item are taken out.
        is_split: As in `read_back`.
        trusts: Whether bytes that lie where they arrived, by all that tells without reading them, need no second look.
    """
    stored = _stored_form(saved, live.name, is_split=is_split)
    # Trees of one text are equal; to take a text apart takes longer than to make one.
    if live.tree != msgspec.json.encode(stored) and (plain := live.plain) != stored:
        is_part = live.name in saved.divided
        if not is_split or not _is_taken(plain, stored, is_part=is_part):
            return _first_difference(stored, plain)
    for tensors in portions_of(live.tensors):
        found = _difference_of_tensors(saved.items[live.name].specs, live.name, tensors, left, trusts=trusts)
        if found is not None:
            return found
    missing = [key for key in left if key[0] == live.name and 0 not in key[3]]
    return (f"{missing[0][1]} at {list(missing[0][2])}", "absent") if missing else None


def _difference_of_tensors(
    stored: Mapping[str, TensorSpec],
    item: str,
    tensors: Sequence[CapturedTensor],
    left: dict[BoxKey, Arrival],
    *,
    trusts: bool,
) -> tuple[str, str] | None:
    """Return what was expected and found of the first tensor that is not what its boxes were filled with."""
    specs, sources = list(map(_SPEC, tensors)), list(map(_SOURCE, tensors))
    names = list(map(_NAME, specs))
    keys = zip(repeat(item), names, map(_OFFSET, specs), map(_SHAPE, specs))
    arrivals = list(map(left.pop, keys, repeat(None)))
    known = [one for one in arrivals if one is not None]
    if trusts and len(known) == len(arrivals):
        dtypes = list(map(_DTYPE, map(stored.__getitem__, names)))
        if dtypes == list(map(_DTYPE, specs)) and are_there(known, sources):
            return None
    for spec, source, arrival in zip(specs, sources, arrivals, strict=True):
        if arrival is None:
            if source.nbytes:
                return f"{_where(spec)}: no such box", f"{source.nbytes} bytes"
            continue
        if stored[spec.name].dtype != spec.dtype:
            return f"{_where(spec)}: {stored[spec.name].dtype}", spec.dtype
        differing = _differing_bytes(source, arrival, trusts=trusts)
        if differing is not None:
            return f"{_where(spec)}: {differing[0]}", differing[1]
    return None


def _where(spec: TensorSpec) -> str:
    return f"{spec.name} at {list(spec.offset)}"


def _differing_bytes(source: Source, arrival: Arrival, *, trusts: bool) -> tuple[str, str] | None:
    live = placed(source)
    place = None if live is None else live.place()
    if live is None or place is None:
        data = memoryview(bytearray(source.nbytes))
        source.copy_into(data)
        return arrival.differing(data)
    return None if trusts and arrival.is_at(place) else arrival.differing(live.memory())


def _stored_form(saved: SavedState, name: str, *, is_split: bool) -> Any:
    """Return the plain tree that an item was given, in JSON form."""
    if not is_split and name not in saved.derived and name in saved.forms:
        return saved.forms[name]
    return encode_plain(saved.items[name].plain)


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


def _first_difference(stored: Any, live: Any) -> tuple[str, str]:
    """Return what is expected and found at the first place where two trees differ, the former with its path."""
    # Two forms of one value are told apart by their own text.
    forms = [(stored, live)]
    with suppress(CorruptionError):
        # What was read here and cannot be decoded is no damage of the checkpoint.
        forms.insert(0, (decode_plain(stored), decode_plain(live)))
    for one in chain.from_iterable(differing_values(*pair) for pair in forms):
        return (f"{one.path[-_LONGEST_PATH:]}: {one.first}" if one.path else one.first), one.second
    raise InternalError("two trees differ and are equal at every place", found=str(live)[:_LONGEST_PATH])
