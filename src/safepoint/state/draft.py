"""A draft: the stored form of an item with its values left open, and what these and its tensors are read from.

Every capture of modules, optimizers and nested values goes by way of a draft. It follows from the facts of the state
alone (`safepoint.state.sight`), so what is made of it can be kept while they are the same (`safepoint.state.memo`).
"""

from __future__ import annotations

import datetime
import pathlib
from collections.abc import Sequence

import msgspec
import torch

from safepoint.format.leaves import Open, OpenScalar
from safepoint.format.stencil import Stencil, encode_text
from safepoint.state.numbers import bytes_of_scalars
from safepoint.state.shards import memories_of
from safepoint.state.tensors import dtype_name

# Values without parts, which may be one object in many places by chance.
ATOMS: frozenset[type] = frozenset(
    {
        type(None),
        bool,
        int,
        float,
        complex,
        str,
        bytes,
        datetime.datetime,
        datetime.date,
        datetime.time,
        datetime.timedelta,
        pathlib.PurePosixPath,
        pathlib.PureWindowsPath,
        pathlib.PosixPath,
        pathlib.WindowsPath,
    }
)
NamedTensors = list[tuple[str, torch.Tensor]]


class Draft(msgspec.Struct, frozen=True):
    """Hold a plain tree with the leaves `Open` and `OpenScalar`, and the live objects that it stands for.

    `values` are what the open leaves stand for, by number: atoms that are no texts, and tensors of one value.
    `tensors` are those that other leaves name, live or views of live ones; `origins` are the live ones. `leaders` are
    those that may differ between ranks, `entries` their places in the tree; see `safepoint.state.item.CapturedItem`.
    """

    plain: object
    values: list[object]
    tensors: NamedTensors
    origins: list[torch.Tensor]
    leaders: frozenset[str] = frozenset()
    entries: frozenset[str] = frozenset()


class Values:
    """Number the values of a tree as it is built, and give the leaves that stand for them."""

    __slots__ = ("found",)

    def __init__(self) -> None:
        self.found: list[object] = []

    def leave_open(self, value: object) -> Open:
        """Return the leaf of an atom."""
        self.found.append(value)
        return Open(len(self.found) - 1)

    def leave_scalar_open(self, tensor: torch.Tensor, container: str) -> OpenScalar:
        """Return the leaf of a tensor of one value."""
        self.found.append(tensor)
        holder = (container, device_kind(tensor), tensor.requires_grad)
        return OpenScalar(len(self.found) - 1, dtype_name(tensor.dtype), *holder)


def container_of(tensor: torch.Tensor) -> str:
    """Return what holds a tensor in Python: ``tensor``, ``parameter``, ``buffer`` or ``buffer_non_persistent``."""
    if type(tensor) is torch.nn.Parameter:
        return "parameter"
    if type(tensor) is torch.Tensor and not tensor.__dict__:
        return "tensor"
    if isinstance(tensor, torch.nn.Parameter):
        return "parameter"
    if isinstance(tensor, torch.nn.Buffer):
        return "buffer" if getattr(tensor, "persistent", True) else "buffer_non_persistent"
    return "tensor"


def device_kind(tensor: torch.Tensor) -> str:
    """Return the kind of device that a tensor is on, such as ``cuda``."""
    return "cpu" if tensor.is_cpu else tensor.device.type


def texts_of(scalars: Sequence[torch.Tensor]) -> list[bytes]:
    """Return the texts of tensors of one value now."""
    read = bytes_of_scalars(memories_of(scalars))
    # Nearly all are counts of steps, and equal.
    texts = {data: b'"%b"' % data.hex().encode("ascii") for data in set(read)}
    return list(map(texts.__getitem__, read))


def text_of(stencil: Stencil, values: Sequence[object]) -> bytes:
    """Return the text of a tree of these values now.

    Raises:
        RequestError: A value cannot be stored; named by its path.
    """
    scalars = iter(texts_of([value for value in values if isinstance(value, torch.Tensor)]))
    return stencil.fill(
        [
            next(scalars) if isinstance(value, torch.Tensor) else encode_text(value, path=path)
            for value, path in zip(values, stencil.paths, strict=True)
        ]
    )
