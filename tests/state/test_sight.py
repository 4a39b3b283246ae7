"""What is seen of tensors tells as much of them as asking each would."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from safepoint.state.aliases import are_apart
from safepoint.state.sight import Sight
from safepoint.state.tensors import are_plainly_storable


def freed() -> torch.Tensor:
    tensor = torch.ones(4)
    tensor.untyped_storage().resize_(8)
    return tensor


def halves() -> list[torch.Tensor]:
    whole = torch.arange(8.0)
    return [whole[:4], whole[4:]]


def overlapping() -> list[torch.Tensor]:
    whole = torch.arange(8.0)
    return [whole[:5], whole[4:]]


PLAIN: dict[str, Callable[[], list[torch.Tensor]]] = {
    "plain ones": lambda: [torch.ones(2), torch.nn.Parameter(torch.ones(3, 2)), torch.tensor(3)],
    "halves of one storage": halves,
    "empty ones": lambda: [torch.ones(0), torch.ones(0, 2), torch.ones(1)],
    "a complex one": lambda: [torch.ones(2, dtype=torch.complex64)],
}
OTHER: dict[str, Callable[[], list[torch.Tensor]]] = {
    "overlapping ones": overlapping,
    "a transposed one": lambda: [torch.ones(2, 3).t()],
    "a repeated element": lambda: [torch.ones(1).expand(3)],
    "a freed one": lambda: [torch.ones(2), freed()],
    "one without memory": lambda: [torch.ones(2, device="meta")],
    "one of no stored type": lambda: [torch.zeros(2, dtype=torch.complex32)],
    "a sparse one": lambda: [torch.ones(2).to_sparse()],
}


@pytest.mark.parametrize("build", [*PLAIN.values(), *OTHER.values()], ids=[*PLAIN, *OTHER])
def test_a_sight_tells_whether_tensors_are_plain_and_apart(build: Callable[[], list[torch.Tensor]]) -> None:
    tensors = build()
    is_plain = any(build is one for one in PLAIN.values())
    assert Sight.of(tensors).are_plain_and_apart() == is_plain
    assert (are_plainly_storable(tensors) and are_apart(tensors)) == is_plain
