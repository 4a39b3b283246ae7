"""Objects with `state_dict` and `load_state_dict`, and plain containers, as items."""

from __future__ import annotations

import sys
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol, runtime_checkable

import torch

from safepoint.errors import Difference, RequestError, SafepointError
from safepoint.state.item import CapturedItem, Permits, SavedItem, TensorTarget
from safepoint.state.memo import Memo
from safepoint.state.rebuild import check_plain
from safepoint.state.shards import ShardTarget, new_target
from safepoint.state.sight import Sight
from safepoint.state.stored import field, malformed
from safepoint.state.targets import NewTensorTarget
from safepoint.state.tensors import is_distributed
from safepoint.state.tree import class_name, draft_of, flatten, unflatten


@runtime_checkable
class Stateful(Protocol):
    """An object that gives and takes its own state; the name is torch's."""

    def state_dict(self) -> Any:
        """Return the state as nested plain values and tensors."""

    def load_state_dict(self, state_dict: Any) -> Any:
        """Take a state that `state_dict` returned."""


@runtime_checkable
class Comparing(Protocol):
    """A `Stateful` that can tell, before it takes a state, in what that state differs from itself.

    Its state holds plain values only, because it is asked before any tensor is read.
    """

    def differences(self, state: Any, /) -> Sequence[Difference]:
        """Return every difference; changes nothing."""

    def load_state_dict(self, state_dict: Any, /, *, permit: frozenset[str]) -> Any:
        """Take a state; `permit` holds the words of the differences that were accepted."""


class StatefulItem:
    """Capture and restore any `Stateful`.

    `state_dict()` is called once for each capture. Tensors in it may be the live ones: they are read before the
    boundary is left. What is handed to `load_state_dict()` shares nothing with the checkpoint or with live state.
    Where tensors are distributed over ranks, it is called before a restore as well, to tell how.
    """

    type = "stateful"

    def __init__(self, name: str, stateful: Stateful) -> None:
        self._name = name
        self._stateful = stateful
        self._memo = Memo(name, self.type)
        self._targets: dict[str, NewTensorTarget | ShardTarget] = {}

    @property
    def name(self) -> str:
        """Return the item's name, as registered."""
        return self._name

    @property
    def why_else(self) -> str:
        """Return why `state_dict()` may tell another state than was just loaded although all is well; else nothing.

        Foreign loaders take a state when they are next iterated. An object that tells differences of its own has been
        asked; what it had handed out ahead, for one, it hands out again.
        """
        if isinstance(self._stateful, Comparing):
            return "has taken its state, and tells it by the settings and ranks of this job"
        return "takes its state when it is next iterated" if hasattr(self._stateful, "__iter__") else ""

    def capture(self) -> CapturedItem:
        """Return the class and what `state_dict()` returns."""
        whole = self._whole()
        return _captured(self._memo, whole, self._name)

    def check(self, saved: SavedItem) -> Sequence[Difference]:
        """Return a difference when the object is of another class, else those that the object itself tells."""
        found = _compare_classes(saved, self.type, class_name(self._stateful), self._name)
        if found or not isinstance(self._stateful, Comparing) or saved.specs:
            return found
        return self._stateful.differences(unflatten(saved.plain, {})["state"])

    def targets(self, saved: SavedItem, permits: Permits) -> Mapping[str, TensorTarget]:
        """Return a target for each tensor; all are made anew, because the object decides what becomes of them."""
        self._targets = _new_targets(saved, self._whole, self._name)
        return dict(self._targets)

    def apply(self, saved: SavedItem, permits: Permits) -> Sequence[str]:
        """Hand the state to `load_state_dict()`."""
        whole = unflatten(saved.plain, _made(self._targets))
        self._targets = {}
        if isinstance(self._stateful, Comparing) and not saved.specs:
            # A restore comes here only when the contract or a permitted word has accepted each of them.
            accepted = {difference.word for difference in self._stateful.differences(whole["state"])}
            self._stateful.load_state_dict(whole["state"], permit=permits.words | accepted)
        else:
            self._stateful.load_state_dict(whole["state"])
        return []

    def _whole(self) -> dict[str, object]:
        try:
            state = self._stateful.state_dict()
        except SafepointError:
            raise
        except Exception as exc:
            raise RequestError(
                "an object does not tell its state",
                where=self._name,
                found=f"state_dict() raised {type(exc).__name__}: {exc}",
            ) from exc
        return {"class": class_name(self._stateful), "state": state}


class PlainItem:
    """Capture and restore a mutable dict or list: the same object is cleared and filled again."""

    type = "plain"

    def __init__(self, name: str, container: dict[Any, Any] | list[Any]) -> None:
        self._name = name
        self._container = container
        self._memo = Memo(name, self.type)
        self._targets: dict[str, NewTensorTarget | ShardTarget] = {}

    @property
    def name(self) -> str:
        """Return the item's name, as registered."""
        return self._name

    def capture(self) -> CapturedItem:
        """Return the contents."""
        whole = self._whole()
        return _captured(self._memo, whole, self._name)

    def check(self, saved: SavedItem) -> Sequence[Difference]:
        """Return a difference when the container is of another class."""
        found = _compare_classes(saved, self.type, class_name(self._container), self._name)
        if not found:
            field(saved.plain, "state", type(self._container), item=self._name)
        return found

    def targets(self, saved: SavedItem, permits: Permits) -> Mapping[str, TensorTarget]:
        """Return a target for each tensor; all are made anew."""
        self._targets = _new_targets(saved, self._whole, self._name)
        return dict(self._targets)

    def apply(self, saved: SavedItem, permits: Permits) -> Sequence[str]:
        """Clear the live container and fill it; what it held is replaced, not merged."""
        state = unflatten(saved.plain, _made(self._targets))["state"]
        self._targets = {}
        if isinstance(self._container, dict):
            self._container.clear()
            self._container.update(state)
        else:
            self._container[:] = state
        return []

    def _whole(self) -> dict[str, object]:
        return {"class": class_name(self._container), "state": self._container}


PLAIN_CONTAINERS: tuple[type, ...] = (dict, OrderedDict, list)


def _compare_classes(saved: SavedItem, kind: str, name: str, item: str) -> list[Difference]:
    if saved.type != kind:
        return [Difference(f"{item}.type", item, saved.type, kind)]
    before, _ = _parse(saved, item)
    return [] if before == name else [Difference(f"{item}.type", item, before, name)]


def _may_be_distributed(saved: SavedItem) -> bool:
    return bool(saved.specs) and "torch.distributed.tensor" in sys.modules


def _captured(memo: Memo, whole: dict[str, object], path: str) -> CapturedItem:
    sight = Sight.of(whole, memo.traits)
    return memo.captured(sight, lambda: draft_of(whole, sight, path=path, may_be_distributed=True))


def _new_targets(saved: SavedItem, whole: Callable[[], object], path: str) -> dict[str, NewTensorTarget | ShardTarget]:
    """Return targets for all tensors; one that is distributed here, under the same name and shape, stays so.

    The live state, `whole`, is asked for only where it may hold distributed tensors.
    """
    live = flatten(whole(), path=path, may_be_distributed=True)[1] if _may_be_distributed(saved) else []
    models = {name: one for name, one in live if is_distributed(one) and name in saved.specs}
    likes = {name: one for name, one in models.items() if tuple(one.shape) == saved.specs[name].global_shape}
    # Made in host memory: the tree knows which kind of device each was on and moves it there.
    host = torch.device("cpu")
    return {name: new_target(spec, host, f"{path}: {name}", like=likes.get(name)) for name, spec in saved.specs.items()}


def _made(targets: Mapping[str, NewTensorTarget | ShardTarget]) -> dict[str, torch.Tensor]:
    return {name: target.tensor for name, target in targets.items() if target.tensor is not None}


def _parse(saved: SavedItem, item: str) -> tuple[str, Any]:
    """Return class and state of a stored tree, known to be one that can be built."""
    holder = saved.plain
    if type(holder) is not dict or list(holder) != ["class", "state"]:
        raise malformed(item, "class and state", str(list(holder) if type(holder) is dict else type(holder))[:120])
    check_plain(holder, saved.specs, item=item)
    return field(holder, "class", str, item=item), holder["state"]
