"""A user's probe: numbers that the restored state must give again on a fixed batch."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, cast

from safepoint.errors import Difference, RequestError
from safepoint.format.plain_decoding import decode_plain
from safepoint.state.placement import undisturbed_streams


@dataclass(frozen=True, slots=True)
class Probe:
    """Compute numbers from the live state at a save, and compare them after a restore.

    Args:
        function: Takes nothing and returns a number or a dict of numbers (0-dim tensors too). It must leave the state
            as it is: evaluation mode, no gradients. The random streams are put back for it.
        tolerance: Largest relative difference that is still equal; 0 asks for the same bits.

    Raises:
        RequestError: The function is none, or the tolerance is negative.
    """

    function: Callable[[], Any]
    tolerance: float = 0.0

    def __post_init__(self) -> None:
        if not callable(self.function):
            raise RequestError("a probe is a function that returns numbers", found=type(self.function).__name__)
        if not isinstance(self.tolerance, int | float) or not self.tolerance >= 0:
            raise RequestError(
                "a probe's tolerance is a relative difference", expected="0 or more", found=repr(self.tolerance)
            )

    def measure(self) -> dict[str, float]:
        """Return the numbers, exactly as floats."""
        with undisturbed_streams():
            value = self.function()
        named = value if isinstance(value, Mapping) else {"value": value}
        return {str(name): float(number) for name, number in named.items()}

    def compare(self, saved: Any) -> list[Difference]:
        """Measure again and return every number that is beyond the tolerance.

        Args:
            saved: What the manifest holds: the numbers in JSON form; None when the save had no probe.
        """
        if saved is None:
            return []
        before = cast("dict[str, float]", decode_plain(saved, where="probe"))
        now = self.measure()
        differences = []
        for name in [*before, *(name for name in now if name not in before)]:
            old, new = before.get(name), now.get(name)
            if old is None or new is None or not self._equal(old, new):
                differences.append(Difference("probe", f"probe {name!r}", repr(old), repr(new)))
        return differences

    def _equal(self, old: float, new: float) -> bool:
        if old == new or (old != old and new != new):
            return True
        return abs(old - new) <= self.tolerance * max(abs(old), abs(new))


def as_probe(entry: object) -> Probe | None:
    """Return a probe from what a user gives: a `Probe`, a function, or nothing."""
    if entry is None or isinstance(entry, Probe):
        return entry
    return Probe(entry)  # type: ignore[arg-type]  # what is no function is refused there
