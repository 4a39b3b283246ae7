"""Learning-rate schedulers as items.

1. The state is the scheduler's own `state_dict()`. Functions stay those of the code, as torch does; objects with a call
   keep their attributes.
2. Lists with one element for each parameter group follow the groups by the names of their parameters, not by position.
3. After its own state a scheduler has the optimizer set its options once more, so that whatever a constructor wrote
   into the groups (each scheduler takes a first step when it is built) is gone, and restoring twice is restoring
   once. Applied before the optimizer it leaves the last word to that.
4. With ``scheduler`` in `Permits.current`, fields that the code configures otherwise than the checkpoint's code did
   take the code's value; counters stay restored; the rate is computed anew where it has a closed form, and otherwise
   scaled by the ratio of the configured first rates.
"""

from __future__ import annotations

import copy
import functools
import warnings
from bisect import bisect_right
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.optim import lr_scheduler

from safepoint.errors import Difference, RequestError
from safepoint.format.plain import NumpyScalarLeaf, Same, ScalarLeaf, Shared, TensorLeaf, ViewLeaf
from safepoint.state.groups import recorded_order
from safepoint.state.item import CapturedItem, Permits, SavedItem, Target
from safepoint.state.memo import Memo
from safepoint.state.merging import set_option
from safepoint.state.optimizers import OptimizerItem
from safepoint.state.rebuild import check_plain
from safepoint.state.sight import Sight
from safepoint.state.stored import elements, field, malformed, reading, record
from safepoint.state.targets import NewTensorTarget
from safepoint.state.tree import class_name, draft_of, flatten, unflatten

_PER_GROUP = frozenset(
    {"base_lrs", "_last_lr", "min_lrs", "max_lrs", "base_momentums", "max_momentums", "swa_lrs", "lr_lambdas"}
)
_WHOLE = frozenset({"last_epoch", "_step_count"})
_NUMBERS = (int, float, bool, complex, ScalarLeaf, TensorLeaf, ViewLeaf, NumpyScalarLeaf, Same, Shared)
_COUNTERS = frozenset(
    {
        "last_epoch",
        "_step_count",
        "T_cur",
        "T_i",
        "best",
        "num_bad_epochs",
        "cooldown_counter",
        "_last_lr",
        "_is_initial",
        "_get_lr_called_within_step",
    }
)
# Their get_lr() depends on the count of steps and the configuration alone.
_CLOSED = (
    lr_scheduler.LambdaLR,
    lr_scheduler.OneCycleLR,
    lr_scheduler.CyclicLR,
    lr_scheduler.CosineAnnealingWarmRestarts,
)


class SchedulerItem:
    """Capture and restore a scheduler.

    Args:
        name: The item's name.
        scheduler: The live scheduler.
        optimizers: Returns the items of the registered optimizers; asked at each use, because they may be registered
            later than the scheduler.
    """

    type = "scheduler"

    def __init__(self, name: str, scheduler: Any, optimizers: Callable[[], Mapping[str, OptimizerItem]]) -> None:
        self._name = name
        self._scheduler = scheduler
        self._memo = Memo(name, self.type)
        self._optimizers = optimizers
        self._targets: dict[str, NewTensorTarget] = {}
        self._recorded: list[tuple[str, ...]] = []
        self._fields = _as_numbers(_plain(scheduler.state_dict()))
        self._configured = _configured(scheduler)
        # What the live schedule follows: the code's configuration, or after a restore the checkpoint's.
        self._effective = self._configured

    @property
    def name(self) -> str:
        """Return the item's name, as registered."""
        return self._name

    def configuration(self) -> object:
        """Return class and state as they were at registration."""
        return flatten({"class": _class_of(self._scheduler), "state": self._configured}, path=self._name)[0]

    def capture(self) -> CapturedItem:
        """Return class, optimizer, groups, configuration and state."""
        optimizer = self._optimizer()
        live = optimizer.group_names()
        order = recorded_order(live, self._recorded)
        whole = {
            "class": _class_of(self._scheduler),
            "optimizer": optimizer.name,
            "groups": [sorted(live[index]) for index in order],
            "state": dict(sorted(_arranged(_plain(self._scheduler.state_dict()), order).items())),
            "configured": _arranged(self._effective, order),
            "has_stepped": bool(getattr(optimizer.optimizer, "_opt_called", False)),
        }
        sight = Sight.of(whole, self._memo.traits)
        return self._memo.captured(sight, lambda: draft_of(whole, sight, path=self._name))

    def check(self, saved: SavedItem) -> Sequence[Difference]:
        """Return differences of class (of the schedulers inside too) and of the optimizer that it drives."""
        if saved.type != self.type:
            return [Difference(f"{self._name}.type", self._name, saved.type, self.type)]
        parsed = _parse(saved, self._name)
        pairs = [
            ("type", parsed.class_name, _class_of(self._scheduler)),
            ("optimizer", parsed.optimizer, self._optimizer().name),
        ]
        found = [(f"{self._name}.{word}", self._name, before, now) for word, before, now in pairs if before != now]
        found += self._compare_groups(parsed)
        if not found:
            is_of_torch = type(self._scheduler).__module__.startswith("torch.")
            fields = _compare_fields(parsed.state, self._fields, is_of_torch=is_of_torch)
            found += [(f"{self._name}.state", f"{self._name}.{key}", before, now) for key, before, now in fields]
            if not found and type(self._scheduler) is lr_scheduler.ReduceLROnPlateau:
                _try_plateau(self._scheduler, parsed.state, self._name)
        return [Difference(*one) for one in found]

    def targets(self, saved: SavedItem, permits: Permits) -> Mapping[str, Target]:
        """Return a target for each tensor of the state; there are none unless a learning rate is one."""
        self._targets = {name: NewTensorTarget(spec, torch.device("cpu")) for name, spec in saved.specs.items()}
        return dict(self._targets)

    def apply(self, saved: SavedItem, permits: Permits) -> Sequence[str]:
        """Load the state and set the groups' options again; return what was decided about the rate, if anything."""
        tensors = {name: target.tensor for name, target in self._targets.items() if target.tensor is not None}
        self._targets = {}
        parsed, whole = _parse(saved, self._name), unflatten(saved.plain, tensors)
        optimizer, groups = self._optimizer(), parsed.groups
        order = _live_order(optimizer.group_names(), groups)
        state, configured = _arranged(whole["state"], order), _arranged(whole["configured"], order)
        takes_code = "scheduler" in permits.current
        changed = _take_configured(state, configured, self._configured) if takes_code else []
        self._scheduler.load_state_dict(_like(state, self._scheduler.state_dict()))
        # torch notes on the optimizer that it has stepped, and warns of a schedule that steps before it.
        optimizer.optimizer._opt_called = parsed.has_stepped  # type: ignore[attr-defined]  # as torch sets it
        self._recorded = groups
        self._effective = self._configured if takes_code else configured
        settle = functools.partial(_set_rates, self._scheduler, configured, self._configured)
        optimizer.settle_with(self._name, settle if changed else None)
        optimizer.reapply_hyperparameters()
        if not changed:
            return []
        how = _how(self._scheduler, configured, self._configured)
        return [f"{self._name}: {', '.join(changed)} as configured now, not as saved; {how}"]

    def count(self) -> int | None:
        """Return how many steps the scheduler has counted."""
        count = getattr(self._scheduler, "last_epoch", None)
        return count if type(count) is int else None

    def _compare_groups(self, saved: _Saved) -> list[tuple[str, str, str, str]]:
        """Return, in the optimizer's own words, parameters that came and groups that were made anew."""
        optimizer = self._optimizer()
        live = optimizer.group_names()
        before, now = ({name for names in side for name in names} for side in (saved.groups, live))
        there, here = (sorted(sorted({*names} & before & now) for names in side) for side in (saved.groups, live))
        if [names for names in there if names] != [names for names in here if names]:
            return [(f"{optimizer.name}.groups", self._name, f"{len(saved.groups)} groups", f"{len(live)} groups")]
        return [(f"{optimizer.name}.added", name, "absent", "optimised") for name in sorted(now - before)]

    def _optimizer(self) -> OptimizerItem:
        for item in self._optimizers().values():
            if item.optimizer is self._scheduler.optimizer:
                return item
        raise RequestError(
            "a scheduler drives an optimizer that is not registered",
            where=self._name,
            expected=f"one of {', '.join(self._optimizers()) or 'the registered optimizers (there are none)'}",
            found=f"another {type(self._scheduler.optimizer).__qualname__}",
            remedy="Register the scheduler's optimizer, or build the scheduler from the registered one.",
        )


def _try_plateau(live: Any, state: Any, item: str) -> None:
    """Load a state into a copy: this schedule alone computes some of its fields from others, and refuses some."""
    with reading(item):
        trial = copy.copy(live)
        trial.load_state_dict(state)
        if trial.mode_worse != state["mode_worse"]:
            raise malformed(f"{item}.mode_worse", str(trial.mode_worse), str(state["mode_worse"])[:80])


def _class_of(scheduler: Any) -> str:
    inner = getattr(scheduler, "_schedulers", ())
    return class_name(scheduler) + (f"[{', '.join(_class_of(one) for one in inner)}]" if inner else "")


def _plain(state: Any) -> Any:
    """Return a scheduler's state with Counters (milestones) as dicts, which they become again in `_like`."""
    if isinstance(state, Counter):
        return dict(state)
    if type(state) is dict:
        return {key: _plain(value) for key, value in state.items()}
    return [_plain(value) for value in state] if type(state) is list else state


def _like(state: Any, live: Any) -> Any:
    if isinstance(live, Counter):
        return Counter(state)
    if type(state) is dict and type(live) is dict:
        return {key: _like(value, live.get(key)) for key, value in state.items()}
    if type(state) is list and type(live) is list and len(state) == len(live):
        return [_like(value, new) for value, new in zip(state, live, strict=True)]
    return state


def _configured(scheduler: Any) -> Any:
    """Return what the code chose: the state at registration without its counters."""
    return _without_counters(_as_numbers(_plain(scheduler.state_dict())))


def _without_counters(state: Any) -> Any:
    if type(state) is not dict:
        return state
    kept = {key: value for key, value in sorted(state.items()) if key not in _COUNTERS}
    if "_schedulers" in kept:
        kept["_schedulers"] = [_without_counters(inner) for inner in kept["_schedulers"]]
    return kept


def _as_numbers(state: Any) -> Any:
    """Return a copy without tensors, to be kept and compared."""
    if isinstance(state, torch.Tensor):
        return state.tolist()
    if type(state) is dict:
        return {key: _as_numbers(value) for key, value in state.items()}
    return [_as_numbers(value) for value in state] if type(state) is list else state


def _live_order(live: Sequence[tuple[str, ...]], saved: Sequence[tuple[str, ...]]) -> list[int]:
    """Return for each live group the saved one that it continues, then the saved ones that have no live group yet."""
    place = {name: index for index, names in enumerate(saved) for name in names}
    found = [next((place[name] for name in names if name in place), -1) for names in live]
    order = [index for index in found if index >= 0]
    return order + [index for index in range(len(saved)) if index not in order]


def _arranged(state: Any, order: Sequence[int]) -> Any:
    """Return the state with its lists of one element per group in another order."""
    if type(state) is not dict:
        return state
    arranged = {}
    for key, value in state.items():
        if key in _PER_GROUP and type(value) is list and len(value) == len(order):
            value = [value[index] for index in order]
        elif key == "_schedulers" and type(value) is list:
            value = [_arranged(inner, order) for inner in value]
        arranged[key] = value
    return arranged


def _take_configured(state: dict[str, Any], saved: Mapping[str, Any], live: Mapping[str, Any]) -> list[str]:
    """Put live configured values into a restored state where the two configurations differ; return the fields."""
    changed: list[str] = []
    for key, value in live.items():
        if key == "_schedulers":
            for inner, old, new in zip(state.get(key, []), saved.get(key, []), value, strict=False):
                changed += _take_configured(inner, old, new)
        elif key in state and key in saved and saved[key] != value:
            state[key] = value
            changed.append(key)
    return list(dict.fromkeys(changed))


def _how(scheduler: Any, saved: Mapping[str, Any], live: Mapping[str, Any]) -> str:
    if _has_closed_form(scheduler):
        return "the rate is computed from the count of steps"
    if _ratios(saved, live):
        return "the rate is scaled by the ratio of the configured first rates"
    return "the rate stays as saved until the next step of the scheduler"


def _set_rates(scheduler: Any, saved: Mapping[str, Any], live: Mapping[str, Any]) -> None:
    """Set each group's rate to that of the schedule as configured now."""
    groups = scheduler.optimizer.param_groups
    rates, ratios = _closed_form(scheduler), _ratios(saved, live)
    if rates is None and len(ratios) == len(groups):
        rates = [group["lr"] * ratio for group, ratio in zip(groups, ratios, strict=True)]
    for group, rate in zip(groups, rates or (), strict=False):
        set_option(group, "lr", rate)
    scheduler._last_lr = [group["lr"].clone() if hasattr(group["lr"], "clone") else group["lr"] for group in groups]


def _has_closed_form(scheduler: Any) -> bool:
    if isinstance(scheduler, lr_scheduler.SequentialLR):
        return _has_closed_form(_active(scheduler))
    return hasattr(scheduler, "_get_closed_form_lr") or isinstance(scheduler, _CLOSED)


def _active(scheduler: Any) -> Any:
    return scheduler._schedulers[bisect_right(scheduler._milestones, scheduler.last_epoch)]


def _closed_form(scheduler: Any) -> list[Any] | None:
    if not _has_closed_form(scheduler):
        return None
    if isinstance(scheduler, lr_scheduler.SequentialLR):
        return _closed_form(_active(scheduler))
    if hasattr(scheduler, "_get_closed_form_lr"):
        return list(scheduler._get_closed_form_lr())
    with warnings.catch_warnings():
        # torch warns when get_lr() is called outside of step(), because for other schedulers the answer is misleading.
        warnings.simplefilter("ignore")
        return list(scheduler.get_lr())


def _ratios(saved: Mapping[str, Any], live: Mapping[str, Any]) -> list[float]:
    before, now = _first_rates(saved), _first_rates(live)
    return [new / old for old, new in zip(before, now, strict=False)] if all(before) else []


def _first_rates(configured: Mapping[str, Any]) -> list[float]:
    inner = configured.get("_schedulers")
    return _first_rates(inner[0]) if inner else list(configured.get("base_lrs", ()))


@dataclass(frozen=True, slots=True)
class _Saved:
    """Hold a stored tree, parsed."""

    class_name: str
    optimizer: str
    groups: list[tuple[str, ...]]
    state: Any
    configured: Any
    has_stepped: bool


def _parse(saved: SavedItem, item: str) -> _Saved:
    kinds = {"class": str, "optimizer": str, "groups": list, "state": dict, "configured": dict, "has_stepped": bool}
    whole = record(saved.plain, kinds, item=item)
    check_plain(saved.plain, saved.specs, item=item)
    groups = [tuple(elements(names, str, item=item)) for names in elements(whole["groups"], list, item=item)]
    if any(list(names) != sorted(set(names)) for names in groups):
        raise malformed(f"{item}.groups", "names in order", str(groups)[:120])
    _check_fields(whole["state"], item)
    _check_fields(whole["configured"], item)
    return _Saved(whole["class"], whole["optimizer"], groups, whole["state"], whole["configured"], whole["has_stepped"])


def _check_fields(state: dict[Any, Any], item: str) -> None:
    """Check the names of fields, and the types of those that torch's own schedulers compute with."""
    if elements(list(state), str, item=item) != sorted(state):
        raise malformed(item, "fields in order", ", ".join(state)[:120])
    for key in _WHOLE & set(state):
        field(state, key, int, item=item)
    for key in _PER_GROUP & set(state):
        for value in field(state, key, list, item=item):
            if type(value) not in ((type(None), dict) if key == "lr_lambdas" else _NUMBERS):
                raise malformed(f"{item}.{key}", "a number for each group", type(value).__name__)
    if "_schedulers" in state:
        for inner in field(state, "_schedulers", list, item=item):
            if type(inner) is not dict:
                raise malformed(f"{item}._schedulers", "a state for each", type(inner).__name__)
            _check_fields(dict(sorted(inner.items())), item)


def _compare_fields(state: Any, fields: Any, *, is_of_torch: bool) -> list[tuple[str, str, str]]:
    """Return (field, saved, now) where a stored state lacks a field or holds another kind of value in it.

    `fields` is the state at registration. An own class may change what its fields hold; torch's do not.
    """
    found = []
    for key, value in fields.items():
        if key not in state:
            found.append((key, "absent", _kind(value)))
        elif key in ("_schedulers", "lr_lambdas") and len(state[key]) != len(value):
            found.append((key, f"{len(state[key])} elements", f"{len(value)} elements"))
        elif key == "_schedulers":
            for inner, now in zip(state[key], value, strict=True):
                found += _compare_fields(inner, now, is_of_torch=is_of_torch)
        elif is_of_torch and value is not None and state[key] is not None and _kind(state[key]) != _kind(value):
            found.append((key, _kind(state[key]), _kind(value)))
    return found


def _kind(value: Any) -> str:
    value = value.value if isinstance(value, Shared) else value
    if isinstance(value, torch.Tensor | Same) or type(value) in _NUMBERS:
        return "number"
    return "list" if type(value) is tuple else type(value).__name__
