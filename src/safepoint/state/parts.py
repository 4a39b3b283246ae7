"""One live tensor of a module: how it is stored, and how it is put back without losing its identity.

A strided tensor is one entry (a value of the tree if 0-dim), whether one rank holds it whole or several hold it in
parts (`safepoint.state.shards`). A sparse one is stored as its parts, and a wrapper subclass as the tensors that its
`__tensor_flatten__` names, provided that the rest of what it says is plain. The wrapper is never rebuilt from its
class's name: its inner tensors are filled in place.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from safepoint.errors import CorruptionError, RequestError
from safepoint.format.plain import DtypeLeaf, ScalarLeaf, SizeLeaf, TensorLeaf
from safepoint.state import shards, sparse
from safepoint.state.draft import container_of, device_kind
from safepoint.state.item import TensorSpec, TensorTarget
from safepoint.state.numbers import scalar_bytes, scalar_tensor
from safepoint.state.rebuild import SPARSE_KEY
from safepoint.state.targets import NewTensorTarget
from safepoint.state.tensors import (
    PLAIN_TYPES,
    check_storable,
    dtype_name,
    dtype_of,
    is_distributed,
    write_into,
)
from safepoint.state.tree import flatten, sparse_as_dict, unflatten

PARTS_KEY = "safepoint.parts"


@dataclass(frozen=True, slots=True)
class Signature:
    """Say what a stored or live tensor looks like: ``strided``, a sparse layout, or a wrapper with its context."""

    form: str
    shape: tuple[int, ...]
    dtype: str


def describe(
    tensor: torch.Tensor, name: str, path: str, *, is_plain: bool = False
) -> tuple[object, list[tuple[str, torch.Tensor]]]:
    """Return the plain description of a live tensor and the tensors to store for it, by name.

    Args:
        tensor: The tensor.
        name: What it is called.
        path: For messages.
        is_plain: Whether it is known to be `are_plainly_storable`.

    Raises:
        RequestError: The tensor has no exact stored form; names the path.
    """
    if not is_plain:
        if is_distributed(tensor):
            shards.check_held(tensor, path)
        elif _is_wrapper(tensor):
            return _describe_wrapper(tensor, name, path)
        else:
            check_storable(tensor, path)
            if sparse.is_sparse(tensor):
                return _describe_sparse(tensor, name, path)
    # A distributed tensor is described as the whole that the ranks hold together, as if it were a plain one.
    holder = (container_of(tensor), device_kind(tensor), tensor.requires_grad)
    if tensor.dim() == 0:
        return ScalarLeaf(dtype_name(tensor.dtype), scalar_bytes(shards.local_of(tensor)), *holder), []
    return TensorLeaf(name, *holder), [(name, tensor)]


def signature(value: object, specs: Mapping[str, TensorSpec]) -> Signature:
    """Return what a description stands for; `specs` are those of the tensors that it names."""
    if isinstance(value, ScalarLeaf):
        return Signature("strided", (), value.dtype)
    if isinstance(value, TensorLeaf):
        spec = specs.get(value.name)
        if spec is None:
            raise _damaged("a tensor that the checkpoint holds", value.name)
        return Signature("strided", spec.global_shape, spec.dtype)
    try:
        fields: Mapping[str, Any] = value  # type: ignore[assignment]  # anything else fails below, as damage
        inner = {key: signature(part, specs) for key, part in fields["parts"].items()}
        if SPARSE_KEY in fields:
            return Signature(fields[SPARSE_KEY], fields["size"].sizes, inner["values"].dtype)
        form = f"{fields[PARTS_KEY]} {fields['context']!r} {sorted(inner.items(), key=lambda item: item[0])!r}"
        return Signature(form, fields["size"].sizes, fields["dtype"].name)
    except (KeyError, AttributeError, TypeError) as exc:
        raise _damaged("the description of a tensor", str(exc)) from exc


def targets_in(live: torch.Tensor, value: Any, specs: Mapping[str, TensorSpec], path: str) -> dict[str, TensorTarget]:
    """Return the targets that put a description's tensors into a live one of the same form and shape."""
    if isinstance(value, TensorLeaf):
        return {value.name: shards.target_in(live, path, dtype=dtype_of(specs[value.name].dtype))}
    if isinstance(value, ScalarLeaf):
        return {}
    if SPARSE_KEY in value:
        names = [part.name for part in value["parts"].values()]
        return {name: NewTensorTarget(specs[name], live.device) for name in names}
    return {
        name: target
        for key, part in value["parts"].items()
        for name, target in targets_in(getattr(live, key), part, specs, path).items()
    }


def put_back(live: torch.Tensor, value: Any, targets: Mapping[str, TensorTarget]) -> None:
    """Finish what the committed targets of `targets_in` began: values of the tree, and sparse tensors as a whole."""
    if isinstance(value, ScalarLeaf):
        write_into(shards.local_of(live), scalar_tensor(value.dtype, value.data))
    elif isinstance(value, dict) and SPARSE_KEY in value:
        restored: torch.Tensor = unflatten(value, new_tensors(targets), place=lambda tensor, _: tensor)
        sparse.replace(live, restored.detach().to(live.dtype))
    elif isinstance(value, dict):
        for key, part in value["parts"].items():
            put_back(getattr(live, key), part, targets)


def new_tensors(targets: Mapping[str, TensorTarget]) -> dict[str, torch.Tensor]:
    """Return the tensors that committed targets made, by name."""
    return {
        name: target.tensor
        for name, target in targets.items()
        if isinstance(target, NewTensorTarget) and target.tensor is not None
    }


def held_as(value: Any, *, takes_flag: bool) -> object:
    """Return how a description says that its tensor is held, without what a restore sets.

    The kind of device is a hint. `takes_flag` says that `requires_grad` is restored.
    """
    if isinstance(value, TensorLeaf | ScalarLeaf):
        name = value.name if isinstance(value, TensorLeaf) else ""
        return (type(value), name, value.container, None if takes_flag else value.requires_grad)
    if not isinstance(value, dict):
        return value
    free = {"is_coalesced", "requires_grad"} if takes_flag else {"is_coalesced"}
    return [(key, held_as(part, takes_flag=takes_flag)) for key, part in value.items() if key not in free]


def flag_of(value: Any, default: bool) -> bool:
    """Return a description's flag; one without, of a wrapper, has that of its entry."""
    flag = value.get("requires_grad", default) if isinstance(value, dict) else value.requires_grad
    return flag is True


def _is_wrapper(tensor: torch.Tensor) -> bool:
    if type(tensor) in PLAIN_TYPES or torch.nn.parameter.is_lazy(tensor) or tensor.is_nested:
        return False
    detached = tensor.detach()
    return type(detached) is not torch.Tensor and hasattr(detached, "__tensor_flatten__")


def _describe_wrapper(tensor: torch.Tensor, name: str, path: str) -> tuple[object, list[tuple[str, torch.Tensor]]]:
    wrapper: Any = tensor.detach()
    keys, context = wrapper.__tensor_flatten__()
    plain, loose = flatten(context, path=f"{path} (its context)")
    if loose:
        raise RequestError(
            "a tensor subclass cannot be stored: the context of its __tensor_flatten__ holds a tensor",
            where=path,
            found=type(wrapper).__qualname__,
            remedy="Name the tensor among its inner tensors.",
        )
    parts: dict[str, object] = {}
    tensors: list[tuple[str, torch.Tensor]] = []
    for key in keys:
        parts[key], inner = describe(getattr(wrapper, key), f"{name}/{key}", f"{path}.{key}")
        tensors += inner
    described = {
        PARTS_KEY: f"{type(wrapper).__module__}.{type(wrapper).__qualname__}",
        "context": plain,
        "size": SizeLeaf(tuple(wrapper.shape)),
        "dtype": DtypeLeaf(dtype_name(wrapper.dtype)),
        "parts": parts,
    }
    return described, tensors


def _describe_sparse(tensor: torch.Tensor, name: str, path: str) -> tuple[object, list[tuple[str, torch.Tensor]]]:
    described = sparse_as_dict(tensor, path=path)
    parts: dict[str, torch.Tensor] = described["parts"]
    leaves = {key: TensorLeaf(f"{name}/{key}", device=part.device.type) for key, part in parts.items()}
    return {**described, "parts": leaves}, [(leaves[key].name, part) for key, part in parts.items()]


def _damaged(expected: str, found: str) -> CorruptionError:
    return CorruptionError(
        "the description of a module contradicts itself", where="a module item", expected=expected, found=found
    )
