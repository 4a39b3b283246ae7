"""Saves that the loop waits for, of tensors on an accelerator: through two pieces of host memory, none too early."""

from __future__ import annotations

import functools
import random
from collections.abc import Sequence

import pytest
import torch

from safepoint.errors import StorageError, TornSnapshotError
from safepoint.saving import pour as pouring
from safepoint.saving.form import FileForm, form_of
from safepoint.saving.landing import Landing
from safepoint.saving.layout import LayoutBox
from safepoint.saving.pour import Spent
from safepoint.saving.ring import LiveOrigin, Ring
from safepoint.state import streams
from safepoint.state.far import far_among
from safepoint.state.item import Source
from safepoint.state.tensors import TensorSource
from safepoint.storage.memory import MemoryStorage
from tests.saving.devices import Device, far_type

PIECE = 4096
pour = functools.partial(pouring.pour, clock=lambda: 0.0, spent=Spent())


@pytest.fixture(params=["training", "side"])
def device(request: pytest.FixtureRequest) -> Device:
    return Device(request.param)


@pytest.fixture
def ring() -> Ring:
    made = Ring(piece_bytes=PIECE)
    made.landing = Landing(piece_bytes=PIECE)
    return made


def form_for(tensors: Sequence[torch.Tensor]) -> FileForm:
    return form_of(
        [
            LayoutBox("m", f"{n:03}", str(one.dtype)[6:], tuple(one.shape), (0,) * one.dim(), tuple(one.shape))
            for n, one in enumerate(tensors)
        ],
        is_alone=True,
    )


def origin_of(form: FileForm, sources: Sequence[Source], ring: Ring) -> LiveOrigin:
    return LiveOrigin(form, sources, ring, far=far_among(sources, {}))


def test_any_tensors_are_stored_as_they_are_when_the_device_has_done_what_it_was_given(
    device: Device, ring: Ring, monkeypatch: pytest.MonkeyPatch, chance: random.Random
) -> None:
    """Small and large, in host memory and not, rows larger than a piece, other orders of memory, other kinds."""
    monkeypatch.setattr(streams, "_JOINED_BYTES", 500)
    storage = MemoryStorage()
    storage.make_root()
    for number in range(30):
        shapes = [
            chance.choice([(), (0,), (1,), (7, 3), (50_000,), (4, 30_000), (600, 40)])
            for _ in range(chance.randint(1, 9))
        ]
        kinds = [chance.choice([torch.float32, torch.bfloat16, torch.complex64, torch.int8]) for _ in shapes]
        tensors = [torch.zeros(shape, dtype=kind) for shape, kind in zip(shapes, kinds, strict=True)]
        tensors = [one.t() if one.dim() == 2 and chance.random() < 0.3 else one for one in tensors]
        values = [(torch.rand(one.shape) * 100).to(one.dtype) for one in tensors]
        on_device = far_type(device)
        types = [chance.choice([TensorSource, on_device]) for _ in tensors]
        form = form_for(tensors)
        for kind, tensor, value in zip(types, tensors, values, strict=True):
            if kind is TensorSource:
                tensor.data.copy_(value)
            else:
                device.train(functools.partial(tensor.data.copy_, value))
        sources = [kind.of(one, "") for kind, one in zip(types, tensors, strict=True)]
        origin = origin_of(form, sources, ring)
        pour(storage.create(f"file-{number}"), form, origin)
        origin.end()
        content = form.header + b"".join(
            bytes(values[entry.number].contiguous().flatten().view(torch.uint8).tolist()) for entry in form.entries
        )
        assert storage.read(f"file-{number}", limit_bytes=len(content)) == content


class Full:
    """A writer that takes one piece."""

    def __init__(self) -> None:
        self.pieces: list[memoryview] = []

    def write(self, data: memoryview) -> None:
        if self.pieces:
            raise StorageError("the disk is full")
        self.pieces.append(data)

    def finish(self) -> None: ...

    def abandon(self) -> None: ...


def test_a_save_that_fails_half_way_leaves_nothing_on_its_way_to_memory_of_the_next(device: Device, ring: Ring) -> None:
    tensor = torch.ones(20_000)
    sources = [far_type(device).of(tensor, "w")]
    origin = origin_of(form_for([tensor]), sources, ring)
    with pytest.raises(StorageError):
        pour(Full(), form_for([tensor]), origin)
    origin.end()
    memory = ring.landing._memory
    assert memory is not None
    memory[:] = bytes(len(memory))
    device.synchronize()
    assert not any(memory[:])


def test_a_tensor_that_is_written_to_before_it_is_read_is_torn(device: Device, ring: Ring) -> None:
    for count in (3, 20_000):
        tensor = torch.ones(count)
        sources = [far_type(device).of(tensor, "w")]
        origin = origin_of(form_for([tensor]), sources, ring)
        tensor.add_(1.0)
        storage = MemoryStorage()
        storage.make_root()
        with pytest.raises(TornSnapshotError):
            pour(storage.create("file"), form_for([tensor]), origin)


def test_the_pieces_are_pinned_once_and_anew_for_larger_rows(device: Device, ring: Ring) -> None:
    storage = MemoryStorage()
    storage.make_root()
    for number, shape in enumerate([(30, 1000), (70_000,), (2, 9_000)]):
        tensor = torch.ones(shape)
        form = form_for([tensor])
        pour(storage.create(f"file-{number}"), form, origin_of(form, [far_type(device).of(tensor, "w")], ring))
    assert device.pinned == [f"pin {2 * PIECE}", f"unpin {2 * PIECE}", f"pin {2 * 36_864}"]
