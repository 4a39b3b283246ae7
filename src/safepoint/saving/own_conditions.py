"""What the conditions of ranks say that may be each rank's own: where they run, what their parts are, how they are set.

The manifest holds rank 0's. What other ranks have otherwise stands beside it, once for all ranks that have the same.
A rank whose conditions are rank 0's by their digest says nothing of them.

Spec: F7.8.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from safepoint.format.digest import digest_bytes
from safepoint.format.manifest import Conditions, RankConditions


class OwnConditions(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Hold the conditions of a rank that may be its own."""

    environment: dict[str, str]
    structure: dict[str, str]
    configuration: dict[str, dict[str, Any]]
    datasets: dict[str, Any]
    global_batch: int | None


def own_of(conditions: Conditions) -> OwnConditions:
    """Return what may be a rank's own in its conditions."""
    return OwnConditions(
        environment=conditions.environment,
        structure=conditions.structure,
        configuration=conditions.configuration,
        datasets=conditions.datasets,
        global_batch=conditions.global_batch,
    )


def digest_of(own: OwnConditions) -> str:
    """Return a digest that is equal where the conditions are."""
    return digest_bytes(msgspec.json.encode(own))


def with_those_of_ranks(conditions: Conditions, others: Sequence[OwnConditions | None]) -> Conditions:
    """Return rank 0's conditions with what other ranks have otherwise.

    Args:
        conditions: Those of rank 0.
        others: Those of all ranks in their order; None where they are rank 0's.

    Spec: F7.8.
    """
    first = own_of(conditions)
    holders: dict[bytes, list[int]] = {}
    for rank, own in enumerate(others):
        if own is not None:
            holders.setdefault(msgspec.json.encode(_difference(first, own)), []).append(rank)
    holders.pop(msgspec.json.encode(_difference(first, first)), None)
    if not holders:
        return conditions
    found = [msgspec.json.decode(text, type=RankConditions) for text in holders]
    ranks = tuple(
        msgspec.structs.replace(one, ranks=tuple(those)) for one, those in zip(found, holders.values(), strict=True)
    )
    return msgspec.structs.replace(conditions, ranks=ranks)


def _difference(first: OwnConditions, own: OwnConditions) -> RankConditions:
    return RankConditions(
        ranks=(),
        environment=_others(first.environment, own.environment),
        structure=_others(first.structure, own.structure),
        configuration=_others(first.configuration, own.configuration),
        datasets=_others(first.datasets, own.datasets),
        global_batch=msgspec.UNSET if own.global_batch == first.global_batch else own.global_batch,
    )


def _others(first: Mapping[str, Any], own: Mapping[str, Any]) -> dict[str, Any]:
    """Return what one has otherwise than the first, and None for what it does not have."""
    names = dict.fromkeys([*first, *own])
    return {name: own.get(name) for name in names if _text(own.get(name)) != _text(first.get(name))}


def _text(value: Any) -> bytes:
    # By their bytes, for 1 and true are equal to Python.
    return msgspec.json.encode(value)
