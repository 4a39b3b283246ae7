"""The leaves of a plain tree that stand for something other than a builtin value of Python.

Spec: F4.
"""

from __future__ import annotations

import msgspec


class TensorLeaf(msgspec.Struct, frozen=True, gc=False):
    """Stand for a tensor whose bytes lie in the data file under `name` (within the item).

    `container` says what holds it in Python: ``tensor``, ``parameter``, ``buffer`` or ``ndarray``; `device` is the kind
    of device it was on (``cpu``, ``cuda``) and is a hint only.
    """

    name: str
    container: str = "tensor"
    device: str = "cpu"
    requires_grad: bool = False


class ScalarLeaf(msgspec.Struct, frozen=True, gc=False):
    """Stand for a 0-dim tensor; `data` are its bytes, little-endian."""

    dtype: str
    data: bytes
    container: str = "tensor"
    device: str = "cpu"
    requires_grad: bool = False


class ViewLeaf(msgspec.Struct, frozen=True, gc=False):
    """Stand for a view of the one-dimensional tensor stored under `name`; offset and strides count elements."""

    name: str
    offset: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    container: str = "tensor"
    device: str = "cpu"
    requires_grad: bool = False


class SizeLeaf(msgspec.Struct, frozen=True, gc=False):
    """Stand for a `torch.Size`."""

    sizes: tuple[int, ...]


class DtypeLeaf(msgspec.Struct, frozen=True, gc=False):
    """Stand for a `torch.dtype` by its name, such as ``bfloat16``."""

    name: str


class NumpyScalarLeaf(msgspec.Struct, frozen=True, gc=False):
    """Stand for a numpy scalar; `dtype` is numpy's own string with byte order, such as ``<f8``."""

    dtype: str
    data: bytes


class Shared(msgspec.Struct, frozen=True):
    """Mark the first place of a value that other places of the tree refer to."""

    number: int
    value: object


class Same(msgspec.Struct, frozen=True, gc=False):
    """Refer to the `Shared` value of that number; it stands earlier in the tree."""

    number: int


class Open(msgspec.Struct, frozen=True, gc=False):
    """Leave a place open for a value; never stored, see `safepoint.format.stencil`."""

    number: int


class OpenScalar(msgspec.Struct, frozen=True, gc=False):
    """Leave the bytes of a `ScalarLeaf` open; never stored."""

    number: int
    dtype: str
    container: str = "tensor"
    device: str = "cpu"
    requires_grad: bool = False
