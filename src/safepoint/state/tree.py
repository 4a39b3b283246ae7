"""Nested state as a plain tree and a list of named tensors, and back.

1. The set of types is closed and exact: a subclass (IntEnum, namedtuple, defaultdict) is refused by its path.
2. What was one object stays one object: a list, dict, OrderedDict, set, tensor or array that is reached twice is stored
   once. Tensors that overlap in memory overlap again after `unflatten`.
3. A tensor's name is its path; see `safepoint.state.places`.
4. 0-dim tensors become values of the tree.

A tensor that needs grad comes back as a leaf: the graph that made it is no state of a boundary.

Spec: F3, F4.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import chain
from typing import Any

import numpy as np
import torch

from safepoint.errors import InternalError, RequestError
from safepoint.format.dtypes import DTYPES
from safepoint.format.plain import (
    MAX_DEPTH,
    DtypeLeaf,
    NumpyScalarLeaf,
    Same,
    ScalarLeaf,
    Shared,
    SizeLeaf,
    TensorLeaf,
    ViewLeaf,
)
from safepoint.state import shards, sparse
from safepoint.state.aliases import Occupant, Span, find_spans
from safepoint.state.draft import ATOMS, Draft, NamedTensors, Values, container_of, device_kind
from safepoint.state.leaf_columns import rows_of, tensor_leaves
from safepoint.state.numbers import scalar_bytes
from safepoint.state.places import below, join, plain_names_below, segment, tensor_name
from safepoint.state.rebuild import MANY, SPARSE_KEY, Rebuilder, to_kind
from safepoint.state.sight import Sight
from safepoint.state.tensors import PLAIN_TYPES, check_storable, dtype_name, is_distributed

_CONTAINERS = (list, dict, OrderedDict, set)


def flatten(
    value: object, *, path: str = "", prefix: str = "", may_be_distributed: bool = False
) -> tuple[object, list[tuple[str, torch.Tensor]]]:
    """Take nested state apart into a plain tree and the tensors that its leaves name.

    Args:
        value: Builtin values and containers, tensors, numpy scalars and numeric arrays, in any nesting to 64 levels.
        path: Where the value stands, for messages.
        prefix: The beginning of each tensor's name.
        may_be_distributed: Take distributed tensors too; in the tree they stand as plain ones do.

    Returns:
        The tree, and the tensors in the order of the tree. They are the live ones, or views of them.

    Raises:
        RequestError: A value is outside the closed set, contains itself, or shares memory in a way that cannot be
            kept; names the path.
    """
    survey = _Survey(may_be_distributed=may_be_distributed)
    survey.visit(value, path, 0)
    builder = _Builder(survey, find_spans(survey.occupants))
    return builder.build(value, prefix), builder.tensors


def draft_of(value: object, sight: Sight, *, path: str, may_be_distributed: bool = False) -> Draft:
    """Take nested state apart as `flatten` does, and leave its values open.

    Args:
        value: The state.
        sight: What is seen of it.
        path: Where it stands, for messages.
        may_be_distributed: As for `flatten`.

    Raises:
        RequestError: As `flatten` does.
    """
    survey = _Survey(may_be_distributed=may_be_distributed)
    spans = survey.take_over(sight)
    if spans is None:
        survey = _Survey(may_be_distributed=may_be_distributed)
        survey.visit(value, path, 0)
        spans = find_spans(survey.occupants)
    values = Values()
    builder = _Builder(survey, spans, values)
    return Draft(builder.build(value, ""), values.found, builder.tensors, builder.origins)


def unflatten(
    plain: object,
    tensors: Mapping[str, torch.Tensor],
    *,
    place: Callable[[torch.Tensor, str], torch.Tensor] = to_kind,
) -> Any:
    """Put nested state together again.

    Args:
        plain: What `flatten` made, also after a way through JSON.
        tensors: The tensors by name. They are taken over, not copied: the result may be changed through them.
        place: Returns a tensor on the kind of device it was on; by default there if this process has one, else on the
            CPU.

    Raises:
        CorruptionError: A leaf names no tensor, or a view reaches outside of its stretch.
    """
    return Rebuilder(tensors, place).build(plain)


def class_name(value: object) -> str:
    """Return the name of a value's class, as checkpoints record it.

    Without the module: a class of a script has another one when the script is imported or moved.
    """
    return type(value).__qualname__


def sparse_as_dict(tensor: torch.Tensor, *, path: str) -> dict[str, Any]:
    """Return the description of a sparse tensor; ``parts`` holds the live parts, whose leaves the caller makes."""
    parts = sparse.take_apart(tensor, path=path)
    return {
        SPARSE_KEY: parts.layout,
        "size": SizeLeaf(parts.size),
        "is_coalesced": parts.is_coalesced,
        "container": container_of(tensor),
        "requires_grad": tensor.requires_grad,
        "parts": dict(parts.tensors),
    }


class _Survey:
    """Visit all of a state once: check it, count what is reached twice, note what lies where."""

    def __init__(self, *, may_be_distributed: bool) -> None:
        self._may_be_distributed = may_be_distributed
        self.visits: dict[int, int] = {}
        self.occupants: list[Occupant] = []
        # What stands for an array or a sparse tensor; it also keeps temporaries alive, so that no id is used twice.
        self.stand_ins: dict[int, Any] = {}
        self._open: set[int] = set()

    def take_over(self, sight: Sight) -> dict[int, Span] | None:
        """Take a state as visited that was seen, and return its spans; None if it has to be visited all the same.

        That is where a part is of unknown kind, and where something is wrong, so that its path is told. A sight is
        known only of what a visit passes, but for what is checked here.
        """
        if not sight.is_known:
            return None
        self.visits = dict.fromkeys(sight.repeated, 2)
        try:
            if sight.are_plain_and_apart():
                return {}
            self.occupants = [self._occupant(tensor, "") for tensor in sight.tensors]
            return find_spans(self.occupants)
        except RequestError:
            return None

    def visit(self, value: Any, path: str, depth: int) -> None:
        kind = type(value)
        if kind in ATOMS or kind is torch.Size:
            return
        if depth > MAX_DEPTH:
            raise RequestError(
                "the state nests too deeply to be stored", where=path, expected=f"at most {MAX_DEPTH} levels"
            )
        if kind in (tuple, frozenset):
            self._visit_elements(value, path, depth)
        elif kind in _CONTAINERS or kind is np.ndarray or isinstance(value, torch.Tensor):
            self._visit_once(value, path, depth)
        elif isinstance(value, np.generic):
            _check_numpy(value.dtype, "bcfiuMm", path)
        elif kind is torch.dtype and dtype_name(value) in DTYPES:
            return
        else:
            raise _outside(value, path)

    def _visit_once(self, value: Any, path: str, depth: int) -> None:
        key = id(value)
        if key in self._open:
            raise RequestError("the state contains itself and cannot be stored", where=path, remedy="Break the cycle.")
        self.visits[key] = self.visits.get(key, 0) + 1
        if self.visits[key] > 1:
            return
        self._open.add(key)
        if isinstance(value, torch.Tensor):
            self._visit_tensor(value, path, depth)
        elif isinstance(value, np.ndarray):
            self.stand_ins[key] = _array_as_tensor(value, path)
            self.occupants.append(Occupant(key, self.stand_ins[key], path, is_array=True))
        else:
            self._visit_elements(value, path, depth)
        self._open.discard(key)

    def _visit_tensor(self, tensor: torch.Tensor, path: str, depth: int) -> None:
        occupant = self._occupant(tensor, path)
        if not occupant.is_shard and sparse.is_sparse(tensor):
            self.stand_ins[id(tensor)] = sparse_as_dict(tensor, path=path)
            self._visit_elements(self.stand_ins[id(tensor)]["parts"], path, depth)
        else:
            self.occupants.append(occupant)

    def _occupant(self, tensor: torch.Tensor, path: str) -> Occupant:
        if self._may_be_distributed and is_distributed(tensor):
            shards.check_held(tensor, path)
            return Occupant(id(tensor), shards.local_of(tensor), path, is_shard=True)
        check_storable(tensor, path)
        if isinstance(tensor, torch.nn.Parameter) and type(tensor) is not torch.nn.Parameter:
            raise _outside(tensor, path)
        return Occupant(id(tensor), tensor, path)

    def _visit_elements(self, value: Any, path: str, depth: int) -> None:
        if isinstance(value, dict):
            if SPARSE_KEY in value:
                raise RequestError("a key of the state is reserved", where=path, found=repr(SPARSE_KEY))
            for key, element in value.items():
                _check_key(key, path, depth + 1)
                self.visit(element, join(path, key), depth + 1)
        elif isinstance(value, set | frozenset):
            for element in value:
                _check_key(element, path, depth + 1)
        else:
            for index, element in enumerate(value):
                self.visit(element, f"{path}[{index}]", depth + 1)


class _Builder:
    """Build the plain tree of a surveyed state."""

    def __init__(self, survey: _Survey, spans: dict[int, Span], values: Values | None = None) -> None:
        self.tensors: NamedTensors = []
        self.origins: list[torch.Tensor] = []
        self._values = values
        self._survey = survey
        self._visits = survey.visits
        self._segments: dict[str, str] = {}
        self._spans = spans
        self._span_names: dict[int, str] = {}
        self._numbers: dict[int, int] = {}

    def build(self, value: Any, name: str) -> object:
        """Return the tree of one value; `name` begins the names of its tensors."""
        if type(value) in ATOMS:
            return value if self._values is None or type(value) is str else self._values.leave_open(value)
        key = id(value)
        if self._visits.get(key, 0) < 2:
            return self._bare(value, name)
        if key in self._numbers:
            return Same(self._numbers[key])
        self._numbers[key] = len(self._numbers)
        return Shared(self._numbers[key], self._bare(value, name))

    def _bare(self, value: Any, name: str) -> object:
        kind = type(value)
        if kind in PLAIN_TYPES:
            return self._tensor(value, name)
        if kind in (dict, OrderedDict):
            held = self._many(value, name) if len(value) >= MANY else None
            return kind(self._pairs(value, name) if held is None else zip(value, held, strict=True))
        if kind in (list, tuple):
            return kind(self.build(element, below(name, index)) for index, element in enumerate(value))
        if kind in (set, frozenset):
            return kind(_plain_key(element) for element in value)
        if kind is np.ndarray:
            return self._leaf(self._survey.stand_ins[id(value)], id(value), name, "ndarray")
        if isinstance(value, torch.Tensor):
            return self._tensor(value, name)
        return _plain_key(value)

    def _pairs(self, value: Mapping[Any, Any], name: str) -> Iterator[tuple[Any, object]]:
        begin = f"{name}/" if name else ""
        for position, (key, element) in enumerate(value.items()):
            if type(key) is not str:
                yield _plain_key(key), self.build(element, below(name, key, position))
                continue
            # The states of all parameters have the same keys.
            part = self._segments.get(key)
            if part is None:
                part = self._segments[key] = segment(key)
            yield key, self.build(element, begin + part)

    def _many(self, held: Mapping[Any, Any], name: str) -> Sequence[object] | None:
        """Return what stands for what a dict holds if that is plain tensors, or dicts of them, met once; else None."""
        values, names, met_again = list(held.values()), None, self._visits.keys()
        if not self._spans and set(map(type, held)) == {str} and met_again.isdisjoint(map(id, values)):
            names = plain_names_below(name, list(held))
        if names is None:
            return None
        leaves: Sequence[object] | None = tensor_leaves(values, names)
        named: NamedTensors = list(zip(names, values, strict=True))
        if leaves is None and self._values is not None and set(map(type, values)) == {dict} and values[0]:
            rows = rows_of(values, names, first=len(self._values.found))
            if rows is not None and met_again.isdisjoint(map(id, chain.from_iterable(map(dict.values, values)))):
                leaves, named = rows.leaves, rows.named
                self._values.found += rows.opened
        if leaves is not None:
            self.tensors += named
            self.origins += [tensor for _, tensor in named]
        return leaves

    def _tensor(self, tensor: torch.Tensor, name: str) -> object:
        if tensor.layout is not torch.strided and sparse.is_sparse(tensor):
            # The parts of one sparse tensor are its own; only the whole can be shared.
            stand_in = self._survey.stand_ins[id(tensor)]
            return {**stand_in, "parts": dict(self._pairs(stand_in["parts"], name))}
        return self._leaf(tensor, id(tensor), name, container_of(tensor))

    def _leaf(self, tensor: torch.Tensor, key: int, name: str, container: str) -> object:
        span = self._spans.get(key) if self._spans else None
        if span is None and tensor.dim():
            return TensorLeaf(self._add(name, tensor, tensor), container, device_kind(tensor), tensor.requires_grad)
        if span is None and self._values is not None:
            return self._values.leave_scalar_open(tensor, container)
        holder = (container, device_kind(tensor), tensor.requires_grad)
        if span is None:
            return ScalarLeaf(dtype_name(tensor.dtype), scalar_bytes(shards.local_of(tensor)), *holder)
        if id(span) not in self._span_names:
            self._span_names[id(span)] = self._add(name, span.flat, span.origin)
        shape, stride = tuple(tensor.shape), tuple(tensor.stride())
        return ViewLeaf(self._span_names[id(span)], span.offset_of(tensor), shape, stride, *holder)

    def _add(self, name: str, tensor: torch.Tensor, origin: torch.Tensor) -> str:
        name = tensor_name(name, len(self.tensors))
        self.tensors.append((name, tensor))
        self.origins.append(origin)
        return name


def _plain_key(value: Any) -> Any:
    if type(value) is str:
        return value
    if type(value) is torch.Size:
        return SizeLeaf(tuple(value))
    if type(value) is torch.dtype:
        return DtypeLeaf(dtype_name(value))
    if isinstance(value, np.generic):
        return NumpyScalarLeaf(value.dtype.newbyteorder("<").str, value.astype(value.dtype.newbyteorder("<")).tobytes())
    if type(value) in (tuple, frozenset):
        return type(value)(_plain_key(element) for element in value)
    if type(value) in ATOMS:
        return value
    raise InternalError("a value passed the survey but has no plain form", found=type(value).__qualname__)


def _check_key(key: Any, path: str, depth: int) -> None:
    if type(key) in (tuple, frozenset) and depth <= MAX_DEPTH:
        for element in key:
            _check_key(element, path, depth + 1)
    elif isinstance(key, np.generic):
        _check_numpy(key.dtype, "bcfiuMm", path)
    elif type(key) is torch.dtype and dtype_name(key) in DTYPES:
        return
    elif type(key) not in ATOMS and type(key) is not torch.Size:
        raise _outside(key, f"{path} (a key or an element of a set)")


def _check_numpy(dtype: np.dtype[Any], kinds: str, path: str) -> None:
    wide = dtype.itemsize > (16 if dtype.kind == "c" else 8)
    if dtype.kind not in kinds or wide:
        raise RequestError(
            "a numpy value of the state cannot be stored",
            where=path or "the state",
            expected="a boolean, integer, float or complex dtype of at most 64 bits a number",
            found=f"dtype {dtype}",
            remedy="Store a list or a converted array.",
        )


def _array_as_tensor(array: np.ndarray[Any, Any], path: str) -> torch.Tensor:
    _check_numpy(array.dtype, "bcfiu", path)
    if not array.dtype.isnative:
        raise RequestError(
            "an array of the state has a foreign byte order",
            where=path or "the state",
            found=f"dtype {array.dtype.str}",
            remedy="Store array.astype(array.dtype.newbyteorder('=')).",
        )
    # torch takes neither negative strides nor read-only memory; the copy is made at the boundary like the rest.
    is_taken = array.flags.writeable and all(stride >= 0 and stride % array.itemsize == 0 for stride in array.strides)
    return torch.from_numpy(array if is_taken else array.copy(order="C"))


def _outside(value: Any, path: str) -> RequestError:
    return RequestError(
        "a value of the state cannot be stored",
        where=path or "the state",
        expected="None, bool, int, float, complex, str, bytes, list, tuple, dict, OrderedDict, set, frozenset, a date "
        "or time, a path, a tensor, a numpy scalar or numeric array, torch.Size or torch.dtype; no subclass of these",
        found=f"{type(value).__module__}.{type(value).__qualname__}",
        remedy="Store plain values that rebuild it, for example in the object's state_dict().",
    )
