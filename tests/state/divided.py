"""One model divided over ranks in several ways, its state put together from what all ranks capture, and taken back."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from msgspec.structs import replace
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

from safepoint.format.plain import decode_plain, encode_plain
from safepoint.state.item import Item, Permits, SavedItem, ShardedTarget, Target, TensorSpec
from tests.state.training import items

Built = tuple[nn.Module, torch.optim.Optimizer]
Make = Callable[..., torch.optim.Optimizer]


class Net(nn.Module):
    """Has a tied weight, a frozen layer, running statistics, an axis that no number of ranks divides, and one row."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(11, 6)
        # A bias before the normalisation would have gradients of rounding errors alone.
        self.first = nn.Linear(6, 8, bias=False)
        self.norm = nn.BatchNorm1d(8)
        self.second = nn.Linear(8, 12)
        self.frozen = nn.Linear(12, 6).requires_grad_(False)
        self.out = nn.Linear(6, 11, bias=False)
        self.out.weight = self.table.weight
        self.last = nn.Linear(11, 1)

    def forward(self, numbers: torch.Tensor) -> torch.Tensor:
        hidden = self.second(torch.tanh(self.norm(self.first(self.table(numbers)))))
        return self.last(self.out(self.frozen(hidden)))  # type: ignore[no-any-return]


def adamw(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=0.02, weight_decay=0.1)


def build(way: str, seed: int, make: Make = adamw) -> Built:
    """Return a model of this seed, divided in one way, and its optimizer, which has not stepped."""
    torch.manual_seed(seed)
    model: nn.Module = Net()
    model = WAYS[way](model)
    return model, make([one for one in model.parameters() if one.requires_grad])


def _mesh(*sizes: int) -> DeviceMesh:
    return init_device_mesh("cpu", sizes, mesh_dim_names=("data", "model")[: len(sizes)])


def _layers(net: Any) -> list[nn.Module]:
    return [net.first, net.second, net.frozen, net.last]


def _fully(net: nn.Module, mesh: DeviceMesh | None = None, **options: Any) -> nn.Module:
    for layer in _layers(net):
        fully_shard(layer, mesh=mesh, **options)
    return fully_shard(net, mesh=mesh, **options)  # type: ignore[no-any-return, call-overload]


def _tensor_parallel(net: nn.Module, mesh: DeviceMesh) -> nn.Module:
    plan = {"second": ColwiseParallel(), "frozen": RowwiseParallel()}
    return parallelize_module(net, mesh, plan)


def _both(net: nn.Module) -> nn.Module:
    mesh = _mesh(2, dist.get_world_size() // 2)
    return _fully(_tensor_parallel(net, mesh["model"]), mesh["data"])


def _half(net: Any) -> nn.Module:
    fully_shard(net.norm)
    return _fully(net, mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16))


WAYS: dict[str, Callable[[nn.Module], nn.Module]] = {
    "plain": lambda net: net,
    "ddp": DistributedDataParallel,
    "fsdp": _fully,
    "root": fully_shard,  # type: ignore[dict-item]
    "bf16": _half,
    "tp": lambda net: _tensor_parallel(net, _mesh(dist.get_world_size())),
    "hsdp": lambda net: _fully(net, _mesh(2, dist.get_world_size() // 2)),
    "fsdp_tp": _both,
}


def batch(index: int) -> torch.Tensor:
    return torch.randint(0, 11, (16,), generator=torch.Generator().manual_seed(index))


def update(built: Built, index: int) -> None:
    """Make one update. Every rank sees the whole batch, so that all ways of dividing train alike."""
    model, optimizer = built
    optimizer.zero_grad()
    numbers = batch(index)
    (model(numbers).squeeze(1).float() - numbers / 11).square().mean().backward()
    optimizer.step()


def train(built: Built, first: int, last: int) -> None:
    for index in range(first, last):
        update(built, index)


def everything(built: Built) -> dict[str, torch.Tensor]:
    """Return all parameters, buffers and states whole, gathered by torch; a collective."""
    model, optimizer = built
    found: dict[str, torch.Tensor] = {}
    if hasattr(model, "reshard"):
        model.reshard()
    for name, one in [*model.named_parameters(), *model.named_buffers()]:
        name = name.removeprefix("module.")
        found[name] = whole(one)
        for key, state in optimizer.state.get(one, {}).items() if isinstance(one, nn.Parameter) else ():
            found[f"{name} {key}"] = whole(state)
    return found


def whole(tensor: torch.Tensor) -> torch.Tensor:
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach().clone()


def same(one: Mapping[str, torch.Tensor], other: Mapping[str, torch.Tensor]) -> None:
    """Assert that all tensors have the same bits."""
    assert sorted(one) == sorted(other)
    for name, tensor in one.items():
        assert tensor.dtype == other[name].dtype, name
        assert torch.equal(tensor, other[name]), name


def close(one: Mapping[str, torch.Tensor], other: Mapping[str, torch.Tensor]) -> None:
    assert sorted(one) == sorted(other)
    for name, tensor in one.items():
        assert torch.allclose(tensor.float(), other[name].float(), rtol=1e-3, atol=1e-5), name


class Checkpoint:
    """Hold what all ranks captured of some items, each tensor whole; made together by all ranks."""

    def __init__(self, live: Mapping[str, Item]) -> None:
        self.saved: dict[str, SavedItem] = {}
        self.tensors: dict[tuple[str, str], np.ndarray[Any, Any]] = {}
        self.boxes: dict[tuple[str, str], list[TensorSpec]] = {}
        self.leaders: set[str] = set()
        for name, item in live.items():
            captured = item.capture()
            mine = []
            for one in captured.tensors:
                data = bytearray(one.source.nbytes)
                one.source.copy_into(memoryview(data))
                mine.append((one.spec, bytes(data), one.is_leaders))
            text = json.dumps(encode_plain(captured.plain, path=name))
            ranks: list[Any] = [None] * dist.get_world_size()
            dist.all_gather_object(ranks, (text, mine))
            assert {one for one, _ in ranks} == {text}, "the trees differ between ranks"
            self._glue(name, [box for _, boxes in ranks for box in boxes])
            firsts = [boxes[0] for (owner, _), boxes in self.boxes.items() if owner == name]
            specs = {
                one.name: replace(one, shape=one.global_shape, offset=(0,) * len(one.global_shape)) for one in firsts
            }
            self.saved[name] = SavedItem(captured.type, decode_plain(json.loads(text)), specs)

    def _glue(self, item: str, boxes: list[tuple[TensorSpec, bytes, bool]]) -> None:
        held: dict[str, Any] = {}
        for spec, data, is_leaders in boxes:
            self.boxes.setdefault((item, spec.name), []).append(spec)
            if is_leaders:
                self.leaders.add(spec.name)
            size = getattr(torch, spec.dtype).itemsize
            glued = self.tensors.setdefault((item, spec.name), np.zeros((*spec.global_shape, size), np.uint8))
            count = held.setdefault(spec.name, np.zeros(spec.global_shape, np.int64))
            part = tuple(slice(start, start + length) for start, length in zip(spec.offset, spec.shape, strict=True))
            values = np.frombuffer(data, np.uint8).reshape(*spec.shape, size)
            if not is_leaders or not count[part].any():
                again = count[part] > 0
                assert (glued[part][again] == values[again]).all(), f"ranks disagree about {spec.name}"
                glued[part] = values
            count[part] += 1
        for name, count in held.items():
            assert count.all(), f"nobody holds some of {name}"

    def restore(self, live: Mapping[str, Item]) -> int:
        """Restore this rank's items and return how many bytes its targets took."""
        total = 0
        for name, item in live.items():
            assert list(item.check(self.saved[name])) == []
        for name, item in live.items():
            for key, target in item.targets(self.saved[name], Permits()).items():
                total += self._fill(target, self.tensors[name, key])
            assert list(item.apply(self.saved[name], Permits())) == []
        return total

    @staticmethod
    def _fill(target: Target | ShardedTarget, values: np.ndarray[Any, Any]) -> int:
        if not isinstance(target, ShardedTarget):
            target.memory()[:] = values.tobytes()
            target.commit()
            return target.nbytes
        for box in target.boxes():
            part = tuple(slice(start, start + length) for start, length in zip(box.offset, box.shape, strict=True))
            box.memory()[:] = np.ascontiguousarray(values[part]).tobytes()
            box.commit()
        return sum(box.nbytes for box in target.boxes())

    def value(self, item: str, name: str) -> torch.Tensor:
        """Return a tensor as it was put together."""
        boxes = self.boxes[item, name]
        flat = torch.from_numpy(self.tensors[item, name].reshape(-1).copy())
        return flat.view(getattr(torch, boxes[0].dtype)).reshape(boxes[0].global_shape)


def live(built: Built) -> dict[str, Item]:
    """Return the items of a model and its optimizer."""
    return items(*built)
