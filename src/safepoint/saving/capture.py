"""Capture: name everything that belongs to this boundary, without copying a tensor yet."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from operator import attrgetter
from typing import Any

from safepoint.contract import Reason
from safepoint.errors import RequestError
from safepoint.format.manifest import Conditions, ProgressRecord
from safepoint.progress import Consumed
from safepoint.state.item import CapturedTensor, Item, Owned
from safepoint.state.snapshot import SnapshotItem, capture_item

_NAME: Callable[[CapturedTensor], str] = attrgetter("spec.name")


@dataclass(frozen=True, slots=True)
class Snapshot:
    """Hold all that a generation will say of one boundary.

    `consumed` is what this rank counts for the totals, if it does; `accepts` says which differences its contract takes;
    `kinds` are those that were declared, by item; `owned` is what optimizers change next.
    """

    progress: ProgressRecord
    items: tuple[SnapshotItem, ...]
    conditions: Conditions
    metrics: Mapping[str, Any]
    probe: Any
    contract: str
    consumed: Consumed | None = None
    accepts: Callable[[Reason], bool] = lambda reason: False
    kinds: Mapping[str, str] = field(default_factory=dict)
    owned: Owned = field(default_factory=Owned)


def capture(items: Sequence[Item], *, told: Callable[[Item], object] = lambda item: None) -> tuple[SnapshotItem, ...]:
    """Return the state of all items at this boundary.

    The plain trees are encoded here, so they cannot change any more; the tensors are read by the stage phase, before
    the boundary is left. Every item is prepared before any is captured: a value that only one rank cannot store must
    not leave the modules of this rank in another form than those of the others.

    Args:
        items: What is captured, in this order.
        told: Called after each item has told its state.

    Raises:
        RequestError: A value cannot be stored, or a tensor's name is no text; named by its path.
    """
    for item in items:
        # To ask isinstance() of a protocol takes as long as to capture a small item.
        prepare: Callable[[], object] | None = getattr(item, "prepare", None)
        if prepare is not None:
            prepare()
    captured = []
    for item in items:
        captured.append(capture_item(item))
        told(item)
    for one in captured:
        if not "".join(map(_NAME, one.tensors)).isascii():
            for tensor in one.tensors:
                _check_text(tensor.spec.name, one.name)
    return tuple(captured)


def _check_text(name: str, item: str) -> None:
    try:
        name.encode("utf-8")
    except UnicodeEncodeError as exc:
        raise RequestError(
            "a tensor's name is not Unicode text",
            where=f"{item}/{ascii(name)[1:-1][:200]}",
            found=ascii(exc.object[exc.start]),
        ) from exc
