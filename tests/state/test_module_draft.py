"""The tensors of a module that are described at once are described as each alone is."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from safepoint.errors import RequestError
from safepoint.state import module_draft
from safepoint.state.draft import Draft
from safepoint.state.module_draft import draft_module
from safepoint.state.names import walk_slots


class Odd(nn.Module):
    """Holds a tensor in every way that a module holds one."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(3)
        self.layers = nn.ModuleList([nn.Linear(3, 2), nn.Linear(3, 2, bias=False)])
        self.again = self.layers[0]
        self.frozen = nn.Parameter(torch.ones(2), requires_grad=False)
        self.number = nn.Parameter(torch.tensor(2.0))
        self.buffer = nn.Buffer(torch.ones(2, dtype=torch.int32))
        self.passing = nn.Buffer(torch.ones(2), persistent=False)
        self.register_buffer("plain", torch.ones(2), persistent=False)
        self.register_buffer("none", None)
        self.register_parameter("späte", nn.Parameter(torch.ones(1)))
        self.register_parameter("two words", nn.Parameter(torch.ones(1)))


def labelled() -> nn.Module:
    module = nn.Linear(2, 2)
    module.weight.label = "mine"
    module.register_buffer("count", torch.zeros(()))
    module.count.label = "mine"
    return module


def drafted(module: nn.Module) -> Draft:
    slots = walk_slots(module)
    # Of two slots of one tensor, the second is handed out.
    handed_out = {id(slots[-1].tensor), id(slots[0].tensor)}
    extra = {"a": {"x": torch.ones(3), "n": 1}}
    return draft_module("m", slots, extra=extra, deviating=("norm",), handed_out=handed_out)


def told(draft: Draft) -> Any:
    tensors = [(name, id(tensor)) for name, tensor in draft.tensors if not name.startswith("@")]
    values = list(map(id, draft.values))
    entries: dict[str, Any] = draft.plain["entries"]  # type: ignore[index]  # of a dict's tree
    return list(entries.items()), draft.plain, tensors, values, draft.leaders, draft.entries


@pytest.mark.parametrize("build", [Odd, labelled, nn.Identity, lambda: nn.Linear(2, 2, bias=False)])
def test_tensors_described_at_once_are_described_as_each_alone(
    build: Callable[[], nn.Module], monkeypatch: pytest.MonkeyPatch
) -> None:
    module = build()
    if not walk_slots(module):
        module.register_buffer("only", torch.ones(1))
    at_once = drafted(module)
    monkeypatch.setattr(module_draft, "are_plainly_storable", lambda _: False)
    assert told(at_once) == told(drafted(module))


def test_plain_tensors_are_described_without_a_call_for_each(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module_draft, "describe", lambda *_: pytest.fail("described alone"))
    assert len(drafted(Odd()).tensors) == 13 + 1


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    "odd",
    [
        torch.ones(2, device="meta"),
        torch._efficientzerotensor((2,)),
        torch.nested.nested_tensor([torch.ones(1), torch.ones(2)]),
    ],
    ids=["meta", "zero", "nested"],
)
def test_a_tensor_that_cannot_be_stored_is_refused_by_its_path(odd: torch.Tensor) -> None:
    module = labelled()
    module.register_buffer("odd", odd)
    with pytest.raises(RequestError, match=r"m\.odd"):
        drafted(module)
