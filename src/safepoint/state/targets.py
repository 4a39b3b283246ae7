"""Targets: live memory, and memory of new tensors, that takes the bytes of stored tensors.

Many of one type can be asked at once: a call for each takes longer than to digest a small tensor.
"""

from __future__ import annotations

from collections.abc import Sequence
from operator import attrgetter

import torch

from safepoint.state.item import Place, TensorSpec
from safepoint.state.memory import as_memories, as_memory, is_dense, is_direct, place_at, places_at
from safepoint.state.streams import carrier_to, has_streams
from safepoint.state.tensors import dtype_of, spec_nbytes, write_into

_TENSOR, _ADDRESS, _STAGING = attrgetter("tensor"), attrgetter("_address"), attrgetter("_staging")
_IS_IN_PLACE = attrgetter("is_in_place")


class InPlaceTarget:
    """Write into the memory of a live tensor.

    A contiguous tensor in host memory takes the bytes directly; any other one gets a temporary, copied in `commit`. The
    tensor may be a leaf that requires grad: no graph is recorded. A temporary of another dtype than the live tensor's
    is converted by the copy.
    """

    __slots__ = ("_address", "_staging", "dtype", "is_in_place", "tensor")

    def __init__(self, tensor: torch.Tensor, *, dtype: torch.dtype | None = None) -> None:
        self.tensor = tensor
        self.dtype = dtype or tensor.dtype
        self.is_in_place = is_direct(tensor, self.dtype)
        self._address = 0
        self._staging: torch.Tensor | None = None

    carrier = staticmethod(carrier_to)

    @property
    def landing(self) -> torch.Tensor | None:
        """Return the memory on an accelerator that takes the stored bytes as they are, by way of its streams."""
        live = self.tensor
        is_fit = has_streams(live.device) and self.dtype == live.dtype and is_dense(live) and not live.is_inference()
        return live.detach() if is_fit else None

    @property
    def nbytes(self) -> int:
        """Return the size of the stored bytes, which differs from the live size where the dtype does."""
        return self.tensor.numel() * self.dtype.itemsize

    def memory(self) -> memoryview:
        """Return the live memory itself where it can be written directly, else a temporary's."""
        if self.is_in_place:
            self._address = self.tensor.data_ptr()
            return as_memory(self.tensor)
        if self._staging is None:
            self._staging = torch.empty(self.tensor.shape, dtype=self.dtype, device="cpu")
        return as_memory(self._staging)

    def commit(self) -> Place | None:
        """Copy the temporary into the live tensor, if there is one, and tell autograd that the tensor has changed."""
        tensor, staging = self.tensor, self._staging
        self._staging = None
        if staging is not None:
            write_into(tensor, staging)
        if not self.is_in_place:
            return None
        if tensor.numel() and not tensor.is_inference():
            torch.autograd.graph.increment_version(tensor)
        return place_at(self._address, tensor)

    @staticmethod
    def memories(targets: Sequence[InPlaceTarget]) -> list[memoryview]:
        """Return `memory` of each."""
        if not all(map(_IS_IN_PLACE, targets)):
            return [one.memory() for one in targets]
        tensors = list(map(_TENSOR, targets))
        for one, address in zip(targets, map(torch.Tensor.data_ptr, tensors), strict=True):
            one._address = address
        return as_memories(tensors)

    @staticmethod
    def commit_all(targets: Sequence[InPlaceTarget]) -> list[Place | None]:
        """Commit each; see `commit`."""
        tensors = list(map(_TENSOR, targets))
        if not all(map(_IS_IN_PLACE, targets)) or any(map(torch.Tensor.is_inference, tensors)):
            return [one.commit() for one in targets]
        torch.autograd.graph.increment_version([one for one in tensors if one.numel()])
        return places_at(list(map(_ADDRESS, targets)), tensors)


class NewTensorTarget:
    """Take bytes into a new tensor; `tensor` holds it after `commit`.

    Args:
        spec: Shape and dtype of what is stored.
        device: Where the tensor shall live; the bytes arrive in host memory first.
    """

    __slots__ = ("_device", "_staging", "is_in_place", "spec", "tensor")

    def __init__(self, spec: TensorSpec, device: torch.device) -> None:
        self.spec = spec
        self.tensor: torch.Tensor | None = None
        self.is_in_place = device.type == "cpu"
        self._device = device
        self._staging: torch.Tensor | None = None

    carrier = staticmethod(carrier_to)

    @property
    def landing(self) -> torch.Tensor | None:
        """Return the tensor itself, made if need be, where it lies on an accelerator with streams."""
        if self.tensor is None and has_streams(self._device):
            self.tensor = torch.empty(self.spec.shape, dtype=dtype_of(self.spec.dtype), device=self._device)
        return self.tensor

    @property
    def nbytes(self) -> int:
        """Return the size of the stored bytes."""
        return spec_nbytes(self.spec)

    def memory(self) -> memoryview:
        """Return the memory of the tensor being made."""
        return as_memory(self._staged())

    def commit(self) -> Place | None:
        """Make `tensor` available on its device."""
        if self.tensor is not None:
            return None
        staging, self._staging = self._staged(), None
        if not self.is_in_place:
            self.tensor = staging.to(self._device)
            return None
        self.tensor = staging
        return place_at(staging.data_ptr(), staging)

    @staticmethod
    def memories(targets: Sequence[NewTensorTarget]) -> list[memoryview]:
        """Return `memory` of each."""
        unmade = [one for one in targets if one._staging is None]
        dtypes = {one.spec.dtype for one in unmade}
        # Nothing else makes a tensor so fast as one of its type.
        makers = {name: torch.empty(0, dtype=dtype_of(name), device="cpu").new_empty for name in dtypes}
        for one in unmade:
            one._staging = makers[one.spec.dtype](one.spec.shape)
        return as_memories(list(map(_STAGING, targets)))

    @staticmethod
    def commit_all(targets: Sequence[NewTensorTarget]) -> list[Place | None]:
        """Commit each; see `commit`."""
        if not all(map(_IS_IN_PLACE, targets)) or not all(one._staging is not None for one in targets):
            return [one.commit() for one in targets]
        tensors = list(map(_STAGING, targets))
        for one, tensor in zip(targets, tensors, strict=True):
            one.tensor, one._staging = tensor, None
        return places_at(list(map(torch.Tensor.data_ptr, tensors)), tensors)

    def _staged(self) -> torch.Tensor:
        if self._staging is None:
            self._staging = torch.empty(self.spec.shape, dtype=dtype_of(self.spec.dtype), device="cpu")
        return self._staging
