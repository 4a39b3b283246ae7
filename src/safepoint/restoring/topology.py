"""Topology: whether the ranks divide tensors among themselves as they did at the save.

Another division gives the same values, but sums are made in another order after it.

Spec: F7.1.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable

from safepoint.contract import Reason
from safepoint.restoring.validate import SavedState
from safepoint.state.item import Item

_WHOLE = "not divided"


def topology_reasons(saved: SavedState, items: Iterable[Item], *, world_size: int) -> list[Reason]:
    """Return a reason for each item whose tensors this rank divides in a way in which no rank did at the save.

    On another number of ranks there is none: that number is a reason itself, and no division is then the same.

    Args:
        saved: The saved state.
        items: The live items that are restored, in the form in which they are restored into.
        world_size: The number of ranks now.

    Spec: F7.1.
    """
    recorded = saved.manifest.mesh
    if world_size == 1 or saved.manifest.world_size != world_size or not isinstance(recorded, dict):
        return []
    reasons = []
    for item in items:
        before = recorded.get(item.name, [""])
        now = _division_of(item, saved)
        # What the program has not made yet, an object may divide when it takes its state.
        is_open = item.type == "stateful" and not now
        if isinstance(before, list) and now not in before and not is_open:
            sides = " or ".join(str(one) or _WHOLE for one in before), now or _WHOLE
            reasons.append(Reason("topology", "same_data", f"how {item.name!r} is divided", *sides))
    return reasons


def _division_of(item: Item, saved: SavedState) -> str:
    # An object that has no tensors is not asked for its state: for some, to be asked is work.
    is_asked = bool(saved.items[item.name].specs) and "torch.distributed.tensor" in sys.modules
    return item.capture().division if is_asked else ""
