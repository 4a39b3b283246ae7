"""Bytes on their way to an accelerator: what was checked is what arrives, and no piece of memory is used too early.

The device does its work at the worst moment, so a missing wait gives wrong bytes.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch

from safepoint.errors import CorruptionError
from safepoint.restoring import landing, runs
from safepoint.restoring.arrival import Arrival, BoxKey
from safepoint.restoring.read import read
from safepoint.state.item import TensorSpec
from safepoint.state.streams import Streams
from safepoint.state.targets import InPlaceTarget, NewTensorTarget
from safepoint.storage.base import Storage
from safepoint.storage.local import LocalStorage
from tests.restoring.test_read import put, written
from tests.restoring.tiles import Boxes, BoxMemory, CountingStorage
from tests.saving.devices import Device, Side

RUN_BYTES = 4096


@pytest.fixture(autouse=True)
def small_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runs, "RUN_BYTES", RUN_BYTES)
    monkeypatch.setattr(landing, "RUN_BYTES", RUN_BYTES)


@pytest.fixture(params=["training", "side"])
def device(request: pytest.FixtureRequest) -> Device:
    return Device(request.param)


@pytest.fixture(params=["file", "other"])
def storage(request: pytest.FixtureRequest, tmp_path: Path) -> Storage:
    return LocalStorage(tmp_path) if request.param == "file" else CountingStorage()


class Far(InPlaceTarget):
    """A live tensor on a device."""

    __slots__ = ()
    device: Device

    def __init__(self, tensor: torch.Tensor) -> None:
        super().__init__(tensor)
        self.is_in_place = False

    @property
    def landing(self) -> torch.Tensor | None:
        return self.tensor.detach()

    def memory(self) -> memoryview:
        raise AssertionError("a tensor of a device went past its streams")

    @classmethod
    def carrier(cls, targets: Sequence[object]) -> Streams:
        return Streams({torch.device("cpu"): Side(cls.device)})


def far_on(device: Device) -> type[Far]:
    return type("FarOn", (Far,), {"device": device, "__slots__": ()})


def values_of(content: bytes, shapes: Sequence[tuple[int, int]]) -> list[torch.Tensor]:
    found, begin = [], 100
    for rows, columns in shapes:
        whole = torch.tensor(list(content[begin : begin + rows * columns]), dtype=torch.uint8)
        found.append(whole.reshape(rows, columns))
        begin += rows * columns
    return found


def test_what_arrives_is_what_was_stored(device: Device, storage: Storage, chance: random.Random) -> None:
    """Whatever the device was given before; tensors of many runs and runs of many tensors; some in host memory."""
    shapes = [(chance.randint(1, 60), chance.choice([1, 2, 7, 64, 700])) for _ in range(60)]
    file, far = written(shapes, chance), far_on(device)
    tensors: dict[str, torch.Tensor] = {}

    def target_of(name: str, shape: tuple[int, ...]) -> InPlaceTarget:
        tensor = tensors[name] = torch.zeros(shape, dtype=torch.uint8)
        if chance.random() < 0.2:
            return InPlaceTarget(tensor)
        device.train(lambda: tensor.data.fill_(7))
        return far(tensor)

    reads = file.plan(target_of)
    versions = {name: one._version for name, one in tensors.items()}
    arrivals: dict[BoxKey, Arrival] = {}
    size = read(put(storage, bytes(file.content)), reads, arrivals=arrivals)
    assert size == sum(rows * columns for rows, columns in shapes)
    assert all(one._version > versions[name] for name, one in tensors.items())
    device.synchronize()
    for number, value in enumerate(values_of(bytes(file.content), shapes)):
        name = f"w{number:02}"
        assert torch.equal(tensors[name], value), name
        arrival = arrivals["model", name, (0, 0), tuple(value.shape)]
        assert arrival.differing(memoryview(bytes(value.flatten().tolist()))) is None
    assert device.pinned[0].replace("pin", "unpin") == device.pinned[1]


def test_a_piece_of_memory_is_read_by_the_device_before_it_is_used_again(
    device: Device, chance: random.Random, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One piece for all."""
    monkeypatch.setattr(landing, "_PIECES", 1)
    shapes = [(8, 500)] * 6
    file, far = written(shapes, chance), far_on(device)
    tensors = {}

    def target_of(name: str, shape: tuple[int, ...]) -> Far:
        tensors[name] = torch.zeros(shape, dtype=torch.uint8)
        return far(tensors[name])

    read(put(CountingStorage(), bytes(file.content)), file.plan(target_of))
    for number, value in enumerate(values_of(bytes(file.content), shapes)):
        assert torch.equal(tensors[f"w{number:02}"], value)


def test_bytes_that_do_not_match_are_not_sent_and_nothing_is_on_its_way_after_the_error(
    device: Device, storage: Storage, chance: random.Random
) -> None:
    file, far = written([(8, 500), (8, 500)], chance), far_on(device)
    tensors = {}

    def target_of(name: str, shape: tuple[int, ...]) -> Far:
        tensors[name] = torch.zeros(shape, dtype=torch.uint8)
        return far(tensors[name])

    reads = file.plan(target_of)
    file.content[-1] ^= 1
    with pytest.raises(CorruptionError, match="w01"):
        read(put(storage, bytes(file.content)), reads)
    after = {name: one.clone() for name, one in tensors.items()}
    device.synchronize()
    assert not tensors["w01"].any()
    assert torch.equal(tensors["w00"], after["w00"])
    assert device.pinned[0].replace("pin", "unpin") == device.pinned[1]


def test_a_target_whose_chunks_are_needed_in_part_goes_through_host_memory(chance: random.Random) -> None:
    """So does one of another dtype or another order of memory: it is converted on its way."""
    live = torch.zeros(20, 30, dtype=torch.int64)
    file = written([(20, 30)], chance)
    assert InPlaceTarget(live, dtype=torch.uint8).landing is None
    read(
        put(CountingStorage(), bytes(file.content)), file.plan(lambda *ignored: InPlaceTarget(live, dtype=torch.uint8))
    )
    assert torch.equal(live, values_of(bytes(file.content), [(20, 30)])[0].long())


class FarPart(BoxMemory):
    """A part of a tensor on a device, which no chunk fills by itself."""

    is_in_place = False

    @property
    def landing(self) -> object:
        raise AssertionError("a chunk that is needed in part cannot be sent as it is")


def test_a_part_of_a_tensor_whose_chunks_reach_beyond_it_goes_through_host_memory(chance: random.Random) -> None:
    file = written([(20, 30)], chance)
    part = FarPart((0, 10), (20, 10), 1)
    read(put(CountingStorage(), bytes(file.content)), file.plan(lambda *ignored: Boxes([part])))
    whole = values_of(bytes(file.content), [(20, 30)])[0]
    assert part.data == bytes(whole[:, 10:20].flatten().tolist())


def test_targets_in_host_memory_land_nowhere() -> None:
    assert InPlaceTarget(torch.zeros(3)).landing is None
    spec = TensorSpec("w", "float32", (3,), (3,), (0,))
    new = NewTensorTarget(spec, torch.device("cpu"))
    assert new.landing is None
    assert new.tensor is None
