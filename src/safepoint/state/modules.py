"""Modules as items: parameters, buffers, ties, extra state, grad and training flags.

1. Tensors are walked slot by slot (`names.walk_slots`), never gathered, renamed or filtered by `state_dict()` and its
   hooks. A module whose `state_dict` adds something to parameters, buffers and extra state is refused, when it is
   registered and at each save (`own_state`).
2. Restoring fills the live tensors: parameters keep their identity and their memory.
3. Non-persistent buffers are stored and restored like the others.
4. Tensors are tied if they are the same object or the same view of the same memory, never if they have no bytes. They
   are stored once, with all their names.
5. Buffers below a DistributedDataParallel that hands out the leader's before each forward pass may differ between ranks
   at any boundary; the leader's are the state. Any other buffer must be the same on all ranks that have it.
6. `training` flags are recorded relative to the root's and compared; they are never restored.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from safepoint.errors import Difference, RequestError
from safepoint.format.plain import TensorLeaf
from safepoint.state.draft import Draft
from safepoint.state.fitting import can_create, is_alike, is_differentiable
from safepoint.state.glance import Glance, Glances
from safepoint.state.item import CapturedItem, Permits, SavedItem, Target, TensorTarget
from safepoint.state.memo import Memo
from safepoint.state.module_draft import draft_module
from safepoint.state.module_tree import EXTRA_STATE, SavedEntry, SavedModule, parse_module
from safepoint.state.names import (
    Slot,
    class_of,
    handed_out_buffers,
    walk_modules,
    walk_slots,
    wrapped_key,
)
from safepoint.state.own_state import has_extra_state, may_have_own_state, refuse_own_state
from safepoint.state.parts import Signature, describe, flag_of, held_as, new_tensors, put_back, signature, targets_in
from safepoint.state.places import segment
from safepoint.state.shards import is_divided_alike, local_of
from safepoint.state.sight import Sight
from safepoint.state.targets import NewTensorTarget
from safepoint.state.tensors import are_plainly_storable, check_storable, spec_of, write_into
from safepoint.state.ties import retied, tied
from safepoint.state.tree import unflatten

# An object that prints as its address prints another one in each process.
_ADDRESS = re.compile(r" at 0x[0-9a-f]+")


@dataclass(frozen=True, slots=True)
class _Look:
    """Hold what a saved item says, and what the live module was seen to hold when the two were compared.

    `alike` are the slots that hold just such a tensor as is stored under their name, and `filled` the live tensors that
    entries, by their first name, are read into.
    """

    saved: SavedItem
    stored: SavedModule
    glance: Glance
    live: Mapping[str, Slot]
    alike: set[str] = field(default_factory=set)
    filled: dict[str, torch.Tensor] = field(default_factory=dict)


class ModuleItem:
    """Capture and restore a module, `AveragedModel` included.

    Args:
        name: The item's name.
        module: The live module.
        glances: How it is looked at; looks may be shared with others that look at it.
    """

    type = "module"

    def __init__(self, name: str, module: torch.nn.Module, glances: Glances | None = None) -> None:
        self._name = name
        self._module = module
        self._glances = glances or Glances()
        self._memo = Memo(name, self.type)
        self._look: _Look | None = None
        self._targets: dict[str, dict[str, TensorTarget]] = {}
        self._extra_targets: dict[str, Target] = {}

    @property
    def name(self) -> str:
        """Return the item's name, as registered."""
        return self._name

    def prepare(self) -> None:
        """Put the parameters of `fully_shard` back into their sharded form."""
        self._glances.at(self._module)

    def capture(self) -> CapturedItem:
        """Return all tensors by name, the extra state of submodules, and the flags."""
        glance = self._glances.at(self._module)
        if may_have_own_state(glance.modules, glance.kinds):
            refuse_own_state(self._name, self._module)
            self._glances.forget()
            glance = self._glances.at(self._module)
        handed_out = handed_out_buffers(glance.modules)
        sight = Sight(self._memo.traits)
        sight.note(glance.facts)
        sight.note(glance.modes)
        sight.note([id(one) in handed_out for one in glance.buffers] if handed_out else None)
        sight.look_at_tensors(glance.parameters)
        sight.look_at_tensors(glance.buffers)
        if any(map(has_extra_state, glance.kinds)):
            sight.miss()
            self._glances.forget()
        return self._memo.captured(sight.close(), lambda: self._draft(glance, handed_out))

    def _draft(self, glance: Glance, handed_out: set[int]) -> Draft:
        slots, deviating = walk_slots(self._module), self._deviating() if glance.modes else ()
        holders = self._with_extra_state() if any(map(has_extra_state, glance.kinds)) else {}
        extra = {path: module.get_extra_state() for path, module in holders.items()}
        return draft_module(self._name, slots, extra=extra, deviating=deviating, handed_out=handed_out)

    def structure(self) -> list[dict[str, object]]:
        """Return what the manifest's digest of the model covers.

        Name, kind, shape, dtype and flags of every parameter and buffer, then of every module its class and the
        settings that it shows when it is printed, such as the rate of a dropout.
        """
        self._refuse_lazy()
        refuse_own_state(self._name, self._module)
        modules: list[dict[str, object]] = [
            {"module": path, "class": class_of(module).__qualname__, "settings": _ADDRESS.sub("", module.extra_repr())}
            for path, module in walk_modules(self._module)
            if wrapped_key(module) is None
        ]
        slots: list[dict[str, object]] = [
            {
                "name": slot.name,
                "kind": slot.kind,
                "shape": list(slot.tensor.shape),
                "dtype": str(slot.tensor.dtype).removeprefix("torch."),
                "persistent": slot.is_persistent,
                "requires_grad": slot.tensor.requires_grad,
            }
            for slot in walk_slots(self._module)
            if slot.tensor is not None
        ]
        return slots + modules

    def check(self, saved: SavedItem) -> Sequence[Difference]:
        """Return every difference of names, shapes, dtypes, layouts, ties, persistence, extra state and training."""
        if saved.type != self.type:
            return [Difference(f"{self._name}.type", self._name, saved.type, self.type)]
        self.forget()
        look = self._looked(saved)
        stored, live = look.stored.entries, look.live
        found: list[Difference] = []
        for name, entry in stored.items():
            slot = live.get(name)
            if slot is None or (slot.tensor is None and not can_create(slot, entry)):
                found.append(self._difference("removed", name, f"a {entry.kind}", "absent"))
            elif name not in look.alike:
                found += self._compare(name, entry, slot, saved)
        for name, slot in live.items():
            if slot.tensor is not None and name not in stored:
                found.append(self._difference("added", name, "absent", f"a {slot.kind}"))
        found += self._compare_ties(stored, live)
        found += self._compare_modules(look.stored)
        return found or self._compare_holders(look)

    def targets(self, saved: SavedItem, permits: Permits) -> Mapping[str, TensorTarget]:
        """Return targets in the live memory; entries without a place or of another shape have none.

        Raises:
            RequestError: Tensors that were one and are several here are divided over the ranks in different ways.
        """
        look = self._looked(saved)
        live = look.live
        self._targets = {}
        taken: set[int] = set()
        for entry in dict.fromkeys(look.stored.entries.values()):
            slots = [live[name] for name in entry.names if name in live]
            leads = [slot for slot in slots if slot.tensor is not None and self._fits(entry, slot, look)]
            if leads and id(leads[0].tensor) not in taken:
                tensor = leads[0].tensor
                assert tensor is not None
                taken.update(id(slot.tensor) for slot in leads)
                self._check_division(leads)
                look.filled[entry.names[0]] = tensor
                path = f"{self._name}.{leads[0].name}"
                self._targets[entry.names[0]] = targets_in(tensor, entry.value, saved.specs, path)
            elif slots and all(slot.tensor is None and can_create(slot, entry) for slot in slots):
                self._targets[entry.names[0]] = {**self._targets_for_new(entry, saved)}
        self._extra_targets = {
            name: NewTensorTarget(spec, torch.device("cpu"))
            for name, spec in saved.specs.items()
            if name.startswith(f"{EXTRA_STATE}/")
        }
        inner = (target for targets in self._targets.values() for target in targets.items())
        return {**dict(inner), **self._extra_targets}

    def apply(self, saved: SavedItem, permits: Permits) -> Sequence[str]:
        """Finish the live tensors, set grad flags and extra state; return the names of tensors left as they were."""
        look = self._looked_again(saved)
        written: dict[str, torch.Tensor] = {}
        for entry in dict.fromkeys(look.stored.entries.values()):
            if entry.names[0] in self._targets:
                self._finish(entry, look, self._targets[entry.names[0]], written)
        self._apply_extra(look.stored)
        self.forget()
        reached = {id(tensor) for tensor in written.values()}
        return [
            slot.name
            for slot in look.live.values()
            if slot.name not in written and slot.tensor is not None and id(slot.tensor) not in reached
        ]

    def forget(self) -> None:
        """Let go of what the last comparison saw, and of the targets."""
        self._look = None
        self._targets = {}
        self._extra_targets = {}

    def _finish(
        self,
        entry: SavedEntry,
        look: _Look,
        targets: Mapping[str, TensorTarget],
        written: dict[str, torch.Tensor],
    ) -> None:
        value = look.filled.get(entry.names[0])
        if value is None:
            value = unflatten(entry.value, new_tensors(targets)).detach()
        else:
            put_back(value, entry.value, targets)
        for name in entry.names:
            slot = look.live.get(name)
            if slot is None:
                continue
            if slot.tensor is None:
                if can_create(slot, entry):
                    slot.owner._buffers[slot.key] = written[name] = value
                continue
            if not self._fits(entry, slot, look):
                continue
            if slot.tensor is not value:
                write_into(local_of(slot.tensor), local_of(value))
            written[name] = slot.tensor
            is_flag_other = slot.tensor.requires_grad != entry.requires_grad
            if entry.kind == "parameter" and is_flag_other and is_differentiable(slot.tensor):
                slot.tensor.requires_grad_(entry.requires_grad)

    def _apply_extra(self, saved: SavedModule) -> None:
        if not saved.extra:
            return
        states = unflatten(dict(saved.extra), new_tensors(self._extra_targets))
        modules = self._with_extra_state()
        for path, state in states.items():
            if path in modules:
                modules[path].set_extra_state(state)

    def _check_division(self, slots: Sequence[Slot]) -> None:
        first = slots[0]
        for slot in slots[1:]:
            assert first.tensor is not None
            assert slot.tensor is not None
            if not is_divided_alike(first.tensor, slot.tensor, f"{self._name}.{slot.name}"):
                raise RequestError(
                    "two tensors that were one are divided over the ranks in different ways",
                    where=f"{self._name}.{first.name} and {self._name}.{slot.name}",
                    remedy="Tie them again, or divide them alike.",
                )

    def _targets_for_new(self, entry: SavedEntry, saved: SavedItem) -> dict[str, Target]:
        if not isinstance(entry.value, TensorLeaf):
            return {}
        kind = entry.value.device
        devices = (parameter.device for parameter in self._module.parameters() if parameter.device.type == kind)
        return {entry.value.name: NewTensorTarget(saved.specs[entry.value.name], next(devices, torch.device("cpu")))}

    def _looked(self, saved: SavedItem) -> _Look:
        """Return what was seen when a saved item was compared, or look for the first time."""
        if self._look is None or self._look.saved is not saved:
            stored, glance = parse_module(saved, self._name), self._glances.at(self._module)
            live = {slot.name: slot for slot in walk_slots(self._module)}
            both = [(stored.entries[name], slot) for name, slot in live.items() if name in stored.entries]
            alike = {slot.name: slot.tensor for entry, slot in both if is_alike(entry, slot, saved.specs)}
            tensors = [one for one in alike.values() if one is not None]
            for name, tensor in () if are_plainly_storable(tensors) else zip(alike, tensors, strict=True):
                check_storable(tensor, f"{self._name}.{name}")
            self._look = _Look(saved, stored, glance, live, set(alike))
        return self._look

    def _looked_again(self, saved: SavedItem) -> _Look:
        """Return what was seen, with the slots of now: what an item applied before was given may replace tensors."""
        look = self._looked(saved)
        if look.glance.is_same(self._glances.at(self._module)):
            return look
        live = {slot.name: slot for slot in walk_slots(self._module)}
        alike = {name for name in look.alike if name in live and live[name].tensor is look.live[name].tensor}
        return replace(look, live=live, alike=alike)

    def _fits(self, entry: SavedEntry, slot: Slot, look: _Look) -> bool:
        if slot.name in look.alike:
            return True
        assert slot.tensor is not None
        there, here = signature(entry.value, look.saved.specs), self._signature(entry.names[0], slot.tensor)
        return there.shape == here.shape and there.form == here.form

    def _signature(self, name: str, tensor: torch.Tensor) -> Signature:
        value, named = describe(tensor, segment(name), f"{self._name}.{name}")
        return signature(value, {key: spec_of(key, part) for key, part in named})

    def _with_extra_state(self) -> dict[str, Any]:
        found: dict[int, tuple[str, torch.nn.Module]] = {}
        for path, module in walk_modules(self._module):
            if has_extra_state(type(module)):
                first = found.setdefault(id(module), (path, module))
                found[id(module)] = min(first, (path, module), key=lambda one: one[0])
        return dict(sorted(found.values(), key=lambda one: one[0]))

    def _deviating(self) -> tuple[str, ...]:
        flags = {path: module.training for path, module in walk_modules(self._module)}
        return tuple(sorted(path for path, flag in flags.items() if flag != flags[""]))

    def _difference(self, word: str, name: str, saved: str, current: str) -> Difference:
        return Difference(f"{self._name}.{word}", f"{self._name}.{name}", saved, current)

    def _compare(self, name: str, entry: SavedEntry, slot: Slot, saved: SavedItem) -> list[Difference]:
        found: list[Difference] = []
        pairs = [("kind", entry.kind, slot.kind), ("persistent", str(entry.is_persistent), str(slot.is_persistent))]
        if slot.tensor is not None:
            there, here = signature(entry.value, saved.specs), self._signature(name, slot.tensor)
            pairs += [
                ("layout", there.form, here.form),
                ("shape", str(there.shape), str(here.shape)),
                ("dtype", there.dtype, here.dtype),
            ]
        for word, before, after in pairs:
            if before != after:
                found.append(self._difference(word, name, before, after))
        return found

    def _compare_ties(self, stored: Mapping[str, SavedEntry], live: Mapping[str, Slot]) -> list[Difference]:
        common = set(stored) & {slot.name for slot in live.values() if slot.tensor is not None}
        here = [[slot.name for slot in group] for group in tied(live.values())]
        there = [entry.names for entry in dict.fromkeys(stored.values())]
        return [self._difference("tie", *found) for found in retied(there, here, common)]

    def _compare_holders(self, look: _Look) -> list[Difference]:
        found = []
        for name, entry in look.stored.entries.items():
            tensor = look.live[name].tensor
            if tensor is None or name != entry.names[0] or name in look.alike:
                continue
            takes_flag = entry.kind == "parameter" and is_differentiable(tensor)
            value, _ = describe(tensor, segment(name), f"{self._name}.{name}")
            there, here = (held_as(one, takes_flag=takes_flag) for one in (entry.value, value))
            is_flag_equal = takes_flag or entry.requires_grad == tensor.requires_grad
            if there != here or not is_flag_equal or flag_of(entry.value, entry.requires_grad) != entry.requires_grad:
                found.append(self._difference("layout", name, f"held as {there}", f"held as {here}"))
        return found

    def _compare_modules(self, saved: SavedModule) -> list[Difference]:
        there, here = set(saved.extra), set(self._with_extra_state())
        found = [self._difference("removed", path, "extra state", "absent") for path in sorted(there - here)]
        found += [self._difference("added", path, "absent", "extra state") for path in sorted(here - there)]
        before, after = set(saved.training), set(self._deviating())
        for path in sorted(before ^ after):
            text = {True: "mode other than the root's", False: "mode of the root"}
            found.append(self._difference("training", path, text[path in before], text[path in after]))
        return found

    def _refuse_lazy(self) -> None:
        for slot in walk_slots(self._module):
            if slot.tensor is not None and torch.nn.parameter.is_lazy(slot.tensor):
                check_storable(slot.tensor, f"{self._name}.{slot.name}")
