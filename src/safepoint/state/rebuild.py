"""From a plain tree back to nested state; the other half of `safepoint.state.tree`.

Nothing of the tree is trusted: names, shapes, offsets and dtypes come from a file.
"""

from __future__ import annotations

import re
from collections import OrderedDict
from collections.abc import Callable, Mapping
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
from safepoint.state.sparse import SparseParts, put_together
from safepoint.state.tensors import dtype_of, scalar_tensor

# A dict with this key stands for a sparse tensor; `tree.flatten` refuses a user's dict that has it.
SPARSE_KEY = "safepoint.sparse"

_NUMPY_DTYPE = re.compile(r"[<|][biufc][0-9]{1,2}|<[Mm]8(\[[0-9]*[A-Za-z]+\])?")
_PENDING = object()


def to_kind(tensor: torch.Tensor, kind: str) -> torch.Tensor:
    """Return the tensor on a kind of device if this process has one, else on the CPU."""
    if tensor.device.type == kind:
        return tensor
    engine = getattr(torch, kind, None) if kind in ("cuda", "mps", "xpu") else None
    return tensor.to(kind if engine is not None and engine.is_available() else "cpu")


class Rebuilder:
    """Build one tree. Values marked as shared are built once."""

    def __init__(self, tensors: Mapping[str, torch.Tensor], place: Callable[[torch.Tensor, str], torch.Tensor]) -> None:
        self._tensors = tensors
        self._place = place
        self._placed: dict[tuple[str, str], torch.Tensor] = {}
        self._shared: dict[int, Any] = {}

    def build(self, plain: Any) -> Any:
        """Return the value that a tree stands for."""
        if isinstance(plain, Shared):
            self._shared[plain.number] = _PENDING
            self._shared[plain.number] = self.build(plain.value)
            return self._shared[plain.number]
        if isinstance(plain, Same):
            value = self._shared.get(plain.number, _PENDING)
            if value is _PENDING:
                raise _damaged("a reference to a finished earlier value", f"number {plain.number}")
            return value
        if type(plain) in (dict, OrderedDict):
            if SPARSE_KEY in plain:
                return self._sparse(plain)
            return type(plain)((self._key(key), self.build(element)) for key, element in plain.items())
        if type(plain) in (list, tuple):
            return type(plain)(self.build(element) for element in plain)
        if type(plain) in (set, frozenset):
            return type(plain)(self._key(element) for element in plain)
        if isinstance(plain, TensorLeaf):
            return _hold(self._tensor(plain.name, plain.device), plain)
        if isinstance(plain, ViewLeaf):
            return _hold(_view(self._tensor(plain.name, plain.device), plain), plain)
        if isinstance(plain, ScalarLeaf):
            return _hold(self._place(_scalar(plain), plain.device), plain)
        return self._key(plain)

    def _key(self, plain: Any) -> Any:
        if isinstance(plain, SizeLeaf):
            return torch.Size(plain.sizes)
        if isinstance(plain, DtypeLeaf):
            return dtype_of(plain.name)
        if isinstance(plain, NumpyScalarLeaf):
            return _numpy_scalar(plain)
        if type(plain) in (tuple, frozenset):
            return type(plain)(self._key(element) for element in plain)
        return plain

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
    if container == "ndarray":
        return tensor.detach().cpu().numpy()
    if container == "parameter":
        return torch.nn.Parameter(tensor.detach(), requires_grad=requires_grad)
    if container in ("buffer", "buffer_non_persistent"):
        buffer: Any = torch.nn.Buffer
        return buffer(tensor.detach(), persistent=container == "buffer").requires_grad_(requires_grad)
    if container != "tensor":
        raise _damaged("a holder of tensors", container)
    return tensor if tensor.requires_grad == requires_grad else tensor.detach().requires_grad_(requires_grad)


def _view(flat: torch.Tensor, leaf: ViewLeaf) -> torch.Tensor:
    has_elements = all(length > 0 for length in leaf.shape)
    if len(leaf.shape) != len(leaf.stride) or flat.dim() != 1:
        raise _damaged("a view of a one-dimensional stretch", leaf.name)
    last = leaf.offset + sum((length - 1) * stride for length, stride in zip(leaf.shape, leaf.stride, strict=True))
    if has_elements and last >= flat.numel():
        raise _damaged(f"a view inside of {flat.numel()} elements", f"{leaf.name} up to element {last}")
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
