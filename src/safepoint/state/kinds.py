"""Kinds that a program declares for what it registers, in place of those that a save finds."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Kind = Literal["per_rank", "replicated", "sharded"]


@dataclass(frozen=True, slots=True)
class Declared:
    """Pair a live object with the kind of its state."""

    entry: object
    kind: Kind


def per_rank(entry: object) -> Declared:
    """Declare that each rank has a state of its own of this object, also where the states happen to be equal.

    On another number of ranks it belongs to nobody: it is derived, permitted by its name, or refused. Modules and
    optimizers cannot be declared so.
    """
    return Declared(entry, "per_rank")


def replicated(entry: object) -> Declared:
    """Declare that the state of this object is the same on all ranks; a save that finds another one is aborted."""
    return Declared(entry, "replicated")


def sharded(entry: object) -> Declared:
    """Declare that ranks hold parts of this object's tensors; a save that finds all of them whole is aborted."""
    return Declared(entry, "sharded")
