"""What moves between a save and the next batch: it is of no checkpoint, for a resumed run goes on with that batch."""

from __future__ import annotations

import logging
from collections.abc import Mapping

import torch

from safepoint.state.item import STREAMS_ITEM
from safepoint.state.memory import versions_of
from safepoint.state.names import held_tensors
from safepoint.state.randomness import RandomStreams

_log = logging.getLogger(__name__)


class Afterwards:
    """Look from each save on at the random streams and at the tensors of modules, up to the next batch.

    Args:
        with_tensors: Whether tensors are looked at; where ranks share them, a framework replaces them between updates.
    """

    def __init__(self, *, with_tensors: bool) -> None:
        self._with_tensors = with_tensors
        self._streams: RandomStreams | None = None
        self._versions: dict[str, tuple[torch.nn.Module, list[int | None]]] = {}
        self.reasons: dict[str, str] = {}

    def watch(self, objects: Mapping[str, object], streams: RandomStreams | None = None) -> None:
        """Begin to look, directly after a save.

        Args:
            objects: The registered objects.
            streams: What was saved of the random streams; as they are now if absent.
        """
        self._streams = streams or RandomStreams.snapshot()
        modules = {name: one for name, one in objects.items() if isinstance(one, torch.nn.Module)}
        self._versions = {name: (one, _versions(one)) for name, one in modules.items() if self._with_tensors}

    def check(self, step: int) -> None:
        """Note in `reasons` what has moved, and warn of it, before the next batch is handed out.

        Args:
            step: The step at which the save was made.
        """
        found = self.moved()
        for word in sorted(found.keys() - self.reasons.keys()):
            _log.warning("a run that resumes from the save of step %d will not be the same: %s", step, found[word])
        self.reasons.update(found)

    def moved(self) -> dict[str, str]:
        """Return what has moved since the look began, by the word for it; nothing where nobody looks."""
        if self._streams is None:
            return {}
        found = {
            f"{name}.late": f"{name!r} was written to after after_update(); do it before"
            for name, (one, versions) in self._versions.items()
            if _versions(one) != versions
        }
        streams = ", ".join(self._streams.moved())
        if streams:
            found[f"{STREAMS_ITEM}.late"] = f"random numbers ({streams}) were drawn after after_update(); draw before"
        return found

    def leave(self) -> None:
        """Look no further."""
        self._streams, self._versions = None, {}

    def forget(self) -> None:
        """Begin anew, after a restore."""
        self.leave()
        self.reasons = {}


def _versions(module: torch.nn.Module) -> list[int | None]:
    return versions_of(held_tensors(module))
