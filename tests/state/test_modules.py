"""Modules as items: names through wrappers, buffers, ties, extra state, differences, in-place restore."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.testing._internal.two_tensor import TwoTensor

from safepoint.errors import RequestError
from safepoint.state.item import Permits
from safepoint.state.modules import ModuleItem
from safepoint.state.names import qualified_parameters, walk_slots
from tests.state.roundtrip import Stored, same_bits


@pytest.fixture
def one_rank() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def item(module: nn.Module) -> dict[str, ModuleItem]:
    return {"model": ModuleItem("model", module)}


def net(seed: int) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))


def names(module: nn.Module) -> list[str]:
    return [slot.name for slot in walk_slots(module)]


class Odd(nn.Module):
    """Has submodules that are really called like wrappers' attributes."""

    def __init__(self) -> None:
        super().__init__()
        self.module = nn.Linear(2, 2)
        self._orig_mod = nn.Linear(2, 2)


class Caches(nn.Module):
    def __init__(self, value: float, *, lazy: torch.Tensor | None = None) -> None:
        super().__init__()
        self.register_buffer("table", torch.full((3,), value), persistent=False)
        self.register_buffer("late", lazy)


class Tied(nn.Module):
    def __init__(self, *, tied: bool) -> None:
        super().__init__()
        self.embedding = nn.Embedding(5, 3)
        self.head = nn.Linear(3, 5, bias=False)
        if tied:
            self.head.weight = self.embedding.weight


class Scaled(nn.Module):
    def __init__(self, scale: object) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(2))
        self.scale = scale

    def get_extra_state(self) -> object:
        return {"scale": self.scale, "history": torch.arange(3.0)}

    def set_extra_state(self, state: Any) -> None:
        self.scale = state["scale"]
        self.history = state["history"]


def test_wrapper_prefixes_are_left_out_also_in_the_middle(one_rank: None) -> None:
    """Field reports B139, B142."""
    plain = net(0)
    expected = names(plain)
    assert expected[:2] == ["0.weight", "0.bias"]
    assert names(nn.DataParallel(net(0))) == expected
    assert names(nn.parallel.DistributedDataParallel(net(0))) == expected
    assert names(torch.compile(net(0))) == expected
    assert names(torch.compile(nn.parallel.DistributedDataParallel(net(0)))) == expected
    middle = net(0)
    middle[0] = torch.compile(checkpoint_wrapper(middle[0]))
    assert names(middle) == expected


def test_a_submodule_really_called_like_a_prefix_keeps_its_name() -> None:
    """Field report B141."""
    expected = ["module.weight", "module.bias", "_orig_mod.weight", "_orig_mod.bias"]
    assert names(Odd()) == expected
    assert names(nn.DataParallel(Odd())) == expected
    assert names(torch.compile(Odd())) == expected


@pytest.mark.parametrize(("before", "after"), [("plain", "compiled"), ("compiled", "plain"), ("parallel", "compiled")])
def test_saved_wrapped_and_restored_otherwise(before: str, after: str) -> None:
    """Field reports B139, B142."""
    wrap = {"plain": lambda m: m, "compiled": torch.compile, "parallel": nn.DataParallel}
    source, target = net(1), net(2)
    stored = Stored(item(wrap[before](source)))
    stored.restore(item(wrap[after](target)))
    assert same_bits(source.state_dict(), target.state_dict())


def test_a_prefix_that_hides_a_collision_is_refused() -> None:
    wrapped = nn.DataParallel(nn.Linear(2, 2))
    wrapped.register_buffer("weight", torch.ones(1))
    with pytest.raises(RequestError, match="same name"):
        walk_slots(wrapped)


def test_parameters_are_named_once_by_their_first_item_and_name() -> None:
    model = Tied(tied=True)
    table = qualified_parameters({"model": model, "again": nn.ModuleList([model])})
    assert {name: id(one) for name, one in table.items()} == {"model/embedding.weight": id(model.embedding.weight)}
    assert list(qualified_parameters({"m": model})) == ["m/embedding.weight"]


def test_restore_fills_the_live_memory() -> None:
    source, target = net(1), net(2)
    source(torch.randn(8, 3))
    kept = [(parameter, parameter.data_ptr()) for parameter in target.parameters()]
    Stored(item(source)).restore(item(target))
    assert [(parameter, parameter.data_ptr()) for parameter in target.parameters()] == kept
    assert all(parameter.requires_grad and parameter.is_leaf for parameter in target.parameters())
    assert same_bits(source.state_dict(), target.state_dict())
    assert target[1].num_batches_tracked.item() == 1


def test_memory_order_of_the_live_parameter_is_kept() -> None:
    source = nn.Conv2d(3, 4, 3)
    target = nn.Conv2d(3, 4, 3).to(memory_format=torch.channels_last)
    strides = target.weight.stride()
    Stored(item(source)).restore(item(target))
    assert target.weight.stride() == strides
    assert torch.equal(source.weight, target.weight)


def test_buffers_outside_the_state_dict_come_back() -> None:
    """Field reports B37, B145."""
    source, target = Caches(7.0, lazy=torch.tensor([1.0, 2.0])), Caches(0.0)
    assert Stored(item(source)).restore(item(target)) == {"model": []}
    assert target.table.tolist() == [7, 7, 7]
    assert target.late.tolist() == [1, 2]
    assert "late" in dict(target.named_buffers())


def test_buffers_are_marked_as_persistent_or_not() -> None:
    other = Caches(0.0)
    other._non_persistent_buffers_set.clear()
    assert Stored(item(Caches(1.0))).words(item(other)) == ["model.persistent"]


def test_tied_weights_are_stored_once_and_stay_tied() -> None:
    source, target = Tied(tied=True), Tied(tied=True)
    stored = Stored(item(source))
    assert [name for _, name in stored.data] == ["embedding.weight"]
    stored.restore(item(target))
    assert target.head.weight is target.embedding.weight
    assert torch.equal(target.head.weight, source.head.weight)


@pytest.mark.parametrize("tied_at_save", [True, False])
def test_a_tie_on_one_side_only_is_a_named_difference(tied_at_save: bool) -> None:
    """Field report B143."""
    source, target = Tied(tied=tied_at_save), Tied(tied=not tied_at_save)
    stored = Stored(item(source))
    assert stored.words(item(target)) == ["model.tie"]
    stored.restore(item(target), Permits(frozenset({"model.tie"})))
    assert torch.equal(target.embedding.weight, source.embedding.weight)
    if tied_at_save:
        assert torch.equal(target.head.weight, source.embedding.weight)


def test_ties_by_memory_count_and_empty_tensors_never_tie() -> None:
    module = nn.Module()
    module.register_parameter("a", nn.Parameter(torch.arange(4.0)))
    module.register_parameter("b", nn.Parameter(module.a.detach()))
    module.register_parameter("part", nn.Parameter(module.a.detach()[:2]))
    module.register_buffer("none1", torch.empty(0))
    module.register_buffer("none2", torch.empty(0))
    entries: Any = ModuleItem("m", module).capture().plain
    assert {name: entry["ties"] for name, entry in entries["entries"].items()} == {
        "a": ["b"],
        "part": [],
        "none1": [],
        "none2": [],
    }


def test_extra_state_of_submodules_comes_back() -> None:
    """Field report B37."""
    source, target = nn.Sequential(Scaled(2.5)), nn.Sequential(Scaled(1.0))
    Stored(item(source)).restore(item(target))
    assert target[0].scale == 2.5
    assert target[0].history.tolist() == [0, 1, 2]


def test_extra_state_that_is_not_plain_is_refused_by_its_path() -> None:
    with pytest.raises(RequestError) as caught:
        ModuleItem("model", nn.Sequential(Scaled(object()))).capture()
    assert "model.get_extra_state()" in caught.value.where and "scale" in caught.value.where


def test_state_hidden_in_an_overridden_saver_is_refused() -> None:
    class Packed(nn.Linear):
        def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
            super()._save_to_state_dict(destination, prefix, keep_vars)
            destination[prefix + "packed"] = torch.ones(1)

    with pytest.raises(RequestError, match="packed") as caught:
        ModuleItem("model", nn.Sequential(Packed(1, 1))).capture()
    assert caught.value.where == "model.0"


class _Overriding(nn.Linear):
    def state_dict(self, *args: Any, **options: Any) -> Any:
        whole = super().state_dict(*args, **options)
        return {**whole, "seen": 41}


def _hooked(change: Callable[[dict[str, Any], str], object]) -> nn.Module:
    module = nn.Sequential(nn.Linear(2, 2))
    module[0].register_state_dict_post_hook(lambda _, whole, prefix, metadata: change(whole, prefix))
    return module


@pytest.mark.parametrize("at", ["structure", "capture"])
def test_state_that_a_module_adds_to_its_state_dict_is_refused_by_module_and_key(at: str) -> None:
    overriding = nn.Sequential(_Overriding(1, 1))
    hooked = _hooked(lambda whole, prefix: whole.__setitem__(prefix + "seen", torch.tensor(41)))
    for module in (overriding, hooked):
        with pytest.raises(RequestError, match="seen") as caught:
            getattr(ModuleItem("model", module), at)()
        assert caught.value.where in ("model", "model.0")


def test_a_state_dict_that_is_changed_without_adding_state_is_taken() -> None:
    """Renamed, left out and converted entries are all stored from the live module."""

    def rename(whole: dict[str, Any], prefix: str) -> None:
        whole[prefix + "kernel"] = whole.pop(prefix + "weight")

    def convert(whole: dict[str, Any], prefix: str) -> None:
        whole.update({key: value.half() for key, value in whole.items()})

    for change in (rename, convert, lambda whole, prefix: whole.clear()):
        source, target = _hooked(change), _hooked(change)
        Stored(item(source)).restore(item(target))
        assert torch.equal(target[0].weight, source[0].weight) and torch.equal(target[0].bias, source[0].bias)


def test_extra_state_of_a_module_with_its_own_state_dict_is_known() -> None:
    module = nn.Sequential(Scaled(2.5))
    module.register_state_dict_post_hook(lambda *_: None)
    ModuleItem("model", module).capture()


def test_asking_a_module_for_its_state_dict_draws_nothing() -> None:
    module = _hooked(lambda whole, prefix: whole.__setitem__(prefix + "bias", torch.rand(1)))
    torch.manual_seed(3)
    before = torch.get_rng_state()
    ModuleItem("model", module).structure()
    assert torch.equal(torch.get_rng_state(), before)


def test_state_dict_hooks_that_can_add_nothing_do_not_run() -> None:
    module = net(0)
    module[2].register_state_dict_pre_hook(lambda *_: pytest.fail("a hook ran"))
    Stored(item(module)).restore(item(module))


def test_every_difference_of_names_shapes_and_dtypes_is_listed() -> None:
    """Field reports B146, B153."""
    source = nn.ModuleDict({"a": nn.Linear(2, 2), "b": nn.Linear(2, 2), "c": nn.Linear(2, 2)})
    target = nn.ModuleDict({"a": nn.Linear(3, 2), "b": nn.Linear(2, 2).double(), "d": nn.Linear(2, 2)})
    before = copy.deepcopy(target.state_dict())
    found = item(target)["model"].check(Stored(item(source)).saved["model"])
    assert sorted((one.word, one.subject) for one in found) == [
        ("model.added", "model.d.bias"),
        ("model.added", "model.d.weight"),
        ("model.dtype", "model.b.bias"),
        ("model.dtype", "model.b.weight"),
        ("model.removed", "model.c.bias"),
        ("model.removed", "model.c.weight"),
        ("model.shape", "model.a.weight"),
    ]
    assert same_bits(before, target.state_dict())


def test_permitted_differences_restore_the_rest_and_name_what_stays_fresh() -> None:
    """Field report B86."""
    source = nn.ModuleDict({"a": nn.Linear(2, 2), "b": nn.Linear(2, 2), "c": nn.Linear(2, 2)})
    target = nn.ModuleDict({"a": nn.Linear(3, 2), "b": nn.Linear(2, 2).double(), "d": nn.Linear(2, 2)})
    fresh = copy.deepcopy(target)
    permits = Permits(frozenset({"model.added", "model.removed", "model.shape", "model.dtype"}))
    left = Stored(item(source)).restore(item(target), permits)["model"]
    assert left == ["a.weight", "d.weight", "d.bias"]
    assert torch.equal(target["a"].weight, fresh["a"].weight)
    assert torch.equal(target["a"].bias, source["a"].bias)
    assert torch.equal(target["b"].weight, source["b"].weight.double())
    assert torch.equal(target["d"].weight, fresh["d"].weight)


def test_frozen_parameters_come_back_frozen_and_thawed_ones_thawed() -> None:
    source, target = net(0), net(1)
    source[0].weight.requires_grad_(False)
    target[2].weight.requires_grad_(False)
    Stored(item(source)).restore(item(target))
    assert [parameter.requires_grad for parameter in target.parameters()] == [False, True, True, True, True, True]


def test_a_submodule_in_another_mode_than_its_root_is_a_difference() -> None:
    source, target = net(0), net(0)
    source[1].eval()
    stored = Stored(item(source))
    assert stored.words(item(target)) == ["model.training"]
    assert Stored(item(net(0))).words(item(target.eval())) == []
    stored.restore(item(target), Permits(frozenset({"model.training"})))
    assert not target[1].training and not target.training


def test_lazy_parameters_are_refused() -> None:
    with pytest.raises(RequestError, match="not initialised") as caught:
        ModuleItem("model", nn.Sequential(nn.LazyLinear(3))).capture()
    assert caught.value.where == "model.0.bias"
    with pytest.raises(RequestError, match="not initialised"):
        ModuleItem("model", nn.Sequential(nn.LazyLinear(3))).structure()


def test_an_average_comes_back_with_its_count() -> None:
    """Field reports B27, B29."""
    model = net(0)
    source = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9), use_buffers=True)
    for _ in range(3):
        for parameter in model.parameters():
            parameter.data.add_(1)
        source.update_parameters(model)
    target = AveragedModel(net(1), multi_avg_fn=get_ema_multi_avg_fn(0.9), use_buffers=True)
    Stored({"ema": ModuleItem("ema", source)}).restore({"ema": ModuleItem("ema", target)})
    assert target.n_averaged.item() == 3
    for average in (source, target):
        average.update_parameters(model)
    assert same_bits(source.state_dict(), target.state_dict())


def test_sparse_and_wrapped_tensors_are_restored_in_their_live_objects() -> None:
    def build(scale: float) -> nn.Module:
        module = nn.Module()
        sparse = torch.sparse_coo_tensor([[0, 2, 0]], [scale, 2.0, 3.0], (4,), check_invariants=True)
        module.register_parameter("sparse", nn.Parameter(sparse))
        module.register_buffer("csr", (torch.eye(3) * (torch.arange(3.0) > 3 - scale)).to_sparse_csr())
        module.register_parameter("two", nn.Parameter(TwoTensor(torch.ones(2) * scale, torch.zeros(2))))
        return module

    source, target = build(2.0), build(1.0)
    kept = {name: parameter for name, parameter in target.named_parameters()}
    inner = target.two.a
    Stored(item(source)).restore(item(target))
    assert {name: parameter for name, parameter in target.named_parameters()} == kept
    assert not target.sparse.is_coalesced()
    assert target.sparse.to_dense().tolist() == [5, 0, 2, 0]
    assert torch.equal(target.csr.to_dense(), source.csr.to_dense())
    assert target.two.a is inner and inner.tolist() == [2, 2]


def test_another_layout_is_a_difference() -> None:
    source, target = nn.Module(), nn.Module()
    source.register_buffer("x", torch.eye(2))
    target.register_buffer("x", torch.eye(2).to_sparse())
    assert Stored(item(source)).words(item(target)) == ["model.layout"]


def test_a_checkpoint_item_of_another_type_is_a_difference() -> None:
    stored = Stored(item(net(0)))
    saved = stored.saved["model"]
    stored.saved["model"] = type(saved)("optimizer", saved.plain, saved.specs)
    assert stored.words(item(net(0))) == ["model.type"]


def test_structure_lists_what_a_digest_of_the_model_covers() -> None:
    module = nn.BatchNorm1d(2, affine=False)
    assert ModuleItem("m", module).structure()[0] == {
        "name": "running_mean",
        "kind": "buffer",
        "shape": [2],
        "dtype": "float32",
        "persistent": True,
        "requires_grad": False,
    }
