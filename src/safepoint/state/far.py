"""Far memory: what lies on accelerators, as the phases see it, and what carries it to host memory and back.

This file knows nothing of torch, so that every order in which a device may do its work can be played without one.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from safepoint.state.item import Held, Source, Target


class Trip(Protocol):
    """Bytes on their way between accelerators and host memory, both of which are kept until they have arrived."""

    def hold_back(self) -> None:
        """Have what this thread gives the accelerators from here on wait until they have arrived; return at once."""

    def wait(self) -> None:
        """Return when they have arrived."""


class Comparison(Trip, Protocol):
    """Far memory on its way to be compared with host memory."""

    def found(self) -> Sequence[bool | None]:
        """Wait, and return of each source whether every byte was equal; None where a device had no room for that."""


class Carrier(Protocol):
    """Copy between accelerators and host memory, beside what the training has the accelerators do.

    It is made at a boundary, in the thread of the training. What it does comes after all that this thread had given the
    accelerators by then, and in the order in which it is asked; any thread may ask. Only from the memory of sources
    that lie on its accelerators.
    """

    def follow(self) -> None:
        """Let what is asked for from here on come after all that this thread has given the accelerators."""

    def hold(self, sources: Sequence[Any]) -> list[Held | None]:
        """Return where the bytes of each lie, and keep them there; None where they do not lie as they are stored."""

    def fetch(self, sources: Sequence[Any], memory: memoryview, begins: Sequence[int]) -> Trip:
        """Bring the bytes of each to its place in host memory.

        Args:
            sources: They are not looked at for writes.
            memory: Writable.
            begins: Where in it the bytes of each begin.
        """

    def sample(
        self, sources: Sequence[Any], places: Sequence[Sequence[int]], size_bytes: int, memory: memoryview
    ) -> Trip:
        """Bring some bytes of each to host memory, one after the other.

        Args:
            sources: Held ones.
            places: Where the bytes begin in each; all but the last one at equal distances.
            size_bytes: How many from each place.
            memory: Of just that size.
        """

    def compare(self, sources: Sequence[Any], memory: memoryview, begins: Sequence[int]) -> Comparison:
        """Compare the bytes of each with those at its place in host memory; the sources are held ones."""

    def put(self, targets: Sequence[Any], begins: Sequence[int], parts: Sequence[memoryview]) -> Trip:
        """Bring host memory to its places in the memory of targets on the accelerators.

        Args:
            targets: Those of `far_targets`; one may be named several times.
            begins: Where in the bytes of each its part begins.
            parts: The parts; they are read until they have arrived.
        """

    def pin(self, memory: memoryview) -> Callable[[], object]:
        """Let the accelerators reach host memory by themselves, where they can; return what ends that.

        It must be ended before the memory is given back.
        """

    def wait(self) -> None:
        """Return when nothing that was asked for is under way any more, also where asking failed."""


@dataclass(frozen=True, slots=True)
class Far:
    """Hold which of some sources lie on accelerators, by number in rising order, and what carries their bytes."""

    numbers: tuple[int, ...]
    carrier: Carrier


def far_among(sources: Sequence[Source], kept: dict[Any, Any]) -> Far | None:
    """Return which sources lie on accelerators from which bytes can be carried beside the training; None for none.

    To be asked at a boundary, in the thread of the training: see `Carrier`.

    Args:
        sources: Those of one save.
        kept: Empty at first, and handed on from save to save: streams of their own would take memory of their own.
    """
    kinds: set[Any] = set(map(type, sources))
    if len(kinds) == 1:
        (kind,) = kinds
        # A type of sources says so for all of them: asking each takes longer than to copy a small tensor.
        return kind.far(sources, kept) if hasattr(kind, "far") else None
    for kind in (one for one in kinds if hasattr(one, "far")):
        numbers = [number for number, source in enumerate(sources) if type(source) is kind]
        found: Far | None = kind.far([sources[number] for number in numbers], kept)
        if found is not None:
            return Far(tuple(numbers[number] for number in found.numbers), found.carrier)
    return None


def far_targets(targets: Sequence[Target]) -> Far | None:
    """Return which targets lie on accelerators to which bytes can be brought as they are stored; None for none.

    Such a target has the memory that takes them as its `landing`, made here if need be. To be asked in the thread of
    the training: see `Carrier`.
    """
    numbers = [number for number, one in enumerate(targets) if getattr(one, "landing", None) is not None]
    if not numbers:
        return None
    first: Any = targets[numbers[0]]
    return Far(tuple(numbers), first.carrier([targets[number] for number in numbers]))


def pinned(owner: object, carrier: Carrier, memory: memoryview) -> Callable[[], object]:
    """Pin memory until its owner is gone, or what this returns is called."""
    end = weakref.finalize(owner, carrier.pin(memory))
    # With the process all of it goes, and the accelerators may be gone before.
    end.atexit = False
    return end
