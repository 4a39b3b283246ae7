"""Enrolment: what happens to an object when it becomes an item of the run."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

from safepoint.boundary import Boundary
from safepoint.conditions import Circumstances
from safepoint.due import DueSaves
from safepoint.state.registry import Registry


def enrol(
    entries: Mapping[str, object],
    registry: Registry,
    circumstances: Circumstances,
    boundary: Boundary,
    due: DueSaves,
) -> None:
    """Register objects, all or none; each may refer to any other of them.

    Raises:
        RequestError: A name is taken, or an object cannot be captured.
    """
    registry.add_all(entries)
    try:
        for name in entries:
            circumstances.add(registry.items[name])
            boundary.watch(name, registry.objects[name])
    except BaseException:
        for name in entries:
            circumstances.forget(name)
        raise
    live: list[Any] = [registry.objects[name] for name in entries]
    for entry in live:
        if hasattr(entry, "before_handing"):
            entry.before_handing = partial(due.before_handing, entry)
