"""Which older checkpoint would do, where the one that a start takes says of itself that the contract refuses it.

What is told is what records say: the items of the older one are compared, and its bytes read, only when it is restored.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

from safepoint.catalog import GenerationState, Lineage, examine, list_generations
from safepoint.contract import Contract, lacking
from safepoint.errors import ContractError, advise
from safepoint.format.asked import arguments_of
from safepoint.format.manifest import Conditions, Manifest
from safepoint.restoring.promise import judged
from safepoint.state.item import Item
from safepoint.storage.base import Storage

# A start that is refused in any case does not read the records of a long run for it.
_MOST_LOOKED_AT = 100


class Asking(Protocol):
    """What asks for a restore; see `RestoreContext`."""

    @property
    def storage(self) -> Storage: ...
    @property
    def items(self) -> Mapping[str, Item]: ...
    @property
    def contract(self) -> Contract: ...
    @property
    def conditions(self) -> Conditions | None: ...
    @property
    def source(self) -> str: ...


def older_that_keeps(asking: Asking, lineage: Lineage, chosen: Manifest) -> str:
    """Return how to take the newest older live checkpoint that keeps the contract, as far as its record tells.

    Nothing where the chosen one does not say of itself that it is refused, or no such one is found.
    """
    if asking.conditions is None or not lacking(chosen.conditions.reasons, asking.contract.accepts):
        return ""
    live = [name for name in list_generations(asking.storage) if lineage.is_live(name)]
    older = [name for name in live if name.step <= chosen.step and str(name) != chosen.generation]
    for name in older[:_MOST_LOOKED_AT]:
        found = examine(asking.storage, name, lineage)
        if found.state is GenerationState.COMMITTED and found.manifest is not None:
            promise = judged(found.manifest, asking.conditions, asking.items, rank=0)
            if all(map(asking.contract.accepts, promise.reasons)):
                asked = arguments_of(live)[name]
                wish = f"source='{asking.source}@{asked}'" if asking.source else f"step={asked!r}, branch=True"
                return f"Step {name.step}, which is older, keeps it by what its record tells: restore({wish})."
    return ""


def name_older(error: ContractError, chosen: Manifest, older: str) -> None:
    """Have a refusal name the older one, where all that is refused is what the chosen one says of itself."""
    if older and {difference.word for difference in error.differences} <= chosen.conditions.reasons.keys():
        advise(error, f"{error.remedy} {older}")
