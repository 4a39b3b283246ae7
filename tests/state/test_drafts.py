"""A draft is made of what was seen, and anew where it cannot be known that the state is as before."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from safepoint.errors import InternalError
from safepoint.format.leaves import Open
from safepoint.state.draft import Draft
from safepoint.state.memo import Memo
from safepoint.state.modules import ModuleItem
from safepoint.state.sight import Sight


def test_a_state_of_unknown_kind_is_drafted_though_all_that_is_seen_is_as_before(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class Late(nn.Module):
        """A module whose class is given a state of its own when there are modules of it."""

    item = ModuleItem("late", Late())
    item.capture()

    monkeypatch.setattr(Late, "get_extra_state", lambda self: {"count": 5}, raising=False)
    monkeypatch.setattr(Late, "set_extra_state", lambda self, state: None, raising=False)

    assert b'"count":5' in item.capture().tree


@pytest.mark.parametrize("value", [2, torch.tensor(2)])
def test_a_draft_of_what_was_not_seen_is_a_fault_of_ours(value: object) -> None:
    seen = Sight.of([1, torch.tensor(1)])
    with pytest.raises(InternalError, match="not seen"):
        Memo("item", "plain").captured(seen, lambda: Draft([Open(0)], [value], [], []))
