"""What the tests of a group share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from safepoint.group.bell import Bell


@pytest.fixture
def bells() -> Iterator[list[Bell]]:
    """Bells that are closed in the end."""
    made: list[Bell] = []
    yield made
    for one in made:
        one.close()
