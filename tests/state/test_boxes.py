"""Boxes from placements, against what torch itself puts into the local memory of each rank, for up to 16 ranks."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.distributed as dist
from msgspec.structs import replace
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.placement_types import _StridedShard
from torch.testing._internal.distributed.fake_pg import FakeStore

from safepoint.errors import RequestError
from safepoint.state.item import Permits, SavedItem
from safepoint.state.shards import boxes_of, captured, local_of, new_target, view_of
from safepoint.state.stateful import PlainItem, StatefulItem
from safepoint.state.targets import NewTensorTarget
from safepoint.state.tensors import spec_of
from safepoint.state.tree import flatten

Placements = tuple[Any, ...]

CASES: list[tuple[tuple[int, ...], Placements, tuple[int, ...]]] = [
    ((4,), (Shard(0),), (8, 3)),
    ((4,), (Shard(0),), (9, 3)),
    ((4,), (Shard(0),), (2, 3)),
    ((4,), (Shard(1),), (3, 6)),
    ((3,), (Replicate(),), (5, 2)),
    ((4,), (Shard(0),), (0, 3)),
    ((4,), (Shard(2),), (2, 3, 5)),
    ((2, 2), (Replicate(), Shard(0)), (7, 2)),
    ((2, 2), (Shard(0), Replicate()), (7, 2)),
    ((2, 2), (Shard(0), Shard(1)), (5, 7)),
    ((2, 3), (Shard(0), Shard(0)), (11, 2)),
    ((2, 2), (_StridedShard(0, split_factor=2), Shard(0)), (8, 3)),
    ((2, 2), (_StridedShard(0, split_factor=2), Shard(0)), (10, 3)),
    ((2, 2), (_StridedShard(1, split_factor=2), Shard(1)), (3, 12)),
    ((4,), (_StridedShard(0, split_factor=3),), (13, 2)),
    ((2, 2), (Shard(0), _StridedShard(0, split_factor=2)), (16, 1)),
    ((2, 2, 4), (Replicate(), _StridedShard(0, split_factor=4), Shard(0)), (19, 3)),
    ((2, 2, 2), (Shard(1), Shard(0), Shard(1)), (5, 9)),
]


@contextmanager
def rank_of(rank: int, world_size: int) -> Iterator[None]:
    """Be one rank of a job whose collectives do nothing."""
    dist.init_process_group("fake", rank=rank, world_size=world_size, store=FakeStore())
    try:
        yield
    finally:
        dist.destroy_process_group()


def mesh_of(shape: Sequence[int]) -> DeviceMesh:
    return DeviceMesh("cpu", torch.arange(torch.Size(shape).numel()).reshape(*shape))


def whole(shape: Sequence[int]) -> torch.Tensor:
    return torch.arange(torch.Size(shape).numel(), dtype=torch.float32).reshape(*shape)


def count_holders(
    mesh_shape: Sequence[int], shape: Sequence[int], make: Callable[[DeviceMesh], DTensor]
) -> torch.Tensor:
    """Return how many ranks hold each element, having compared every box with the whole."""
    full, holders = whole(shape), torch.zeros(tuple(shape), dtype=torch.int64)
    size = torch.Size(mesh_shape).numel()
    for rank in range(size):
        with rank_of(rank, size):
            tensor = make(mesh_of(mesh_shape))
            local = local_of(tensor)
            boxes = boxes_of(tensor, "model.weight")
            assert sum(torch.Size(box.shape).numel() for box in boxes) == local.numel()
            for box in boxes:
                part = tuple(slice(start, start + length) for start, length in zip(box.offset, box.shape, strict=True))
                assert torch.equal(view_of(local, box), full[part])
                holders[part] += 1
            assert torch.equal(local_of(filled(tensor, full)), local)
    return holders


def filled(model: DTensor, full: torch.Tensor) -> torch.Tensor:
    """Return a tensor that is divided like another one, its boxes filled from the whole."""
    target = new_target(spec_of("exp_avg", full), torch.device("cpu"), "optimizer", like=model)
    assert not isinstance(target, NewTensorTarget)
    for box in target.boxes():
        part = tuple(slice(start, start + length) for start, length in zip(box.offset, box.shape, strict=True))
        box.memory()[:] = full[part].contiguous().numpy().tobytes()
        box.commit()
    return target.tensor


def replicas(mesh_shape: Sequence[int], placements: Placements) -> int:
    sizes = [size for size, one in zip(mesh_shape, placements, strict=True) if isinstance(one, Replicate)]
    return int(torch.Size(sizes).numel())


@pytest.mark.parametrize(("mesh_shape", "placements", "shape"), CASES, ids=str)
def test_boxes_name_what_torch_put_into_the_local_memory(
    mesh_shape: tuple[int, ...], placements: Placements, shape: tuple[int, ...]
) -> None:
    holders = count_holders(
        mesh_shape, shape, lambda mesh: distribute_tensor(whole(shape), mesh, placements, src_data_rank=None)
    )
    assert (holders == replicas(mesh_shape, placements)).all()


def test_boxes_of_random_placements_name_what_torch_put_into_the_local_memory() -> None:
    seed = 20260
    print(f"replay with seed {seed}")
    stream = random.Random(seed)
    for _ in range(60):
        mesh_shape = stream.choice([(2,), (3,), (5,), (2, 2), (2, 3), (2, 2, 2), (4, 2)])
        shape = tuple(stream.randint(1, 9) for _ in range(stream.randint(1, 3)))
        placements = tuple(
            stream.choice(
                [
                    Replicate(),
                    Shard(stream.randrange(len(shape))),
                    _StridedShard(stream.randrange(len(shape)), split_factor=stream.randint(2, 3)),
                ]
            )
            for _ in mesh_shape
        )
        print(mesh_shape, placements, shape)

        def make(mesh: DeviceMesh, shape: Any = shape, placements: Any = placements) -> DTensor:
            return distribute_tensor(whole(shape), mesh, placements, src_data_rank=None)

        assert (count_holders(mesh_shape, shape, make) == replicas(mesh_shape, placements)).all()


def chunk(tensor: torch.Tensor, count: int, index: int) -> torch.Tensor:
    pieces = tensor.chunk(count)
    return pieces[index] if index < len(pieces) else tensor[:0]


@pytest.mark.parametrize(("data", "model"), [(2, 2), (4, 2), (2, 4), (3, 2), (4, 3)])
def test_uneven_rows_cut_for_tensor_parallelism_first_are_named_as_they_lie(data: int, model: int) -> None:
    # fully_shard cuts what parallelize_module has left, and records that as a strided shard in front of a plain one.
    # Read from left to right, its placements give some ranks another number of rows than they have.
    for rows in range(1, 14):
        shape = (rows, 2)

        def make(mesh: DeviceMesh, shape: tuple[int, int] = shape) -> DTensor:
            coordinate = mesh.get_coordinate()
            assert coordinate is not None
            local = chunk(chunk(whole(shape), model, coordinate[1]), data, coordinate[0])
            placements = [_StridedShard(0, split_factor=model), Shard(0)]
            size, stride = torch.Size(shape), (2, 1)
            return DTensor.from_local(local.clone(), mesh, placements, run_check=False, shape=size, stride=stride)

        assert (count_holders((data, model), shape, make) == 1).all()


def test_a_rank_outside_of_the_mesh_holds_no_box_and_makes_no_memory() -> None:
    with rank_of(3, 4):
        mesh = DeviceMesh("cpu", [0, 1])
        size, stride = torch.Size((4, 2)), (2, 1)
        tensor = DTensor.from_local(torch.empty(0), mesh, [Shard(0)], run_check=False, shape=size, stride=stride)
        assert captured([("weight", tensor)], "model") == ()
        target = new_target(spec_of("exp_avg", tensor), torch.device("cpu"), "optimizer", like=tensor)
        assert not isinstance(target, NewTensorTarget)
        assert list(target.boxes()) == []
        assert target.tensor.shape == (4, 2)
        assert local_of(target.tensor).numel() == 0


def test_a_tensor_that_is_still_to_be_added_up_is_refused_by_its_path() -> None:
    with rank_of(0, 2):
        tensor = DTensor.from_local(torch.ones(3), mesh_of((2,)), [Partial()], run_check=False)
        with pytest.raises(RequestError, match="Partial") as caught:
            boxes_of(tensor, "model.weight")
        assert caught.value.where == "model.weight"


def test_a_local_tensor_of_another_shape_than_its_placements_say_is_refused() -> None:
    with rank_of(0, 2):
        # Without a shape, torch takes it that all ranks have as many rows as this one.
        tensor = DTensor.from_local(torch.ones(3, 2), mesh_of((2,)), [Shard(0)], run_check=False)
        boxes_of(tensor, "model.weight")
        uneven = DTensor.from_local(
            torch.ones(1, 2), mesh_of((2,)), [Shard(0)], run_check=False, shape=torch.Size((6, 2)), stride=(2, 1)
        )
        with pytest.raises(RequestError, match="contradicts its placements"):
            boxes_of(uneven, "model.weight")


def test_naming_boxes_starts_no_collective_and_draws_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    with rank_of(1, 4):
        tensor = distribute_tensor(whole((9, 3)), mesh_of((2, 2)), [Shard(0), Shard(1)], src_data_rank=None)
        before = torch.random.get_rng_state()

        def forbidden(*_: object, **__: object) -> None:
            raise AssertionError("a collective was started")

        for name in ("all_gather", "all_gather_into_tensor", "broadcast", "all_reduce", "scatter", "barrier"):
            monkeypatch.setattr(dist, name, forbidden)
        monkeypatch.setattr(DTensor, "redistribute", forbidden)
        monkeypatch.setattr(DTensor, "full_tensor", forbidden)
        (one,) = captured([("weight", tensor)], "model")
        buffer = bytearray(one.source.nbytes)
        one.source.copy_into(memoryview(buffer))
        assert (one.spec.shape, one.spec.global_shape, one.spec.offset) == ((5, 1), (9, 3), (0, 2))
        assert torch.equal(torch.frombuffer(buffer, dtype=torch.float32).reshape(5, 1), whole((9, 3))[:5, 2:])
        made: Any = filled(tensor, whole((9, 3)))
        assert made.placements == tensor.placements
        assert torch.equal(local_of(made), whole((9, 3))[:5, 2:])
        assert torch.equal(before, torch.random.get_rng_state())


def test_a_state_of_another_shape_than_its_parameter_is_held_whole_by_each_rank() -> None:
    with rank_of(1, 2):
        parameter = distribute_tensor(whole((9, 3)), mesh_of((2,)), [Shard(0)], src_data_rank=None)
        row = new_target(spec_of("row", torch.empty(9, 1)), torch.device("cpu"), "optimizer", like=parameter)
        assert not isinstance(row, NewTensorTarget)
        (box,) = row.boxes()
        box.memory()[:] = whole((9, 1)).numpy().tobytes()
        box.commit()
        # torch computes with a distributed and a plain tensor only where that has one element.
        assert torch.equal(local_of(parameter + row.tensor), (whole((9, 3)) + whole((9, 1)))[5:])
        number = new_target(spec_of("count", torch.empty(1)), torch.device("cpu"), "optimizer", like=parameter)
        assert isinstance(number, NewTensorTarget)


class Average:
    """Keeps a moving average of a parameter beside it, as many scripts do."""

    def __init__(self, parameter: torch.Tensor) -> None:
        self.shadow = {"weight": parameter.detach().clone(), "count": torch.zeros(2)}

    def state_dict(self) -> dict[str, Any]:
        return dict(self.shadow)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.shadow = state


@pytest.mark.parametrize("kind", [StatefulItem, PlainItem])
def test_an_object_that_holds_a_distributed_tensor_gets_it_back_divided_as_its_own(kind: Any) -> None:
    with rank_of(1, 2):
        mesh = mesh_of((2,))
        saved_as, held_as = (
            Average(distribute_tensor(whole((5, 2)) + shift, mesh, [placement], src_data_rank=None))
            for shift, placement in ((0, Shard(0)), (7, Shard(1)))
        )
        item = kind("average", saved_as if kind is StatefulItem else saved_as.shadow)
        captured_item = item.capture()
        boxes = [(one.spec.name, one.spec.offset, one.spec.shape) for one in captured_item.tensors]
        assert boxes == [("state/weight", (3, 0), (2, 2)), ("state/count", (0,), (2,))]

        restored = kind("average", held_as if kind is StatefulItem else held_as.shadow)
        specs = {
            one.spec.name: replace(one.spec, shape=one.spec.global_shape, offset=(0,) * len(one.spec.shape))
            for one in captured_item.tensors
        }
        saved = SavedItem(captured_item.type, captured_item.plain, specs)
        targets = restored.targets(saved, Permits())
        (box,) = targets["state/weight"].boxes()
        assert (box.offset, box.shape) == ((0, 1), (5, 1))
        box.memory()[:] = whole((5, 2))[:, 1:].contiguous().numpy().tobytes()
        box.commit()
        targets["state/count"].memory()[:] = bytes(8)
        targets["state/count"].commit()
        restored.apply(saved, Permits())
        weight = held_as.shadow["weight"]
        assert weight.placements == (Shard(1),)
        assert torch.equal(local_of(weight), whole((5, 2))[:, 1:])


def test_two_distributed_tensors_on_the_same_memory_are_refused() -> None:
    with rank_of(0, 2):
        tensor = distribute_tensor(whole((4, 2)), mesh_of((2,)), [Shard(0)], src_data_rank=None)
        state = {"one": tensor, "again": tensor, "other": tensor.detach()}
        with pytest.raises(RequestError, match="shares memory") as caught:
            flatten(state, path="optimizer", may_be_distributed=True)
        assert "optimizer.one" in caught.value.where and "optimizer.other" in caught.value.where
