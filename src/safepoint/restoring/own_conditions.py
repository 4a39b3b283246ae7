"""The saved conditions that one rank is compared with: its own where ranks had others, else those of all.

On as many ranks each is compared with the rank of its number. On another number of ranks none is the rank that it was:
what any rank had is no difference, and otherwise all that there was is named.

Spec: F7.8.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import msgspec

from safepoint.contract import configuration_reasons, differing_leaves
from safepoint.format.manifest import Conditions, RankConditions

# What a reason tells of a key that one side does not have.
_ABSENT = "absent"

_Part = Mapping[str, Any]


def compared_with(saved: Conditions, current: Conditions, *, rank: int) -> Conditions:
    """Return the saved conditions that those of a rank are compared with.

    Args:
        saved: The conditions of a manifest.
        current: Those of the rank, now.
        rank: Its number.

    Spec: F7.8.
    """
    others = saved.ranks or ()
    if not others:
        return saved
    if saved.world_size == current.world_size:
        own = next((one for one in others if rank in one.ranks), None)
        return saved if own is None else _with(saved, own)
    return _nearest([saved, *(_with(saved, one) for one in others)], current)


def _with(saved: Conditions, own: RankConditions) -> Conditions:
    return msgspec.structs.replace(
        saved,
        environment=_overlaid(saved.environment, own.environment),
        structure=_overlaid(saved.structure, own.structure),
        configuration=_overlaid(saved.configuration, own.configuration),
        datasets=_overlaid(saved.datasets, own.datasets),
        global_batch=saved.global_batch if own.global_batch is msgspec.UNSET else own.global_batch,
    )


def _overlaid(common: _Part, own: _Part) -> dict[str, Any]:
    return {key: value for key, value in {**common, **own}.items() if value is not None}


def _nearest(wholes: Sequence[Conditions], current: Conditions) -> Conditions:
    """Return of everything what some rank had and is now, or else what the lowest rank had."""
    batches = [one.global_batch for one in wholes if one.global_batch is not None]
    return msgspec.structs.replace(
        wholes[0],
        environment=_nearest_texts([one.environment for one in wholes], current.environment),
        structure=_nearest_values([one.structure for one in wholes], current.structure, operator.eq),
        configuration=_nearest_values([one.configuration for one in wholes], current.configuration, _is_set_alike),
        datasets=_nearest_values([one.datasets for one in wholes], current.datasets, _is_equal),
        global_batch=current.global_batch if current.global_batch in batches else next(iter(batches), None),
    )


def _nearest_texts(parts: Sequence[Mapping[str, str]], current: Mapping[str, str]) -> dict[str, str]:
    nearest = {}
    for key in dict.fromkeys(key for part in parts for key in part):
        texts = list(dict.fromkeys(part.get(key, _ABSENT) for part in parts))
        now = current.get(key, _ABSENT)
        nearest[key] = now if now in texts else " or ".join(texts)
    return {key: text for key, text in nearest.items() if text != _ABSENT}


def _nearest_values(parts: Sequence[_Part], current: _Part, is_alike: Callable[[Any, Any], bool]) -> dict[str, Any]:
    nearest = {}
    for name in dict.fromkeys(name for part in parts for name in part):
        values = [part[name] for part in parts if name in part]
        alike = [value for value in values if name in current and is_alike(value, current[name])]
        nearest[name] = [*alike, *values][0]
    return nearest


def _is_set_alike(saved: Any, current: Any) -> bool:
    return not configuration_reasons({"item": saved}, {"item": current})


def _is_equal(saved: Any, current: Any) -> bool:
    return not differing_leaves(saved, current)
