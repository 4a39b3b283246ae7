"""Optimizers as items: state and hyper-parameters by the name of the parameter.

1. The state is walked from `param_groups` and `state`. `step()`, `state_dict()` hooks and `load_state_dict()` hooks
   never run, and nothing is initialised: a parameter that was never stepped has no state, before and after.
2. Parameters are matched by name, whatever their order and grouping in the list. Within a group the live list takes the
   stored order, because LBFGS flattens its parameters in that order; the order of the groups stays the live one.
3. dtype and device kind of each state tensor are its own, whatever those of its parameter. State that lay on its
   parameter's kind of device follows the parameter.
4. A live state tensor that fits is filled in place; a tensor option (a capturable `lr`) too. Any other is made anew:
   divided over the ranks like its parameter, if that is. The state of a parameter that is not here is not read.
5. An optimizer whose class overrides `state_dict` may keep more than `state` and `param_groups`: what it adds there is
   stored as well and handed back through its `load_state_dict`, before rules 1 to 4 set the rest exactly.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from safepoint.errors import Difference, RequestError
from safepoint.state.draft import Draft, NamedTensors
from safepoint.state.groups import (
    SCHEDULED_OPTIONS,
    Matching,
    SavedGroup,
    check_numbers,
    compare_options,
    match_groups,
)
from safepoint.state.item import CapturedItem, Permits, SavedItem, TensorTarget
from safepoint.state.memo import Memo
from safepoint.state.merging import leaves_of, reorder, set_option, set_step, unshared_names
from safepoint.state.numbers import highest
from safepoint.state.optimizer_tree import (
    SavedOptimizer,
    TreeSight,
    options_of,
    parse_optimizer,
    plain_options_of,
    states_of,
    tree_of,
)
from safepoint.state.owners import Owner, absent_of, divided, kinds_of, owners_of
from safepoint.state.rebuild import Rebuilder, to_kind
from safepoint.state.refill import PlainStates, plain_states, put_states
from safepoint.state.shards import ShardTarget, new_target, target_in
from safepoint.state.sight import Sight
from safepoint.state.stored import malformed
from safepoint.state.targets import InPlaceTarget, NewTensorTarget
from safepoint.state.tensors import check_storable, specs_of
from safepoint.state.tree import class_name, draft_of, flatten

_NOBODY = Owner()


@dataclass(frozen=True, slots=True)
class _Look:
    """Hold what a saved item says, and what it was compared with: the parameters by name, and the live groups."""

    saved: SavedItem
    stored: SavedOptimizer
    named: Mapping[str, torch.Tensor]
    matching: Matching


class OptimizerItem:
    """Capture and restore an optimizer.

    Args:
        name: The item's name.
        optimizer: The live optimizer.
        parameters: Returns the parameters of all registered modules by qualified name, ``item/name``; asked at each
            use, because modules may be registered later.
    """

    type = "optimizer"

    def __init__(
        self,
        name: str,
        optimizer: torch.optim.Optimizer,
        parameters: Callable[[], Mapping[str, torch.Tensor]],
    ) -> None:
        self._name = name
        self._optimizer = optimizer
        self._parameters = parameters
        self._memo = Memo(name, self.type)
        self._sight = TreeSight()
        self._look: _Look | None = None
        self._targets: dict[str, InPlaceTarget | NewTensorTarget | ShardTarget] = {}
        self._restored: dict[str, torch.Tensor] = {}
        self._recorded: list[tuple[str, ...]] = []
        self._settlers: dict[str, Callable[[], object]] = {}
        self._applied: tuple[SavedOptimizer, Permits] | None = None
        self._configured = [(len(group["params"]), plain_options_of(group, name)) for group in optimizer.param_groups]

    @property
    def name(self) -> str:
        """Return the item's name, as registered."""
        return self._name

    @property
    def optimizer(self) -> torch.optim.Optimizer:
        """Return the live optimizer."""
        return self._optimizer

    def configuration(self) -> object:
        """Return class and hyper-parameters as they were at registration; `lr` is the initial one.

        Groups are listed by what they hold, not in their order; which parameter is in which is for `check`.
        """
        groups = []
        for count, options in self._configured:
            options = {**options, "lr": options["initial_lr"]} if "initial_lr" in options else options
            kept = {key: value for key, value in options.items() if key not in SCHEDULED_OPTIONS}
            groups.append({"parameters": count, "options": kept})
        groups.sort(key=repr)
        return flatten({"class": class_name(self._optimizer), "groups": groups}, path=self._name)[0]

    def count(self) -> int | None:
        """Return the highest count of steps in the state; None if the optimizer keeps none."""
        counts = [
            state["step"] for state in self._optimizer.state.values() if isinstance(state, dict) and "step" in state
        ]
        return highest(counts)

    def group_names(self) -> list[tuple[str, ...]]:
        """Return the qualified names of each group's parameters.

        Raises:
            RequestError: A parameter belongs to no registered module.
        """
        return self._group_names(self._namer())

    def capture(self) -> CapturedItem:
        """Return groups, state by name, and what an overridden `state_dict` adds."""
        sight, draft = self._seen(self._parameters())
        return self._memo.captured(sight, draft, is_divided_alone=False)

    def check(self, saved: SavedItem) -> Sequence[Difference]:
        """Return differences of class, parameters, grouping and of the options that there are."""
        if saved.type != self.type:
            return [Difference(f"{self._name}.type", self._name, saved.type, self.type)]
        found: list[Difference] = []
        self.forget()
        look = self._looked(saved)
        stored, now = look.stored, class_name(self._optimizer)
        if stored.class_name != now:
            found.append(Difference(f"{self._name}.type", self._name, stored.class_name, now))
        gone = stored.extra.keys() - self._extra().keys()
        if gone:
            extra = ", ".join(sorted(gone))
            found.append(Difference(f"{self._name}.type", f"{self._name}: what its state_dict() adds", extra, "absent"))
        self._check_states(look)
        found += look.matching.differences
        for number, host in look.matching.pairs:
            options, live = stored.groups[number].options, options_of(self._optimizer.param_groups[host])
            check_numbers(self._name, options, live)
            found += compare_options(self._name, options, live, f"{self._name}.param_groups[{host}]")
        return list(dict.fromkeys(found))

    def targets(self, saved: SavedItem, permits: Permits) -> Mapping[str, TensorTarget]:
        """Return a target for each stored tensor: the live state tensor where it fits, else a tensor to be made."""
        look = self._looked(saved)
        live = self._own_tensors(look)
        exact = unshared_names(look.stored.states)
        absent = absent_of(look.stored, look.named)
        unread = {leaf.name for name in absent for leaf in leaves_of(look.stored.states[name])}
        owners = owners_of(look.stored, look.named)
        specs = dict(zip(live, specs_of(list(live.items())), strict=True))
        self._targets = {}
        for name, spec in saved.specs.items():
            if name in unread:
                continue
            owner = owners.get(name, _NOBODY)
            device = owner.device
            here = live.get(name) if name in exact else None
            if here is not None and specs[name] == spec and here.device == device:
                self._targets[name] = target_in(here, f"{self._name}: {name}")
            else:
                like = owner.parameter if owner.is_dense and not name.endswith("/step") else None
                self._targets[name] = new_target(spec, device, f"{self._name}: {name}", like=like)
        return dict(self._targets)

    def apply(self, saved: SavedItem, permits: Permits) -> Sequence[str]:
        """Set state and hyper-parameters; return the parameters whose state was left as it was."""
        self._restored = {name: target.tensor for name, target in self._targets.items() if target.tensor is not None}
        stored, named = self._looked(saved).stored, self._parameters()
        # A module or a scheduler, applied before, may have made parameters anew or added groups.
        matching = self._match(stored, named)
        self.forget()
        current = [_NOBODY]
        rebuilder = Rebuilder(self._restored, lambda tensor, kind: current[0].follow(tensor, kind))
        options = [rebuilder.build(dict(group.options)) for group in stored.groups]
        kinds = kinds_of(stored)
        absent = absent_of(stored, named)
        trees = {name: value for name, value in stored.states.items() if name not in absent}
        states: PlainStates | list[Any] | None = plain_states(trees, self._restored, kinds, named)
        if states is None:
            states = []
            for name, value in trees.items():
                current[0] = Owner(parameter=named.get(name), saved_kind=kinds.get(name, ""))
                states.append(divided(rebuilder.build(value), named.get(name), f"{self._name}.state.{name}"))
        current[0] = _NOBODY
        other = rebuilder.build(stored.other)
        self._hand_back(rebuilder.build(stored.extra))
        self._create_groups(stored.groups, options, matching, named)
        name_of = self._namer(named)
        self._set_options(stored.groups, options, matching, permits, name_of)
        self._recorded = [group.parameters for group in stored.groups]
        self._applied = (stored, permits)
        return self._set_state(list(trees), states, other, frozenset(kinds), named, name_of)

    def forget(self) -> None:
        """Let go of what the last comparison saw, and of the targets."""
        self._look = None
        self._targets = {}

    def reapply_hyperparameters(self) -> None:
        """Set the groups' options once more, as the last `apply` did; does nothing before one.

        A scheduler that is built or restored after the optimizer has written into them.
        """
        if self._applied is None:
            return
        parsed, permits = self._applied
        groups, matching = parsed.groups, self._match(parsed, self._parameters())
        rebuilder = Rebuilder(self._restored, to_kind)
        options = [rebuilder.build(dict(group.options)) for group in groups]
        self._set_options(groups, options, matching, permits, self._namer())

    @property
    def keeps_own(self) -> bool:
        """Return whether a group has options of a schedule that the restored checkpoint does not know."""
        live = self._optimizer.param_groups
        if self._applied is None or not any(key in SCHEDULED_OPTIONS for group in live for key in group):
            return False
        groups, matching = self._applied[0].groups, self._match(self._applied[0], self._parameters())
        return any(
            key in SCHEDULED_OPTIONS and key not in groups[number].options
            for number, host in matching.pairs
            for key in live[host]
        )

    def settle_with(self, name: str, settle: Callable[[], object] | None) -> None:
        """Have a scheduler decide the rate: `settle` is called whenever the options have been set.

        None takes the scheduler of that name off again.
        """
        self._settlers.pop(name, None)
        if settle is not None:
            self._settlers[name] = settle

    def _looked(self, saved: SavedItem) -> _Look:
        """Return what a saved item was compared with, or look for the first time."""
        if self._look is None or self._look.saved is not saved:
            stored, named = parse_optimizer(saved, self._name), self._parameters()
            self._look = _Look(saved, stored, named, self._match(stored, named))
        return self._look

    def _own_tensors(self, look: _Look) -> dict[str, torch.Tensor]:
        """Return the live tensors, by name, that lie directly in a parameter's dict and share memory with nothing."""
        sight, draft = self._seen(look.named)
        if not sight.is_known:
            plain, tensors = flatten(self._whole(look.named, self._extra()), path=self._name, may_be_distributed=True)
            self._check_storable(tensors)
            own = unshared_names(states_of(plain["state"], self._name))  # type: ignore[index]  # of a dict's tree
            return {name: tensor for name, tensor in tensors if name in own}
        named = self._memo.named(sight, draft, is_divided_alone=False)
        states = (one for key, one in self._optimizer.state.items() if isinstance(key, torch.Tensor))
        # A dict that several parameters have was met again, what is in it was not.
        alone = (one for one in states if isinstance(one, dict) and id(one) not in sight.repeated)
        direct = {id(part) for one in alone for part in one.values()} - sight.repeated
        return {name: tensor for name, tensor in named if id(tensor) in direct}

    def _seen(self, named: Mapping[str, torch.Tensor]) -> tuple[Sight, Callable[[], Draft]]:
        """Return what is seen of the state, and what drafts it."""
        extra, before = self._extra(), self._memo.traits
        sight = self._sight.of(self._optimizer, named, self._recorded, extra=extra, before=before)
        if sight is not None:
            found = sight
            return sight, lambda: self._draft(self._whole(named, extra), found)
        whole = self._whole(named, extra)
        found = Sight.of(whole, before)
        return found, lambda: self._draft(whole, found)

    def _draft(self, whole: dict[str, Any], sight: Sight) -> Draft:
        draft = draft_of(whole, sight, path=self._name, may_be_distributed=True)
        self._check_storable(draft.tensors)
        return draft

    def _check_storable(self, tensors: NamedTensors) -> None:
        for name, tensor in tensors:
            if not name.startswith("state/"):
                check_storable(tensor, f"{self._name}: {name}")

    def _whole(self, named: Mapping[str, torch.Tensor], extra: dict[str, Any]) -> dict[str, Any]:
        return tree_of(self._optimizer, self._namer(named), self._recorded, extra=extra)

    def _namer(self, named: Mapping[str, torch.Tensor] | None = None) -> Callable[[torch.Tensor], str]:
        """Return a function from a parameter to its qualified name, over the modules registered so far."""
        names = {id(one): name for name, one in (self._parameters() if named is None else named).items()}

        def name_of(parameter: torch.Tensor) -> str:
            name = names.get(id(parameter))
            if name is None:
                raise RequestError(
                    "a parameter of an optimizer belongs to no registered module, so its state has no name",
                    where=self._name,
                    expected="parameters of the modules given to the manager",
                    found=f"a parameter of shape {tuple(parameter.shape)}",
                    remedy="Register the module that holds it, or build the optimizer from the registered module.",
                )
            return name

        return name_of

    def _match(self, saved: SavedOptimizer, named: Mapping[str, torch.Tensor]) -> Matching:
        return match_groups(self._name, saved.groups, self._group_names(self._namer(named)), frozenset(named))

    def _group_names(self, name_of: Callable[[torch.Tensor], str]) -> list[tuple[str, ...]]:
        return [tuple(name_of(one) for one in group["params"]) for group in self._optimizer.param_groups]

    def _check_states(self, look: _Look) -> None:
        """Refuse a state of a parameter that is in no group and that nobody has here: it would vanish unseen."""
        known = {name for group in look.stored.groups for name in group.parameters} | set(look.named)
        stray = [name for name in look.stored.states if name not in known]
        if stray:
            raise malformed(f"{self._name}.state", "parameters of the groups", ", ".join(stray[:4]))

    def _extra(self) -> dict[str, Any]:
        if type(self._optimizer).state_dict is torch.optim.Optimizer.state_dict:
            return {}
        whole = self._optimizer.state_dict()
        return {key: value for key, value in whole.items() if key not in ("state", "param_groups")}

    def _hand_back(self, extra: dict[str, Any]) -> None:
        if extra and type(self._optimizer).state_dict is not torch.optim.Optimizer.state_dict:
            self._optimizer.load_state_dict({**self._optimizer.state_dict(), **extra})

    def _create_groups(
        self, groups: list[SavedGroup], options: list[Any], matching: Matching, named: Mapping[str, torch.Tensor]
    ) -> None:
        has_names = any("param_names" in group for group in self._optimizer.param_groups)
        for number in matching.created:
            names = [name for name in groups[number].parameters if name in named]
            parameters = [(name.split("/", 1)[1], named[name]) if has_names else named[name] for name in names]
            self._optimizer.add_param_group({**options[number], "params": parameters})

    def _set_options(
        self,
        groups: list[SavedGroup],
        options: list[Any],
        matching: Matching,
        permits: Permits,
        name_of: Callable[[torch.Tensor], str],
    ) -> None:
        kept = {key for key in SCHEDULED_OPTIONS if "scheduler" in permits.current}
        kept |= {"initial_lr"} if f"{self._name}.lr" in permits.current else set()
        for number, host in matching.pairs:
            group = self._optimizer.param_groups[host]
            for key, value in options[number].items():
                if key in group and (key in kept or f"{self._name}.{key}" in permits.current):
                    continue
                set_option(group, key, value)
            reorder(group, name_of, groups[number].parameters)
        for settle in self._settlers.values():
            settle()

    def _set_state(
        self,
        names: list[str],
        states: PlainStates | list[Any],
        other: dict[Any, Any],
        known: frozenset[str],
        named: Mapping[str, torch.Tensor],
        name_of: Callable[[torch.Tensor], str],
    ) -> list[str]:
        live, groups = self._optimizer.state, self._optimizer.param_groups
        listed = [(name_of(one), one, group) for group in groups for one in group["params"]]
        parameters = [named[name] for name in names if name in named]
        is_for_kernels = any(group.get("fused") or group.get("capturable") for group in groups)
        if isinstance(states, PlainStates) and is_for_kernels and not states.suit_kernels(parameters):
            states = states.made()
        if not isinstance(states, PlainStates):
            flags = {name: group for name, _, group in listed}
            told = [(name, value) for name, value in zip(names, states, strict=True) if name in named]
            for name, value in told:
                set_step(value, named[name], flags.get(name, {}))
            states = [value for _, value in told]
        left = [(name, one) for name, one, _ in listed if name not in known]
        kept = {one: live[one] for _, one in left if one in live}
        put_states(live, parameters, states, further={**other, **kept})
        return [name for name, _ in left]
