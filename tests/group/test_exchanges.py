"""Every group makes the same exchanges: one rank, ranks as threads, ranks over a store of torch's, with a bell too."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from safepoint.group.base import Group
from tests.group.boards import on_solo, on_store, on_store_with_bell, on_threads
from tests.group.exchanges import EXCHANGES

Runner = Callable[[Callable[[Group], Any]], list[Any]]


@pytest.mark.parametrize("exchange", EXCHANGES, ids=lambda exchange: exchange.__name__)
@pytest.mark.parametrize(
    "run", [on_solo, on_threads, on_store, on_store_with_bell], ids=["solo", "threads", "store", "bell"]
)
def test_every_rank_of_every_group(run: Runner, exchange: Callable[[Group], None]) -> None:
    run(exchange)
