"""A run to retain in."""

from __future__ import annotations

import pytest

from safepoint.storage.memory import MemoryStorage
from tests.build import begin


@pytest.fixture
def storage() -> MemoryStorage:
    """Return a run of one start that has saved nothing."""
    storage = MemoryStorage()
    begin(storage)
    return storage
