"""Traits: each difference is noticed by the one comparison of many tensors, and no odd tensor ends the process."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from safepoint.state import traits
from safepoint.state.sight import Sight
from safepoint.state.traits import Traits
from tests.state.changes import CHANGES, Run
from tests.state.test_memo import fresh, remembered

COUNT = 600


def _square() -> torch.Tensor:
    return torch.arange(4.0).reshape(2, 2)


OTHERS: dict[str, Callable[[], torch.Tensor]] = {
    "a parameter": lambda: torch.nn.Parameter(_square(), requires_grad=False),
    "a flag": lambda: _square().requires_grad_(),
    "a dtype": lambda: _square().to(torch.int32),
    "a device": lambda: torch.empty(2, 2, device="meta"),
    "fewer axes": lambda: torch.ones(4),
    "another shape": lambda: torch.ones(4, 1),
    "strides": lambda: _square().t(),
    "a negative view": lambda: torch.zeros(2, 2, dtype=torch.complex64).conj().imag,
    "a repeated row": lambda: torch.ones(1, 2).expand(2, 2),
    "a number": lambda: torch.tensor(1.0),
    "a sparse one": lambda: _square().to_sparse(),
    "a sparse one in rows": lambda: _square().to_sparse_csr(),
    "one of another library": lambda: _square().to_mkldnn(),
    "a quantised one": lambda: torch.quantize_per_tensor(_square(), 1.0, 0, torch.qint8),
    "one of no memory": lambda: torch._efficientzerotensor((2, 2)),
    "a nested one": lambda: torch.nested.nested_tensor([torch.ones(2), torch.ones(2)]),
}


def _alike(count: int) -> list[torch.Tensor]:
    return [_square() for _ in range(count)]


def _facts(tensors: list[torch.Tensor], before: Traits | None = None) -> tuple[bool, list[object]]:
    sight = Sight(before)
    sight.look_at_tensors(tensors)
    sight.close()
    return sight.is_known, sight.facts


def _traits(tensors: list[torch.Tensor]) -> Traits:
    found = Traits.of(tensors)
    assert found is not None
    return found


@pytest.mark.skipif(traits._guards() is None, reason="this torch has no comparison that notices each difference")
def test_other_tensors_of_the_same_traits_are_known_by_one_comparison(monkeypatch: pytest.MonkeyPatch) -> None:
    before = _traits(_alike(COUNT))
    monkeypatch.setattr(Traits, "of", lambda tensors: pytest.fail("each trait was asked for"))

    is_known, facts = _facts(_alike(COUNT), before)

    assert is_known
    assert any(one is before.columns[0] for one in facts)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("place", [0, COUNT - 1])
@pytest.mark.parametrize("name", OTHERS)
def test_a_tensor_of_another_trait_is_seen_as_at_a_first_look(name: str, place: int) -> None:
    before = _traits(_alike(COUNT))
    tensors = _alike(COUNT)
    tensors[place] = OTHERS[name]()

    seen = _facts(tensors, before)

    assert seen == _facts(tensors)
    assert not seen[0] or seen[1] != _facts(_alike(COUNT))[1]


@pytest.mark.parametrize("count", [0, COUNT - 1, COUNT + 1])
def test_tensors_of_another_count_are_seen_as_at_a_first_look(count: int) -> None:
    tensors = _alike(count)
    assert _facts(tensors, _traits(_alike(COUNT))) == _facts(tensors)


def test_traits_keep_no_tensor_alive() -> None:
    tensors = _alike(2)
    before = _traits(tensors)
    storages = [torch.UntypedStorage._weak_ref(one.untyped_storage()) for one in tensors]

    del tensors

    assert before.count == len([one for one in storages if torch.UntypedStorage._expired(one)])


@pytest.mark.parametrize("kind", ["none", "one that notices nothing"])
def test_captures_are_those_of_a_first_one_where_torch_compares_nothing(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Blind:
        def __init__(self, *tensors: torch.Tensor, **options: object) -> None: ...

        def check(self, *tensors: torch.Tensor) -> bool:
            return True

    import torch._C._dynamo.guards as guards

    if kind == "none":
        monkeypatch.delattr(guards, "TensorGuards")
    else:
        monkeypatch.setattr(guards, "TensorGuards", Blind)
    traits._guards.cache_clear()
    try:
        assert traits._guards() is None
        for name in ("frozen", "another order", "another dtype", "another shape", "a negative view"):
            run = Run()
            registry = run.registry()
            remembered(registry)
            CHANGES[name](run)
            assert remembered(registry) == fresh(run), name
    finally:
        traits._guards.cache_clear()
