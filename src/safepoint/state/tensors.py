"""Single tensors: which can be stored, how their bytes are read, and how they are put back.

1. The stored form is the dense, C-order, little-endian bytes of the view itself; conjugate and negative views are
   resolved; the storage behind a view is never stored whole.
2. Reading and writing leave autograd untouched: no graph is recorded, `requires_grad` stays as it is.
3. A tensor that cannot be stored exactly is refused by its path, before anything is copied.

Spec: F3.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Sequence
from contextlib import nullcontext
from functools import partial
from operator import add, attrgetter, ge, mul
from typing import Any

import msgspec
import torch

from safepoint.errors import InternalError, RequestError, TornSnapshotError
from safepoint.format.dtypes import DTYPES
from safepoint.state.far import Far
from safepoint.state.item import Held, Place, TensorSpec
from safepoint.state.memory import (
    all_writes_of,
    as_bytes,
    as_memory,
    direct_addresses,
    flat,
    hold_memory,
    is_direct,
    is_freed,
    place_at,
    places_at,
    writes_of,
)
from safepoint.state.portions import facts_of, portions_of
from safepoint.state.streams import far_of

SPARSE_LAYOUTS = (
    torch.sparse_coo,
    torch.sparse_csr,
    torch.sparse_csc,
    torch.sparse_bsr,
    torch.sparse_bsc,
)

# Tensors of these types are nothing else besides.
PLAIN_TYPES = frozenset({torch.Tensor, torch.nn.Parameter})
STORED_DTYPES = frozenset(
    kind for kind in (getattr(torch, name, None) for name in DTYPES) if isinstance(kind, torch.dtype)
)
_STRIDED = frozenset({torch.strided})
_WORDS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_WORD_BYTES = 8
_SHAPE, _DTYPE = attrgetter("shape"), attrgetter("dtype")
_TENSOR, _NBYTES = attrgetter("tensor"), attrgetter("tensor.nbytes")
_IS_NEAR = attrgetter("tensor.is_cpu")
_NOTED, _COUNTER, _ADDRESS = attrgetter("version"), attrgetter("counter"), attrgetter("address")


class TensorSource(msgspec.Struct, frozen=True, gc=False):
    """Give the bytes of a live strided tensor; they are read when `copy_into` is called, not before.

    Args:
        tensor: The live tensor.
        name: Its path in the state, for messages.
        version: The version at the boundary; it counts what is written in place. None where there is none.
        counter: A tensor that counts as well: a distributed one counts what is written through it, and its local
            memory does not.
        address: Where its bytes were seen to begin, if that was host memory that held them as they are stored.
    """

    tensor: torch.Tensor
    name: str = ""
    version: int | None = None
    counter: torch.Tensor | None = None
    address: int | None = None

    @classmethod
    def of(cls, tensor: torch.Tensor, name: str, *, counter: torch.Tensor | None = None) -> TensorSource:
        """Return the source of a tensor as it is now; what is written to it before it is read is noticed."""
        return cls(tensor, name, writes_of(tensor, counter), counter)

    @property
    def nbytes(self) -> int:
        """Return the size of the dense bytes."""
        return self.tensor.numel() * self.tensor.element_size()

    def copy_into(self, buffer: memoryview) -> None:
        """Copy the dense bytes; a tensor of an accelerator goes to host memory without a second host copy.

        Raises:
            TornSnapshotError: The tensor was written to since the boundary, or its memory was given back.
        """
        _check_size(buffer.nbytes, self.nbytes)
        if self.nbytes == 0:
            return
        self._check_memory()
        torch.frombuffer(buffer, dtype=torch.uint8).copy_(as_bytes(_dense(self.tensor)))
        self.check()

    def in_place(self) -> memoryview | None:
        """Return the memory of a contiguous host tensor; raises `TornSnapshotError` where it was given back."""
        if not is_direct(self.tensor, self.tensor.dtype):
            return None
        self._check_memory()
        return as_memory(self.tensor)

    def check(self) -> None:
        """Raise `TornSnapshotError` if the tensor was written to since the boundary, in a way that counts."""
        found = writes_of(self.tensor, self.counter)
        if self.version is not None and found != self.version:
            raise TornSnapshotError(
                "a tensor was written to while it was saved",
                where=self.name,
                expected=f"version {self.version}, that of the boundary",
                found=f"version {found}",
                remedy="Nothing was published. Let no other thread write to the state between two updates.",
            )

    @staticmethod
    def addresses(sources: Sequence[TensorSource]) -> list[int]:
        """Return where the bytes of each lie; see `safepoint.state.item.SourceType`."""
        return direct_addresses(list(map(_TENSOR, sources)), before=list(map(_ADDRESS, sources)))

    @staticmethod
    def sizes(sources: Sequence[TensorSource]) -> list[int]:
        """Return the size of each."""
        return list(map(_NBYTES, sources))

    @staticmethod
    def hold(sources: Sequence[TensorSource]) -> list[Held | None]:
        """Return where the bytes of each lie, and keep them there; see `safepoint.state.item.Held`."""
        return hold_memory(list(map(_TENSOR, sources)), before=list(map(_ADDRESS, sources)))

    @staticmethod
    def are_unwritten(sources: Sequence[TensorSource]) -> bool:
        """Return whether no tensor counts more writes than at the boundary."""
        found = all_writes_of(list(map(_TENSOR, sources)), list(map(_COUNTER, sources)))
        return found == list(map(_NOTED, sources))

    @staticmethod
    def places(sources: Sequence[TensorSource]) -> list[Place | None]:
        """Return where the bytes of each lie; see `safepoint.state.item.Placed`."""
        found: list[Place | None] = []
        for portion in portions_of(sources):
            tensors = list(map(_TENSOR, portion))
            found += places_at(direct_addresses(tensors), tensors)
        return found

    @staticmethod
    def far(sources: Sequence[TensorSource], kept: dict[Any, Any]) -> Far | None:
        """Return which lie on accelerators; see `safepoint.state.far.far_among`."""
        return None if all(map(_IS_NEAR, sources)) else far_of(sources, kept)

    def place(self) -> Place | None:
        """Return where the bytes lie; see `safepoint.state.item.Placed`."""
        tensor = self.tensor
        return place_at(tensor.data_ptr(), tensor) if is_direct(tensor, tensor.dtype) else None

    def memory(self) -> memoryview:
        """Return the live memory itself; only of a tensor that has a place."""
        return as_memory(self.tensor)

    def rows(self, start: int, stop: int) -> TensorSource:
        """Return the source of some rows; a tensor without an axis has one."""
        if not self.tensor.dim():
            return self
        return msgspec.structs.replace(self, tensor=self.tensor.detach()[start:stop], address=None)

    def checksum(self) -> int:
        """Add the elements up on the tensor's device."""
        dense = flat(_dense(self.tensor))
        if dense.element_size() > _WORD_BYTES:
            dense = torch.view_as_real(dense)
        words = dense.view(_WORDS[dense.element_size()])
        return int(words.sum(dtype=torch.int64)) % (1 << (8 * _WORD_BYTES))

    def _check_memory(self) -> None:
        if is_freed(self.tensor):
            raise TornSnapshotError(
                "a tensor's storage was resized while it was saved",
                where=self.name,
                remedy="Nothing was published. Let no code that runs during a save, such as a state_dict(), resize it.",
            )


def write_into(live: torch.Tensor, value: torch.Tensor) -> None:
    """Copy a value into a live strided tensor, whatever its dtype and device, without recording a graph.

    Where an expanded tensor repeats one element, it is written once; the value is expected to repeat it too.
    """
    is_inference = live.is_inference()
    # To enter a mode that is on already takes longer than to copy a number.
    with nullcontext() if is_inference == torch.is_inference_mode_enabled() else torch.inference_mode(is_inference):
        live, value = live.detach(), value.detach()
        for axis, stride in enumerate(live.stride()):
            if stride == 0 and live.shape[axis] > 1:
                live, value = live.narrow(axis, 0, 1), value.narrow(axis, 0, 1)
        live.copy_(value)


def spec_nbytes(spec: TensorSpec) -> int:
    """Return the size of what a spec describes."""
    count = 1
    for length in spec.shape:
        count *= length
    return count * DTYPES[spec.dtype].size_bytes


def spec_of(name: str, tensor: torch.Tensor) -> TensorSpec:
    """Describe a whole tensor under a name."""
    shape = tuple(tensor.shape)
    return TensorSpec(name, dtype_name(tensor.dtype), shape, shape, (0,) * len(shape))


def specs_of(named: Sequence[tuple[str, torch.Tensor]]) -> list[TensorSpec]:
    """Return `spec_of` each; a call for each takes longer than all else that is done with a small one."""
    names, tensors = zip(*named, strict=True) if named else ((), ())
    shapes, dtypes = facts_of(tensors, (lambda some: map(tuple, map(_SHAPE, some)), partial(map, _DTYPE)))
    axes = list(map(len, shapes))
    begins = {count: (0,) * count for count in set(axes)}
    return list(map(TensorSpec, names, map(dtype_name, dtypes), shapes, shapes, map(begins.__getitem__, axes)))


@functools.cache
def dtype_name(dtype: torch.dtype) -> str:
    """Return a dtype's name without the prefix, such as ``bfloat16``."""
    return str(dtype).removeprefix("torch.")


@functools.cache
def dtype_of(name: str) -> torch.dtype:
    """Return the dtype of a name of the closed table.

    Raises:
        RequestError: This torch has no such dtype.
    """
    dtype = getattr(torch, name, None) if name in DTYPES else None
    if not isinstance(dtype, torch.dtype):
        raise RequestError(
            "a stored dtype does not exist here",
            where=name,
            expected="a dtype of this torch",
            remedy="Use the torch version that wrote the checkpoint, or a newer one.",
        )
    return dtype


def check_storable(tensor: torch.Tensor, path: str) -> None:
    """Refuse a tensor whose bytes are not an exact picture of it.

    A strided tensor of a dtype of the closed table passes, and so does a sparse one (stored as its parts, see
    `safepoint.state.sparse`).

    Raises:
        RequestError: By path: distributed, meta, fake, quantised, nested, subclassed, freed, of an unknown dtype, or
            one within a transform of functions.
    """
    if are_plainly_storable((tensor,)):
        return
    if is_transformed(tensor):
        raise _refused(tensor, path, "is one within a transform of functions (vmap, grad)", "Save outside of it.")
    if type(tensor) not in PLAIN_TYPES:
        _check_type(tensor, path)
    if tensor.is_nested:
        raise _refused(tensor, path, "is nested", "Store its values and offsets as plain tensors.")
    if tensor.is_meta:
        raise _refused(tensor, path, "has no values (meta device)", "Materialise it before saving.")
    if tensor._is_zerotensor():
        raise _refused(tensor, path, "has no memory (a ZeroTensor)", "Store tensor.clone().")
    if tensor.is_quantized:
        raise _refused(tensor, path, "is quantised", "Store its integer representation, scale and zero point.")
    if dtype_name(tensor.dtype) not in DTYPES:
        raise _refused(tensor, path, "has a dtype outside the closed table", "Convert it to a stored dtype.")
    layout = tensor.layout
    if layout is not torch.strided and layout not in SPARSE_LAYOUTS:
        raise _refused(tensor, path, f"has the layout {layout}", "Store tensor.to_dense().")
    if layout is torch.strided and tensor.numel() and is_freed(tensor):
        raise _refused(tensor, path, "has lost its memory (storage resized to 0)", "Gather it before saving.")
    if sys.byteorder != "little":
        raise _refused(tensor, path, "is big-endian", "Checkpoints are written by little-endian hosts.")


def are_plainly_storable(tensors: Sequence[torch.Tensor]) -> bool:
    """Return whether `check_storable` passes all tensors, and all are dense host memory in C order, as nearly all are.

    Many are looked at at once: a call for each takes longer than all that is looked at.
    """
    try:
        return sys.byteorder == "little" and all(map(_are_plainly_storable, portions_of(tensors)))
    except RuntimeError:
        # One without memory of its own cannot be asked for it.
        return False


def _are_plainly_storable(tensors: Sequence[torch.Tensor]) -> bool:
    if not PLAIN_TYPES.issuperset(map(type, tensors)) or not _STRIDED.issuperset(map(attrgetter("layout"), tensors)):
        return False
    if any(map(attrgetter("is_nested"), tensors)) or not all(map(attrgetter("is_cpu"), tensors)):
        return False
    begins = list(map(torch.Tensor.data_ptr, tensors))
    if not all(begins) and any(one.nbytes for one, begin in zip(tensors, begins, strict=True) if not begin):
        return False
    if not STORED_DTYPES.issuperset(map(attrgetter("dtype"), tensors)) or not all(
        map(torch.Tensor.is_contiguous, tensors)
    ):
        return False
    held = map(torch.UntypedStorage.nbytes, map(torch.Tensor.untyped_storage, tensors))
    offsets = map(mul, map(torch.Tensor.storage_offset, tensors), map(attrgetter("itemsize"), tensors))
    ends = map(add, offsets, map(attrgetter("nbytes"), tensors))
    return all(map(ge, held, ends))


def is_transformed(tensor: torch.Tensor) -> bool:
    """Return whether a tensor stands for another one within vmap, grad or functionalize, and has no memory."""
    return torch._is_functional_tensor(tensor) or torch._C._functorch.is_functorch_wrapped_tensor(tensor)


def is_distributed(tensor: torch.Tensor) -> bool:
    """Return whether a tensor is a `DTensor`; see `safepoint.state.shards`.

    Decided by the class's name, because importing `torch.distributed.tensor` costs a process that has none a second.
    """
    return type(tensor) not in PLAIN_TYPES and _is_distributed(type(tensor))


def are_distributed(tensors: Sequence[torch.Tensor]) -> list[bool]:
    """Return `is_distributed` of each."""
    kinds = list(map(type, tensors))
    told = {kind: kind not in PLAIN_TYPES and _is_distributed(kind) for kind in set(kinds)}
    return list(map(told.__getitem__, kinds))


@functools.lru_cache(maxsize=64)
def _is_distributed(kind: type) -> bool:
    return any(
        base.__qualname__ == "DTensor" and base.__module__.startswith("torch.distributed") for base in kind.__mro__
    )


def _check_type(tensor: torch.Tensor, path: str) -> None:
    if is_distributed(tensor):
        remedy = "Hold it in a module or in an optimizer's state, or gather it first."
        raise _refused(tensor, path, "is distributed over ranks (DTensor)", remedy)
    if torch.nn.parameter.is_lazy(tensor):
        raise _refused(tensor, path, "is not initialised", "Run one forward pass on the lazy module before saving.")
    if tensor.is_nested:
        return
    if type(tensor.detach()) is not torch.Tensor:
        raise _refused(tensor, path, "is of a subclass of Tensor", "Store the plain tensors that it is made of.")


def _dense(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor's values in C order, itself where it holds them so."""
    return tensor.detach().resolve_conj().resolve_neg().contiguous()


def _refused(tensor: torch.Tensor, path: str, why: str, remedy: str) -> RequestError:
    return RequestError(
        f"a tensor of the state cannot be stored: it {why}",
        where=path or "the state",
        expected="a strided or sparse torch.Tensor, Parameter or Buffer of a stored dtype",
        found=f"{type(tensor).__module__}.{type(tensor).__qualname__} of dtype {dtype_name(tensor.dtype)}",
        remedy=remedy,
    )


def _check_size(found: int, expected: int) -> None:
    if found != expected:
        raise InternalError("a buffer does not fit a tensor's bytes", expected=expected, found=found)
