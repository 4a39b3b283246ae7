"""Which item stands for which kind of live object."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import numpy as np
import torch
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from safepoint.errors import RequestError
from safepoint.state.glance import Glances
from safepoint.state.item import Item
from safepoint.state.modules import ModuleItem
from safepoint.state.optimizers import OptimizerItem
from safepoint.state.randomness import GeneratorItem
from safepoint.state.scalers import ScalerItem
from safepoint.state.schedulers import SchedulerItem
from safepoint.state.stateful import PLAIN_CONTAINERS, PlainItem, Stateful, StatefulItem


@dataclass(frozen=True, slots=True)
class Surroundings:
    """Give an item access to what else is registered; asked at each use, because objects may be registered later.

    `glances` are how all of them look at modules.
    """

    parameters: Callable[[], Mapping[str, torch.Tensor]]
    optimizers: Callable[[], Mapping[str, OptimizerItem]]
    glances: Glances = field(default_factory=Glances)


def make_item(name: str, entry: object, *, surroundings: Surroundings) -> Item:
    """Return the item for a live object, chosen by its type.

    Args:
        name: The item's name.
        entry: The live object. A type that torch knows gets special care; anything else needs `state_dict` and
            `load_state_dict`.
        surroundings: Parameters and optimizers registered so far.

    Raises:
        RequestError: The object has no state that can be captured.
    """
    if isinstance(entry, torch.nn.Module):
        return ModuleItem(name, entry, surroundings.glances)
    if isinstance(entry, torch.optim.Optimizer):
        return OptimizerItem(name, entry, surroundings.parameters)
    if isinstance(entry, LRScheduler | ReduceLROnPlateau):
        return SchedulerItem(name, entry, surroundings.optimizers)
    if isinstance(entry, torch.amp.GradScaler):
        return ScalerItem(name, entry)
    if isinstance(entry, torch.Generator | np.random.Generator | np.random.RandomState):
        return GeneratorItem(name, entry)
    if isinstance(entry, random.Random) and not isinstance(entry, random.SystemRandom):
        return GeneratorItem(name, entry)
    if type(entry) in PLAIN_CONTAINERS:
        return PlainItem(name, entry)  # type: ignore[arg-type]  # the line above says which types these are
    if isinstance(entry, Stateful) and not isinstance(entry, type):
        return StatefulItem(name, entry)
    raise RequestError(
        "an object cannot be captured",
        where=name,
        expected="a module, optimizer, learning-rate scheduler, GradScaler, torch.Generator, numpy generator, "
        "random.Random, dict, list, or an object with state_dict() and load_state_dict()",
        found=f"{type(entry).__module__}.{type(entry).__qualname__}",
        remedy="Give it these two methods, or keep what must survive in a dict and register that.",
    )
