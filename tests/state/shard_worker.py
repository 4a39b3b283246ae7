"""A rank of `test_shards`: makes every check with all other ranks, over gloo, and prints the name of each."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode

from safepoint.errors import RequestError
from safepoint.saving.capture import capture
from safepoint.state.item import Permits, ShardedTarget
from safepoint.state.modules import ModuleItem
from safepoint.state.shards import local_of
from safepoint.state.stateful import PlainItem
from tests.state.divided import (
    WAYS,
    Built,
    Checkpoint,
    Make,
    build,
    close,
    everything,
    live,
    same,
    train,
)
from tests.state.roundtrip import Stored


def trained(way: str, seed: int = 1, updates: int = 2) -> Built:
    built = build(way, seed)
    train(built, 0, updates)
    return built


def ways() -> list[str]:
    """Return the ways that a check goes through: on four ranks all of them, on fewer the three that differ most."""
    return list(WAYS) if dist.get_world_size() >= 4 else ["ddp", "fsdp", "tp"]


def what_ranks_capture_is_the_whole() -> None:
    for way in ways():
        built = trained(way)
        expected = everything(built)
        checkpoint = Checkpoint(live(built))
        for name, value in expected.items():
            name, _, key = name.partition(" ")
            if value.dim() == 0:
                continue
            # The embedding's name comes second: a tied weight has the first of its names.
            name = name.replace("table.weight", "out.weight")
            found = (
                checkpoint.value("optimizer", f"state/model/{name}/{key}") if key else checkpoint.value("model", name)
            )
            is_same = torch.equal(found, value) or name.startswith("norm.running")
            assert is_same and found.dtype == value.dtype, (way, name, key)
        handed_out = {"norm.running_mean", "norm.running_var"} if way == "ddp" else set()
        assert checkpoint.leaders == handed_out, way


def a_saving_run_ends_like_one_that_never_saves() -> None:
    for way in ways():
        runs = [trained(way, updates=0), trained(way, updates=0)]
        Checkpoint(live(runs[0]))
        for run in runs:
            train(run, 0, 2)
        Checkpoint(live(runs[0]))
        for run in runs:
            train(run, 2, 4)
        same(everything(runs[0]), everything(runs[1]))


def a_restored_run_goes_on_like_the_uninterrupted_one() -> None:
    names = ways()
    for place, way in enumerate(names):
        built = trained(way)
        checkpoint = Checkpoint(live(built))
        at_save = everything(built)
        train(built, 2, 5)
        expected = everything(built)
        following = names[(place + 1 + len(names) // 3) % len(names)]
        for other, updates in ((way, 0), (way, 1), (following, 0)):
            restored = build(other, seed=7)
            train(restored, 10, 10 + updates)
            before = {name: id(one) for name, one in restored[0].named_parameters()}
            checkpoint.restore(live(restored))
            assert before == {name: id(one) for name, one in restored[0].named_parameters()}
            same(everything(restored), at_save)
            train(restored, 2, 5)
            if other == way:
                same(everything(restored), expected)
            elif "bf16" not in (way, other):
                close(everything(restored), expected)


def every_kind_of_state_comes_back_to_fresh_optimizers() -> None:
    makes: list[Make] = [
        lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9),
        lambda parameters: torch.optim.AdamW(parameters, lr=0.01, amsgrad=True, foreach=False),
        lambda parameters: torch.optim.AdamW(parameters, lr=0.01, fused=True),
        lambda parameters: torch.optim.Adagrad(parameters, lr=0.01),
    ]
    for make in makes:
        built = build("fsdp", 1, make)
        train(built, 0, 2)
        checkpoint = Checkpoint(live(built))
        at_save = everything(built)
        train(built, 2, 4)
        for way, compare in (("fsdp", same), ("plain", close)):
            restored = build(way, 7, make)
            checkpoint.restore(live(restored))
            same(everything(restored), at_save)
            train(restored, 2, 4)
            compare(everything(restored), everything(built))


def moments_in_another_order_of_memory_are_divided_too() -> None:
    def make(*, divide: bool) -> Built:
        torch.manual_seed(3)
        model = nn.Sequential(nn.Conv2d(3, 5, 2))
        if divide:
            fully_shard(model)
        else:
            model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        return model, torch.optim.AdamW(model.parameters())

    def step(built: Built) -> None:
        built[0](torch.arange(48.0).reshape(1, 3, 4, 4)).square().sum().backward()
        built[1].step()
        built[1].zero_grad()

    built, restored = make(divide=False), make(divide=True)
    step(built)
    checkpoint = Checkpoint(live(built))
    assert checkpoint.tensors["optimizer", "state/model/0.weight/exp_avg"].ndim == 2
    checkpoint.restore(live(restored))
    same(everything(restored), everything(built))
    for run in (built, restored):
        step(run)
    close(everything(restored), everything(built))


def a_stage_of_a_pipeline_reads_nothing_of_the_others() -> None:
    rank, world_size = dist.get_rank(), dist.get_world_size()
    stages = {str(number): nn.Linear(3, 3) for number in range(world_size)}
    all_of_it = nn.ModuleDict(stages)
    mine = nn.ModuleDict({str(rank): nn.Linear(3, 3)})
    runs: list[Built] = [(one, torch.optim.AdamW(one.parameters())) for one in (all_of_it, mine)]
    for one, optimizer in runs[:1]:
        sum(layer(torch.ones(3)).sum() for layer in one.values()).backward()  # type: ignore[union-attr]
        optimizer.step()
    whole = Stored(live(runs[0]))
    stage = live(runs[1])
    assert [one.word for one in stage["optimizer"].check(whole.saved["optimizer"])] == (
        ["optimizer.removed"] * 2 * (world_size - 1)
    )
    for name, count in (("model", 2), ("optimizer", 4)):
        targets = stage[name].targets(whole.saved[name], Permits())
        assert len(targets) == count
        for key, target in targets.items():
            assert not isinstance(target, ShardedTarget)
            target.memory()[:] = whole.data[name, key]
            target.commit()
        stage[name].apply(whole.saved[name], Permits())
    expected = everything(runs[0])
    for name, tensor in everything(runs[1]).items():
        assert torch.equal(tensor, expected[name]), name


def mixed_precision_goes_on_bit_for_bit() -> None:
    built = trained("bf16")
    assert {one.dtype for one in built[0].parameters()} == {torch.float32}
    checkpoint = Checkpoint(live(built))
    train(built, 2, 5)
    restored = build("bf16", seed=7)
    checkpoint.restore(live(restored))
    train(restored, 2, 5)
    same(everything(restored), everything(built))


def a_validation_before_a_save_changes_nothing() -> None:
    runs = [trained("root"), trained("root")]
    for model, _ in runs:
        model.eval()
        with torch.no_grad():
            model(torch.arange(11))
        assert not isinstance(next(iter(model._parameters.values()), model.first.weight), DTensor)  # type: ignore[union-attr]
        model.train()
    checkpoint = Checkpoint(live(runs[0]))
    for run in runs:
        train(run, 2, 5)
    same(everything(runs[0]), everything(runs[1]))
    restored = build("root", seed=7)
    checkpoint.restore(live(restored))
    train(restored, 2, 5)
    same(everything(restored), everything(runs[1]))


def a_rank_that_cannot_save_leaves_its_model_in_the_form_of_the_others() -> None:
    # A rank that gathers parameters before the next forward pass waits for ever for one that has them.
    model, optimizer = trained("root")
    with torch.no_grad():
        model(torch.arange(11))
    note: dict[str, Any] = {"value": object() if dist.get_rank() else 1}
    found = "nothing"
    try:
        capture([PlainItem("note", note), *live((model, optimizer)).values()])
    except RequestError as exc:
        found = exc.where
    assert found == ("note.state.value" if dist.get_rank() else "nothing")
    assert isinstance(model.first.weight, DTensor)  # type: ignore[union-attr]
    train((model, optimizer), 2, 4)


def structure_tells_nothing_of_how_it_is_divided() -> None:
    expected = ModuleItem("model", build("plain", 1)[0]).structure()
    for way in ways():
        assert ModuleItem("model", build(way, 1)[0]).structure() == expected, way


def an_optimizer_that_never_stepped_has_no_state_before_and_after() -> None:
    built = build("fsdp", seed=1)
    checkpoint = Checkpoint(live(built))
    assert not built[1].state
    restored = trained("fsdp", seed=7)
    checkpoint.restore(live(restored))
    assert not restored[1].state
    train(built, 0, 3)
    train(restored, 0, 3)
    same(everything(built), everything(restored))


def a_rank_with_an_empty_shard_holds_no_box() -> None:
    built = trained("fsdp")
    (bias,) = (one for name, one in built[0].named_parameters() if name == "last.bias")
    held = [one.spec for one in live(built)["model"].capture().tensors if one.spec.name == "last.bias"]
    assert len(held) == (1 if local_of(bias).numel() else 0)
    assert bool(held) == (dist.get_rank() == 0)


class Largest(TorchDispatchMode):
    """Note the largest plain tensor that any operation makes."""

    def __init__(self) -> None:
        super().__init__()
        self.size_bytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if isinstance(result, torch.Tensor) and not isinstance(result, DTensor):
            self.size_bytes = max(self.size_bytes, result.numel() * result.element_size())
        return result


def no_rank_holds_a_whole_tensor() -> None:
    rows = 64 * dist.get_world_size()

    def make() -> Built:
        model = nn.Sequential(nn.Linear(32, rows))
        fully_shard(model)
        return model, torch.optim.AdamW(model.parameters())

    built = make()
    built[0](torch.ones(2, 32)).sum().backward()
    built[1].step()
    share = rows * 32 * 4 // dist.get_world_size()
    with Largest() as saving:
        sources = [one.source for item in live(built).values() for one in item.capture().tensors]
        for source in sources:
            source.copy_into(memoryview(bytearray(source.nbytes)))
    assert 0 < saving.size_bytes <= share
    checkpoint = Checkpoint(live(built))
    for restored in (built, make()):
        with Largest() as restoring:
            taken = checkpoint.restore(live(restored))
        assert restoring.size_bytes <= share
        # Weight, bias and two moments of each.
        assert taken == 3 * (share + rows * 4 // dist.get_world_size())


CHECKS: list[Callable[[], None]] = [
    what_ranks_capture_is_the_whole,
    every_kind_of_state_comes_back_to_fresh_optimizers,
    moments_in_another_order_of_memory_are_divided_too,
    a_stage_of_a_pipeline_reads_nothing_of_the_others,
    a_saving_run_ends_like_one_that_never_saves,
    a_restored_run_goes_on_like_the_uninterrupted_one,
    mixed_precision_goes_on_bit_for_bit,
    a_validation_before_a_save_changes_nothing,
    a_rank_that_cannot_save_leaves_its_model_in_the_form_of_the_others,
    structure_tells_nothing_of_how_it_is_divided,
    an_optimizer_that_never_stepped_has_no_state_before_and_after,
    a_rank_with_an_empty_shard_holds_no_box,
    no_rank_holds_a_whole_tensor,
]


def main() -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    for check in CHECKS:
        if len(sys.argv) < 2 or check.__name__ in sys.argv[1:]:
            check()
            if dist.get_rank() == 0:
                print(check.__name__, flush=True)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    main()
