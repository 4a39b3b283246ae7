"""From a plain tree back to nested state; the other half of `safepoint.state.tree`.

Nothing of the tree is trusted: names, shapes, offsets and dtypes come from a file.
"""

from __future__ import annotations

import re
from collections import OrderedDict
from collections.abc import Callable, Collection, Mapping, Sequence
from operator import attrgetter
from typing import Any

import numpy as np
import torch

from safepoint.errors import CorruptionError, RequestError
from safepoint.format.plain import (
    DtypeLeaf,
    NumpyScalarLeaf,
    Same,
    ScalarLeaf,
    Shared,
    SizeLeaf,
    TensorLeaf,
    ViewLeaf,
)
from safepoint.state.item import TensorSpec
from safepoint.state.numbers import scalar_tensor
from safepoint.state.places import below, plain_names_below, tensor_name
from safepoint.state.sparse import SparseParts, check_parts, put_together
from safepoint.state.stored import malformed, reading
from safepoint.state.tensors import PLAIN_TYPES, dtype_of, is_distributed

# A dict with this key stands for a sparse tensor; `tree.flatten` refuses a user's dict that has it.
SPARSE_KEY = "safepoint.sparse"

_NUMPY_DTYPE = re.compile(r"[<|][biufc][0-9]{1,2}|<[Mm]8(\[[0-9]*[A-Za-z]+\])?")
# Values that stand for themselves, and can be built whatever they are.
_BARE = frozenset({type(None), bool, int, float, str})
_LEAVES = frozenset({TensorLeaf, ViewLeaf, ScalarLeaf})
_CONTAINERS = ("tensor", "parameter", "buffer", "buffer_non_persistent", "ndarray")
_PENDING = object()
# So many elements of a container are looked at as one: a call for each takes longer than all else that is done with it.
MANY = 8

_NAME, _CONTAINER, _DEVICE, _REQUIRES_GRAD = map(attrgetter, ("name", "container", "device", "requires_grad"))
_IS_CPU = attrgetter("is_cpu")


def to_kind(tensor: torch.Tensor, kind: str) -> torch.Tensor:
    """Return the tensor on a kind of device if this process has one, else on the CPU.

    A distributed one is where its mesh has it.
    """
    if tensor.device.type == kind or is_distributed(tensor):
        return tensor
    engine = getattr(torch, kind, None) if kind in ("cuda", "mps", "xpu") else None
    return tensor.to(kind if engine is not None and engine.is_available() else "cpu")


def check_plain(
    plain: Any, specs: Mapping[str, TensorSpec], *, item: str, prefix: str = "", otherwise_named: Sequence[object] = ()
) -> None:
    """Check that a tree can be built, before any tensor byte is read.

    What only the bytes can tell, such as an index of a sparse tensor that lies outside, shows when it is built.

    Args:
        prefix: As it was given to `flatten`, which names each tensor by its place. Under another name a tree would be
            built as well, and captured again as another one.
        otherwise_named: Further trees, whose tensors are not named by their place.

    Raises:
        CorruptionError: A leaf names no tensor, a tensor has no leaf, or a value contradicts itself.
    """
    check = _Check(specs)
    with reading(item):
        check.visit(plain, prefix)
        for other in otherwise_named:
            check.visit(other, None)
    if check.named != set(specs):
        stray = sorted(set(specs) - check.named)
        raise malformed(item, "a leaf for each stored tensor", f"none for {', '.join(stray[:4])}")


class _Check:
    """Visit each value of a tree as `Rebuilder` would build it."""

    def __init__(self, specs: Mapping[str, TensorSpec]) -> None:
        self.named: set[str] = set()
        self._specs = specs
        self._whole: set[str] = set()
        self._finished: set[int] = set()
        self._keys = Rebuilder({}, lambda tensor, _: tensor)

    def visit(self, plain: Any, name: str | None) -> None:
        """Check one value; `name` is that of its place, None where tensors are named otherwise."""
        kind = type(plain)
        if kind in _BARE:
            return
        if kind in _LEAVES:
            self._visit_leaf(plain, name)
        elif isinstance(plain, dict):
            self._visit_dict(plain, name)
        elif kind is Shared:
            self.visit(plain.value, name)
            self._finished.add(plain.number)
        elif kind is Same:
            if plain.number not in self._finished:
                raise _damaged("a reference to a finished earlier value", f"number {plain.number}")
        elif kind in (list, tuple):
            for index, element in enumerate(plain):
                if type(element) not in _BARE:
                    self.visit(element, None if name is None else below(name, index))
        elif kind in (set, frozenset):
            self._check_keys(plain)
        else:
            self._keys.key(plain)

    def _visit_dict(self, plain: Mapping[Any, Any], name: str | None) -> None:
        if SPARSE_KEY in plain:
            parts = plain["parts"]
            check_parts(plain[SPARSE_KEY], plain["size"].sizes, {key: self._specs[parts[key].name] for key in parts})
            if set(plain) != {SPARSE_KEY, "size", "is_coalesced", "container", "requires_grad", "parts"}:
                raise _damaged("the description of a sparse tensor", ", ".join(map(str, plain)))
            flags = (plain["is_coalesced"], plain["requires_grad"])
            if any(type(flag) is not bool for flag in flags):
                raise _damaged("flags of a sparse tensor", repr(flags))
            _check_holder(plain["container"], plain["requires_grad"], self._specs[parts["values"].name].dtype)
            plain = parts
        self._check_keys(plain)
        if len(plain) >= MANY and name is not None and self._are_plain_tensors(plain, name):
            return
        for position, (key, element) in enumerate(plain.items()):
            if type(element) not in _BARE:
                self.visit(element, None if name is None else below(name, key, position))

    def _are_plain_tensors(self, plain: Mapping[Any, Any], name: str) -> bool:
        """Return whether all that a dict holds are leaves that `_visit_leaf` passes, and take them as visited."""
        leaves = list(plain.values())
        if set(map(type, leaves)) != {TensorLeaf} or set(map(type, plain)) != {str}:
            return False
        names = list(map(_NAME, leaves))
        is_each_new = len(set(names)) == len(names) and self.named.isdisjoint(names)
        are_known = is_each_new and all(map(self._specs.__contains__, names))
        if not are_known or any(map(_REQUIRES_GRAD, leaves)) or set(map(_CONTAINER, leaves)) != {"tensor"}:
            return False
        if names != plain_names_below(name, list(plain)):
            return False
        for dtype in {self._specs[one].dtype for one in names}:
            dtype_of(dtype)
        self.named.update(names)
        self._whole.update(names)
        return True

    def _check_keys(self, plain: Collection[Any]) -> None:
        """Check what tells the elements of a set or a dict apart once they are built: 1 and numpy's 1.0 are equal."""
        if any(type(key) is not str for key in plain) and len({self._keys.key(key) for key in plain}) != len(plain):
            raise _damaged("keys or elements that differ", repr(list(plain))[:120])

    def _visit_leaf(self, leaf: TensorLeaf | ViewLeaf | ScalarLeaf, name: str | None) -> None:
        if isinstance(leaf, ScalarLeaf):
            _check_holder(leaf.container, leaf.requires_grad, leaf.dtype)
            if len(leaf.data) != dtype_of(leaf.dtype).itemsize:
                raise _damaged(f"a scalar of dtype {leaf.dtype}", f"{len(leaf.data)} bytes")
            return
        spec = self._specs.get(leaf.name)
        if spec is None:
            raise _damaged("a tensor that the checkpoint holds", leaf.name)
        _check_holder(leaf.container, leaf.requires_grad, spec.dtype)
        if isinstance(leaf, ViewLeaf):
            is_twice = leaf.name in self._whole
            _check_view(leaf, spec.global_shape)
        else:
            is_twice = leaf.name in self.named
            self._whole.add(leaf.name)
        if is_twice:
            raise _damaged("one place for each tensor", leaf.name)
        # Of the views of one stretch, the first one names it.
        if name is not None and leaf.name not in self.named and leaf.name != tensor_name(name, len(self.named)):
            raise _damaged(f"a tensor with the name of its place, {name}", leaf.name)
        self.named.add(leaf.name)


class Rebuilder:
    """Build one tree. Values marked as shared are built once."""

    def __init__(self, tensors: Mapping[str, torch.Tensor], place: Callable[[torch.Tensor, str], torch.Tensor]) -> None:
        self._tensors = tensors
        self._place = place
        self._placed: dict[tuple[str, str], torch.Tensor] = {}
        self._shared: dict[int, Any] = {}

    def build(self, plain: Any) -> Any:
        """Return the value that a tree stands for."""
        kind = type(plain)
        if kind in _BARE:
            return plain
        if kind is TensorLeaf:
            return _hold(self._tensor(plain.name, plain.device), plain)
        if kind is Shared:
            self._shared[plain.number] = _PENDING
            self._shared[plain.number] = self.build(plain.value)
            return self._shared[plain.number]
        if kind is Same:
            value = self._shared.get(plain.number, _PENDING)
            if value is _PENDING:
                raise _damaged("a reference to a finished earlier value", f"number {plain.number}")
            return value
        if kind in (dict, OrderedDict):
            if SPARSE_KEY in plain:
                return self._sparse(plain)
            held = self._as_they_are(list(plain.values())) if len(plain) >= MANY else None
            if held is not None:
                return kind(zip(map(self.key, plain), held, strict=True))
            return kind((self.key(key), self.build(element)) for key, element in plain.items())
        if kind in (list, tuple):
            return kind(self.build(element) for element in plain)
        if kind in (set, frozenset):
            return kind(self.key(element) for element in plain)
        if kind is ViewLeaf:
            return _hold(_view(self._tensor(plain.name, plain.device), plain), plain)
        if kind is ScalarLeaf:
            return _hold(self._place(_scalar(plain), plain.device), plain)
        return self.key(plain)

    def key(self, plain: Any) -> Any:
        """Return the value of a leaf that is no tensor, such as a key of a dict."""
        if type(plain) in _BARE:
            return plain
        if isinstance(plain, SizeLeaf):
            return torch.Size(plain.sizes)
        if isinstance(plain, DtypeLeaf):
            return dtype_of(plain.name)
        if isinstance(plain, NumpyScalarLeaf):
            return _numpy_scalar(plain)
        if type(plain) in (tuple, frozenset):
            return type(plain)(self.key(element) for element in plain)
        if isinstance(plain, TensorLeaf | ViewLeaf | ScalarLeaf | Shared | Same):
            raise _damaged("a key or an element of a set", type(plain).__name__)
        return plain

    def _as_they_are(self, plain: Sequence[Any]) -> list[torch.Tensor] | None:
        """Return the tensors that values stand for, if all stand for whole ones that need no change; else None."""
        if self._place is not to_kind or set(map(type, plain)) != {TensorLeaf}:
            return None
        tensors: list[Any] = list(map(self._tensors.get, map(_NAME, plain)))
        if not PLAIN_TYPES.issuperset(map(type, tensors)) or not all(map(_IS_CPU, tensors)):
            return None
        if set(map(_DEVICE, plain)) != {"cpu"} or set(map(_CONTAINER, plain)) != {"tensor"}:
            return None
        return tensors if list(map(_REQUIRES_GRAD, tensors)) == list(map(_REQUIRES_GRAD, plain)) else None

    def _tensor(self, name: str, kind: str) -> torch.Tensor:
        if (name, kind) not in self._placed:
            tensor = self._tensors.get(name)
            if tensor is None:
                raise _damaged("a tensor that the checkpoint holds", name)
            self._placed[name, kind] = self._place(tensor, kind)
        return self._placed[name, kind]

    def _sparse(self, plain: Mapping[str, Any]) -> Any:
        try:
            parts = SparseParts(
                layout=plain[SPARSE_KEY],
                size=tuple(plain["size"].sizes),
                is_coalesced=plain["is_coalesced"] is True,
                tensors={key: self.build(part) for key, part in plain["parts"].items()},
            )
            container, requires_grad = plain["container"], plain["requires_grad"] is True
        except (KeyError, AttributeError, TypeError) as exc:
            raise _damaged("the parts of a sparse tensor", str(exc)) from exc
        return _contain(put_together(parts, where="a sparse tensor"), container, requires_grad)


def _hold(tensor: torch.Tensor, leaf: TensorLeaf | ScalarLeaf | ViewLeaf) -> Any:
    return _contain(tensor, leaf.container, leaf.requires_grad)


def _contain(tensor: torch.Tensor, container: str, requires_grad: bool) -> Any:
    if container == "tensor" and tensor.requires_grad == requires_grad:
        return tensor
    if container == "ndarray":
        return tensor.detach().cpu().numpy()
    if container == "parameter":
        return torch.nn.Parameter(tensor.detach(), requires_grad=requires_grad)
    if container in ("buffer", "buffer_non_persistent"):
        buffer: Any = torch.nn.Buffer
        return buffer(tensor.detach(), persistent=container == "buffer").requires_grad_(requires_grad)
    if container != "tensor":
        raise _damaged("a holder of tensors", container)
    return tensor.detach().requires_grad_(requires_grad)


def _check_holder(container: str, requires_grad: bool, dtype: str) -> None:
    kind = dtype_of(dtype)
    if container not in _CONTAINERS:
        raise _damaged("a holder of tensors", repr(container))
    if requires_grad and (container == "ndarray" or not (kind.is_floating_point or kind.is_complex)):
        raise _damaged("a value that can require grad", f"{container} of {dtype}")
    if container == "ndarray":
        torch.empty(0, dtype=kind, device="cpu").numpy()


def _check_view(leaf: ViewLeaf, stretch: tuple[int, ...]) -> None:
    if len(leaf.shape) != len(leaf.stride) or len(stretch) != 1:
        raise _damaged("a view of a one-dimensional stretch", leaf.name)
    last = leaf.offset + sum((length - 1) * stride for length, stride in zip(leaf.shape, leaf.stride, strict=True))
    if all(length > 0 for length in leaf.shape) and last >= stretch[0]:
        raise _damaged(f"a view inside of {stretch[0]} elements", f"{leaf.name} up to element {last}")


def _view(flat: torch.Tensor, leaf: ViewLeaf) -> torch.Tensor:
    _check_view(leaf, tuple(flat.shape))
    return flat.detach().as_strided(leaf.shape, leaf.stride, flat.storage_offset() + leaf.offset)


def _scalar(leaf: ScalarLeaf) -> torch.Tensor:
    try:
        return scalar_tensor(leaf.dtype, leaf.data)
    except RequestError as exc:
        raise _damaged(f"a scalar of dtype {leaf.dtype}", f"{len(leaf.data)} bytes") from exc


def _numpy_scalar(leaf: NumpyScalarLeaf) -> Any:
    if _NUMPY_DTYPE.fullmatch(leaf.dtype) is None:
        raise _damaged("a numeric numpy dtype", leaf.dtype)
    try:
        dtype = np.dtype(leaf.dtype)
        (value,) = np.frombuffer(leaf.data, dtype=dtype)
    except (TypeError, ValueError) as exc:
        raise _damaged(f"one number of dtype {leaf.dtype}", f"{len(leaf.data)} bytes") from exc
    return value


def _damaged(expected: str, found: str) -> CorruptionError:
    return CorruptionError("a stored value contradicts itself", where="a plain tree", expected=expected, found=found)
