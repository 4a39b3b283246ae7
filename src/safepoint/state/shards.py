"""Tensors distributed over ranks (`DTensor`), as boxes of the whole tensor.

1. What a rank holds follows from the mesh, its own coordinate, the placements and the shapes. No rank is asked, no
   number is drawn, nothing is gathered: a whole tensor is never made.
2. A box is a view of the local memory, for reading and for writing.
3. A description names global shapes only. How a tensor is divided is no part of the state, so that the same state can
   be held in another division, or whole.
4. torch.distributed.tensor is imported only where a tensor of it was met: importing it takes a second.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Sequence
from itertools import compress, repeat
from operator import attrgetter
from typing import Any

import msgspec
import torch

from safepoint.errors import RequestError
from safepoint.format.digest import digest_bytes
from safepoint.state.boxes import Cut, LocalBox, in_order_of_cutting, share_of
from safepoint.state.item import BoxTarget, CapturedTensor, Place, TensorSpec
from safepoint.state.memory import versions_of
from safepoint.state.streams import carrier_to
from safepoint.state.targets import InPlaceTarget, NewTensorTarget
from safepoint.state.tensors import (
    PLAIN_TYPES,
    TensorSource,
    are_distributed,
    check_storable,
    dtype_name,
    dtype_of,
    is_distributed,
    spec_of,
    specs_of,
)

# Digits of a digest that people see.
_SHORT = 12

_NAME: Callable[[TensorSpec], str] = attrgetter("name")
# Of a distributed tensor; what its public names return takes a call in Python for each.
_LOCAL: Callable[[torch.Tensor], torch.Tensor] = attrgetter("_local_tensor")
_DIVISION = attrgetter("_spec")
_MESH, _PLACEMENTS = attrgetter("mesh"), attrgetter("placements")


class ShardTarget:
    """Take the boxes that this rank holds of a tensor: of a live one, or of one that is made when it is first needed.

    `tensor` is the distributed tensor; it is complete when all boxes are committed.
    """

    __slots__ = ("_boxes", "_make", "_tensor")

    def __init__(self, held: Sequence[LocalBox], make: Callable[[], torch.Tensor], dtype: torch.dtype) -> None:
        self._make = make
        self._tensor: torch.Tensor | None = None
        self._boxes = tuple(_Box(one, dtype, self._view) for one in held)

    @property
    def tensor(self) -> torch.Tensor:
        """Return the tensor, made if need be."""
        if self._tensor is None:
            self._tensor = self._make()
        return self._tensor

    def boxes(self) -> Sequence[BoxTarget]:
        """Return a target for each box."""
        return self._boxes

    def _view(self, box: LocalBox) -> torch.Tensor:
        return view_of(local_of(self.tensor), box)


class _Box:
    """Take one box, into its part of the local memory."""

    __slots__ = ("_dtype", "_held", "_inner", "_view")

    def __init__(self, held: LocalBox, dtype: torch.dtype, view: Callable[[LocalBox], torch.Tensor]) -> None:
        self._held, self._dtype, self._view = held, dtype, view
        self._inner: InPlaceTarget | None = None

    @property
    def offset(self) -> tuple[int, ...]:
        return self._held.offset

    @property
    def shape(self) -> tuple[int, ...]:
        return self._held.shape

    @property
    def nbytes(self) -> int:
        return math.prod(self._held.shape) * self._dtype.itemsize

    def memory(self) -> memoryview:
        return self._in_place().memory()

    @property
    def is_in_place(self) -> bool:
        return self._in_place().is_in_place

    carrier = staticmethod(carrier_to)

    @property
    def landing(self) -> torch.Tensor | None:
        return self._in_place().landing

    def commit(self) -> Place | None:
        place = self._in_place().commit()
        self._inner = None
        return place

    def _in_place(self) -> InPlaceTarget:
        if self._inner is None:
            self._inner = InPlaceTarget(self._view(self._held), dtype=self._dtype)
        return self._inner


def local_of(tensor: torch.Tensor) -> torch.Tensor:
    """Return the memory that this rank has of a tensor, detached; a plain tensor is returned as it is."""
    return memory_of(tensor).detach() if is_distributed(tensor) else tensor


def memory_of(tensor: torch.Tensor) -> torch.Tensor:
    """Return the tensor whose memory this rank has of a tensor: the very one that a distributed tensor holds."""
    if not is_distributed(tensor):
        return tensor
    distributed: Any = tensor
    # What `to_local` returns without a graph, at a twentieth of its price.
    local: torch.Tensor = distributed._local_tensor
    return local


def memories_of(tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Return `memory_of` each tensor."""
    told = zip(tensors, are_distributed(tensors), strict=True)
    return [_LOCAL(tensor) if is_divided else tensor for tensor, is_divided in told]


def boxes_of(tensor: torch.Tensor, path: str) -> tuple[LocalBox, ...]:
    """Return the boxes that this rank holds of a distributed tensor; a rank outside of its mesh holds none.

    Raises:
        RequestError: By path: a placement is neither Shard nor Replicate, or the local memory has another shape than
            the placements say.
    """
    distributed: Any = tensor
    _check_placements(tensor, path)
    coordinate = distributed.device_mesh.get_coordinate()
    if coordinate is None:
        return ()
    local, whole = local_of(tensor), tuple(tensor.shape)
    cuts = _cuts(distributed, coordinate)
    share = share_of(whole, cuts)
    if _is_of_shape(local, share.shape):
        return share.boxes
    reading = in_order_of_cutting(cuts)
    other = None if reading is None else share_of(whole, reading)
    if other is not None and _is_of_shape(local, other.shape):
        return other.boxes
    raise RequestError(
        "a distributed tensor contradicts its placements, so it is not known which part a rank holds",
        where=path,
        expected=f"a local tensor of shape {share.shape}",
        found=f"{tuple(local.shape)} with {distributed.placements} of shape {whole}",
        remedy="Make it with distribute_tensor(), or give DTensor.from_local() the true shape and stride.",
    )


def check_held(tensor: torch.Tensor, path: str) -> None:
    """Refuse a distributed tensor that has no exact stored form here.

    Raises:
        RequestError: By path: a placement is neither Shard nor Replicate, the local memory cannot be stored, or the
            tensor is 0-dim, thus a value of the plain tree, and this rank has no value.
    """
    _check_placements(tensor, path)
    check_storable(local_of(tensor), path)
    if tensor.dim() == 0 and not _is_within_mesh(tensor):
        raise RequestError(
            "a distributed number has no value on this rank",
            where=path,
            expected="a rank of the tensor's mesh",
            remedy="Leave it out on ranks outside of the mesh.",
        )


def view_of(local: torch.Tensor, box: LocalBox) -> torch.Tensor:
    """Return a box as a view of the local memory."""
    if box.shape == tuple(local.shape):
        return local
    if math.prod(box.shape) == 0:
        return local.new_empty(box.shape)
    for axis, (start, length) in enumerate(zip(box.start, box.shape, strict=True)):
        local = local.narrow(axis, start, length)
    return local


def captured(
    tensors: Iterable[tuple[str, torch.Tensor]], path: str, *, leaders: Collection[str] = ()
) -> tuple[CapturedTensor, ...]:
    """Return what a capture says of named live tensors: one box for a plain one, this rank's boxes for another.

    Args:
        tensors: The tensors by name.
        path: For messages.
        leaders: Names of plain tensors that may differ between ranks; the leader's count.
    """
    found: list[CapturedTensor] = []
    named = list(tensors)
    held = [tensor for _, tensor in named]
    versions = versions_of(held)
    if PLAIN_TYPES.issuperset(map(type, held)):
        specs = specs_of(named)
        names = list(map(_NAME, specs))
        sources = map(TensorSource, held, map(f"{path}: ".__add__, names), versions)
        are_leaders = map(leaders.__contains__, names) if leaders else repeat(False)
        return tuple(map(CapturedTensor, specs, sources, are_leaders))
    for (name, tensor), version in zip(named, versions, strict=True):
        where = f"{path}: {name}"
        if not is_distributed(tensor):
            found.append(CapturedTensor(spec_of(name, tensor), TensorSource(tensor, where, version), name in leaders))
            continue
        whole = tuple(tensor.shape)
        for box in boxes_of(tensor, where):
            spec = TensorSpec(name, dtype_name(tensor.dtype), box.shape, whole, box.offset)
            found.append(CapturedTensor(spec, source_in(tensor, box, where)))
    return tuple(found)


def source_in(tensor: torch.Tensor, box: LocalBox, where: str) -> TensorSource:
    """Return the source of a box of a distributed tensor, as it is now."""
    return TensorSource.of(view_of(local_of(tensor), box), where, counter=tensor)


def ways_of(tensors: Sequence[torch.Tensor]) -> object:
    """Return all that says how distributed tensors are divided, as far as this rank is concerned; to be compared."""
    specs = list(map(_DIVISION, tensors))
    meshes: list[Any] = list(map(_MESH, specs))
    each = {id(mesh): mesh for mesh in meshes}
    told = {key: (tuple(mesh.shape), mesh.mesh_dim_names, mesh.get_coordinate()) for key, mesh in each.items()}
    placements: list[tuple[object, ...]] = list(map(_PLACEMENTS, specs))
    kinds = [tuple(map(type, one)) for one in placements]
    orders = [getattr(spec, "shard_order", None) for spec in specs]
    return [told[id(mesh)] for mesh in meshes], placements, kinds, orders


def division_of(tensors: Iterable[tuple[str, torch.Tensor]]) -> str:
    """Return in a line how the distributed ones of named tensors are divided; empty if none is.

    Equal for two states if the same names are divided over meshes of the same shape and dimensions' names in the same
    way, whichever rank asks, and whether it holds a part or not.
    """
    named = list(tensors)
    are_divided = are_distributed([tensor for _, tensor in named])
    if not any(are_divided):
        return ""
    each = sorted((name, _division_of(tensor)) for name, tensor in compress(named, are_divided))
    listed = ", ".join(f"{count} x {text}" for text, count in sorted(Counter(text for _, text in each).items()))
    # Which tensors they are is in the digest alone: the names may be many.
    return f"{listed} [{digest_bytes(msgspec.json.encode(each))[:_SHORT]}]"


def target_in(live: torch.Tensor, path: str, *, dtype: torch.dtype | None = None) -> InPlaceTarget | ShardTarget:
    """Return a target that writes into a live strided tensor, whole or in this rank's boxes."""
    if not is_distributed(live):
        return InPlaceTarget(live, dtype=dtype)
    return ShardTarget(boxes_of(live, path), lambda: live, dtype or live.dtype)


def new_target(
    spec: TensorSpec, device: torch.device, path: str, *, like: torch.Tensor | None = None
) -> NewTensorTarget | ShardTarget:
    """Return a target that makes a tensor.

    Args:
        spec: The stored tensor, whole.
        device: Where a plain tensor shall live.
        path: For messages.
        like: A tensor that the new one is used together with. If it is distributed, so is the new one: divided like it
            if their shapes are equal, else held whole by each rank. torch refuses to compute with a distributed and a
            plain tensor, unless that has one element.
    """
    if like is None or not is_distributed(like):
        return NewTensorTarget(spec, device)
    dtype, shape = dtype_of(spec.dtype), spec.global_shape
    if tuple(like.shape) == shape:
        return ShardTarget(boxes_of(like, path), lambda: _empty_like(like, dtype), dtype)
    if shape == (1,):
        return NewTensorTarget(spec, device)
    held = share_of(shape, ()).boxes if _is_within_mesh(like) else ()
    return ShardTarget(held, lambda: _empty_replica(like, shape, dtype), dtype)


def scatter(whole: torch.Tensor, like: torch.Tensor, path: str) -> torch.Tensor:
    """Return a whole tensor, which every rank holds, divided like another one of its shape."""
    divided = _empty_like(like, whole.dtype)
    local = local_of(divided)
    for box in boxes_of(like, path):
        part = tuple(slice(start, start + length) for start, length in zip(box.offset, box.shape, strict=True))
        view_of(local, box).copy_(whole.detach()[part])
    return divided


def is_divided_alike(one: torch.Tensor, other: torch.Tensor, path: str) -> bool:
    """Return whether this rank holds the same boxes of two tensors."""
    if is_distributed(one) != is_distributed(other):
        return False
    return not is_distributed(one) or boxes_of(one, path) == boxes_of(other, path)


def _division_of(tensor: torch.Tensor) -> str:
    distributed: Any = tensor
    mesh, ways = distributed.device_mesh, []
    for placement in distributed.placements:
        axis, factor = getattr(placement, "dim", None), getattr(placement, "split_factor", 1)
        way = type(placement).__name__.strip("_")
        ways.append(way if axis is None else f"{way}({axis})" if factor == 1 else f"{way}({axis}, {factor})")
    sizes = tuple(mesh.shape)
    names = mesh.mesh_dim_names or ("",) * len(sizes)
    over = " x ".join(f"{name}={size}" if name else str(size) for name, size in zip(names, sizes, strict=True))
    return f"{' '.join(ways)} over {over} ranks"


def _cuts(tensor: Any, coordinate: Sequence[int]) -> list[Cut]:
    sizes, placements = tuple(tensor.device_mesh.shape), tensor.placements
    order = list(range(len(placements)))
    for entry in getattr(tensor._spec, "shard_order", None) or ():
        # Places of the mesh's dimensions that cut this axis, in the order in which they do; by default the mesh's own.
        for place, dimension in zip(sorted(entry.mesh_dims), entry.mesh_dims, strict=True):
            order[place] = dimension
    return [
        Cut(placements[one].dim, sizes[one], coordinate[one], getattr(placements[one], "split_factor", 1))
        for one in order
        if type(placements[one]).__name__ != "Replicate"
    ]


def _check_placements(tensor: torch.Tensor, path: str) -> None:
    distributed: Any = tensor
    for placement in distributed.placements:
        # By name: what `isinstance` says of a strided one differs between versions of torch, and it has no public name.
        if type(placement).__name__ in ("Shard", "_StridedShard", "Replicate"):
            continue
        if placement.is_partial():
            why, remedy = "its parts are still to be added up (Partial)", "Redistribute it to Shard or Replicate first."
        else:
            why, remedy = "it is divided in an unknown way", "Redistribute it to Shard or Replicate first."
        raise RequestError(
            f"a tensor of the state cannot be stored: {why}",
            where=path,
            expected="a DTensor with the placements Shard and Replicate",
            found=str(distributed.placements),
            remedy=remedy,
        )


def _is_of_shape(local: torch.Tensor, shape: tuple[int, ...]) -> bool:
    # A part without elements may have lost its other axes as well.
    return tuple(local.shape) == shape or (local.numel() == 0 and math.prod(shape) == 0)


def _is_within_mesh(tensor: torch.Tensor) -> bool:
    distributed: Any = tensor
    return distributed.device_mesh.get_coordinate() is not None


def _empty_like(model: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    with torch.no_grad():
        return torch.empty_like(model, dtype=dtype, requires_grad=False)


def _empty_replica(model: torch.Tensor, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    from torch.distributed.tensor import DTensor, Replicate

    distributed: Any = model
    mesh, local = distributed.device_mesh, local_of(model)
    empty = torch.empty(shape if _is_within_mesh(model) else (0,), dtype=dtype, device=local.device)
    stride = torch.empty(shape, device="meta").stride()
    placements = [Replicate()] * mesh.ndim
    with torch.no_grad():
        return DTensor.from_local(empty, mesh, placements, run_check=False, shape=torch.Size(shape), stride=stride)
