"""What every test shares: one thread for torch, seeds that can be replayed, and the same examples in every run."""

from __future__ import annotations

import os
import random
from collections.abc import Iterator

# Read when torch is first imported, here and in every process a test starts. One thread keeps sums in one order, and
# keeps two test workers from fighting for two processors.
os.environ.setdefault("OMP_NUM_THREADS", "1")

import hypothesis
import pytest

from safepoint.joining.holder import Heartbeat
from tests.warm import WarmPython

SEED_VARIABLE = "SAFEPOINT_TEST_SEED"
DEFAULT_SEED = 20250301

hypothesis.settings.register_profile("fixed", derandomize=True, deadline=None, print_blob=True)
hypothesis.settings.register_profile("soak", max_examples=2000, deadline=None, print_blob=True)
hypothesis.settings.load_profile("fixed")


@pytest.fixture(scope="session")
def warm_python() -> Iterator[WarmPython]:
    """Return what runs scripts in processes that need not import torch; it starts with the first one."""
    with WarmPython() as python:
        yield python


@pytest.fixture(autouse=True)
def hearts_stop() -> Iterator[None]:
    """Stop the hearts of the holders that a test left without a close, as one does that plays a dead process.

    They would go on to open and close files while other tests count descriptors or let calls of the system fail.
    """
    beating: list[Heartbeat] = []
    run = Heartbeat._run

    def noted(heart: Heartbeat) -> None:
        beating.append(heart)
        run(heart)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Heartbeat, "_run", noted)
        yield
    for heart in beating:
        heart._stop.set()
        heart._thread.join(timeout=5)


@pytest.fixture
def seed(request: pytest.FixtureRequest) -> int:
    """Return the seed of a random test, and print it with the command that replays the test."""
    value = int(os.environ.get(SEED_VARIABLE, DEFAULT_SEED))
    print(f"replay: {SEED_VARIABLE}={value} python -m pytest '{request.node.nodeid}'")
    return value


@pytest.fixture
def chance(seed: int) -> random.Random:
    """Return a random stream of the test's own; the global streams stay as they are."""
    return random.Random(seed)
