"""All registered objects of a run, by item name, each with its item."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch

from safepoint.errors import RequestError
from safepoint.format.names import check_item_name
from safepoint.state.adapt import Surroundings, make_item
from safepoint.state.glance import Glances, ParameterNames
from safepoint.state.item import STREAMS_ITEM, Item
from safepoint.state.kinds import Declared, Kind
from safepoint.state.optimizers import OptimizerItem
from safepoint.state.own_state import has_own_code
from safepoint.state.randomness import GlobalRandomItem


class Registry:
    """Keep live objects and their items.

    `items` holds the global random streams besides, under their reserved name; `objects` and `optimizers` hold what was
    registered; `kinds` what was declared of some of it; `glances` are how all items look at modules. The mappings are
    live: what is added later shows in them.
    """

    def __init__(self) -> None:
        self.items: dict[str, Item] = {STREAMS_ITEM: GlobalRandomItem()}
        self.objects: dict[str, object] = {}
        self.optimizers: dict[str, torch.optim.Optimizer] = {}
        self.kinds: dict[str, Kind] = {}
        self.glances = Glances()
        self._names = ParameterNames(self.glances)
        self._surroundings = Surroundings(self._parameters, self._optimizer_items, self.glances)

    def add(self, name: str, entry: object) -> Item:
        """Add a live object, or one with a declared kind, and return its item.

        Raises:
            RequestError: The name is not allowed or taken, the object is registered already, or it cannot be captured.
        """
        check_item_name(name)
        if name in self.items:
            what = "is reserved for the global random streams" if name == STREAMS_ITEM else "is taken"
            raise RequestError(f"an item's name {what}", where=name)
        kind, entry = _declared(name, entry)
        twice = [other for other, known in self.objects.items() if known is entry]
        if twice:
            raise RequestError("an object is registered twice", where=name, found=f"the same object as {twice[0]!r}")
        item = make_item(name, entry, surroundings=self._surroundings)
        self.items[name], self.objects[name] = item, entry
        if kind is not None:
            self.kinds[name] = kind
        if isinstance(entry, torch.optim.Optimizer):
            self.optimizers[name] = entry
        return item

    def add_all(self, entries: Mapping[str, object]) -> None:
        """Add live objects, all or none.

        Raises:
            RequestError: As `add` does.
        """
        added: list[str] = []
        try:
            for name, entry in entries.items():
                self.add(name, entry)
                added.append(name)
        except BaseException:
            for name in added:
                self.remove(name)
            raise

    def remove(self, name: str) -> None:
        """Forget an item."""
        self.items.pop(name, None)
        self.objects.pop(name, None)
        self.optimizers.pop(name, None)
        self.kinds.pop(name, None)

    def look_anew_after(self, item: Item) -> None:
        """Let go of the looks at modules if code ran to tell the state of an item, which may have changed them."""
        if has_own_code(self.objects.get(item.name)):
            self.glances.forget()

    @property
    def each_ranks_own(self) -> frozenset[str]:
        """Return the names of the items that were declared to be each rank's own."""
        return frozenset(name for name, kind in self.kinds.items() if kind == "per_rank")

    def drop_gradients(self, names: Iterable[str]) -> None:
        """Let go the gradients of modules and of the parameters of optimizers: they are of other weights."""
        for name in names:
            entry = self.objects.get(name)
            held = entry.parameters() if isinstance(entry, torch.nn.Module) else ()
            if isinstance(entry, torch.optim.Optimizer):
                held = (one for group in entry.param_groups for one in group["params"])
            for parameter in held:
                parameter.grad = None

    def _parameters(self) -> Mapping[str, torch.Tensor]:
        modules = {name: entry for name, entry in self.objects.items() if isinstance(entry, torch.nn.Module)}
        return self._names.of(modules)

    def _optimizer_items(self) -> Mapping[str, OptimizerItem]:
        return {name: item for name, item in self.items.items() if isinstance(item, OptimizerItem)}


def _declared(name: str, entry: object) -> tuple[Kind | None, object]:
    """Return the kind that was declared of an object, if one was, and the object."""
    if not isinstance(entry, Declared):
        return None, entry
    kind, live = entry.kind, entry.entry
    found = f"{type(live).__module__}.{type(live).__qualname__}"
    if isinstance(live, Declared):
        raise RequestError("a kind is declared twice", where=name, found=f"{kind}({live.kind}(...))")
    if kind == "per_rank" and isinstance(live, torch.nn.Module | torch.optim.Optimizer):
        raise RequestError(
            "weights and their optimizers are never each rank's own",
            where=name,
            found=found,
            remedy="What only some ranks have (stages, experts) needs no kind: it is stored once, by name.",
        )
    return kind, live
