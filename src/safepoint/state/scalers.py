"""Gradient scalers as items.

A scaler makes its scale and its growth count lazily, at the first `scale()`. Both come back as they were: made, so that
the first `unscale_()` after a restore finds them, or not made yet.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from safepoint.errors import Difference
from safepoint.format.stencil import encode_text
from safepoint.state.item import CapturedItem, Permits, SavedItem, Target
from safepoint.state.stored import malformed, reading, record


class ScalerItem:
    """Capture and restore a `torch.amp.GradScaler`."""

    type = "scaler"

    def __init__(self, name: str, scaler: torch.amp.GradScaler) -> None:
        self._name = name
        # Any, because the lazily made tensors are private to torch and have no other access.
        self._scaler: Any = scaler

    @property
    def name(self) -> str:
        """Return the item's name, as registered."""
        return self._name

    def capture(self) -> CapturedItem:
        """Return the scaler's own state, and whether its tensors are made."""
        state = self._scaler.state_dict()
        return CapturedItem(self.type, encode_text({"state": state, "made": self._scale() is not None}, path=self.name))

    def check(self, saved: SavedItem) -> Sequence[Difference]:
        """Return a difference when one side is enabled and the other is not."""
        if saved.type != self.type:
            return [Difference(f"{self._name}.type", self._name, saved.type, self.type)]
        before, now = bool(_parse(saved, self._name)[0]), self._scaler.is_enabled()
        if before == now:
            return []
        text = {True: "enabled", False: "disabled"}
        return [Difference(f"{self._name}.enabled", self._name, text[before], text[now])]

    def targets(self, saved: SavedItem, permits: Permits) -> Mapping[str, Target]:
        """Return nothing: the state has no tensors."""
        return {}

    def apply(self, saved: SavedItem, permits: Permits) -> Sequence[str]:
        """Set scale, factors and growth count, made or not as they were."""
        (state, is_made), is_enabled = _parse(saved, self._name), self._scaler.is_enabled()
        if not state or not is_enabled:
            return ["the scaler"] if is_enabled or state else []
        self._scaler.load_state_dict(state)
        if is_made and self._scale() is None:
            self._scaler._lazy_init_scale_growth_tracker(torch.device(self._scaler._device))
        elif not is_made:
            self._scaler._scale = self._scaler._growth_tracker = None
        return []

    def _scale(self) -> torch.Tensor | None:
        # A disabled scaler has no such attribute.
        scale: torch.Tensor | None = getattr(self._scaler, "_scale", None)
        return scale


def _parse(saved: SavedItem, item: str) -> tuple[dict[str, Any], bool]:
    """Return the scaler's own state, empty for one that is disabled, and whether its tensors were made."""
    whole = record(saved.plain, {"state": dict, "made": bool}, item=item)
    state, is_made = whole["state"], whole["made"]
    if state:
        number = float if is_made else (int, float)
        factors = {"growth_factor": (int, float), "backoff_factor": (int, float), "growth_interval": (int, float)}
        record(state, {"scale": number, **factors, "_growth_tracker": int}, item=item)
        if is_made:
            with reading(item):
                torch.tensor(state["_growth_tracker"], dtype=torch.int32)
                is_exact = torch.tensor(state["scale"], dtype=torch.float32).item() == state["scale"]
            if not is_exact and state["scale"] == state["scale"]:
                raise malformed(item, "a scale of float32", repr(state["scale"]))
    elif is_made:
        raise malformed(item, "a state of a scaler whose tensors are made", "none")
    return state, is_made
