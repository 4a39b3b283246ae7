"""Whatever a checkpoint says of the state of a model, an optimizer or any other object: a value or a typed error.

Every digest is right, as if somebody had made the checkpoint on purpose; the plain trees are changed.
"""

from __future__ import annotations

import contextlib
import random
from collections import Counter
from collections.abc import Sequence

import numpy
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import safepoint as sp
from safepoint.data import ResumableLoader
from safepoint.errors import InternalError, SafepointError
from safepoint.storage.memory import MemoryStorage
from tests.crash.damage import Files, files_of, storage_of
from tests.crash.hostile import Change, bounded, changes, with_state_change

COUNTS: Counter[str] = Counter()


def state() -> dict[str, object]:
    """Return one object of each kind that a state may hold."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.BatchNorm1d(3))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    model(torch.ones(2, 4)).sum().backward()
    optimizer.step()
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 3)
    return {
        "model": model,
        "optimizer": optimizer,
        "scheduler": scheduler,
        "data": ResumableLoader(list(range(20)), 4, seed=1),
        "generator": torch.Generator(),
        "numbers": numpy.random.default_rng(1),
        "random": random.Random(3),
        "notes": {"a": (1, 2.5), "b": [torch.ones(2), {3: "x"}], "c": {torch.float32}},
    }


def saved() -> tuple[Files, str]:
    """Return the files of a run with one checkpoint, and the path of its index."""
    storage = MemoryStorage()
    with sp.CheckpointManager("memory://run", state(), storage=storage) as manager:
        manager.restore()
        manager.after_update()
        manager.save().wait()
    files = files_of(storage)
    (index,) = (path for path in files if path.endswith("of-00001.json"))
    return files, index


RUN, INDEX = saved()


@given(st.integers(0, 100), changes)
def changed_states(item: int, steps: Sequence[Change]) -> None:
    storage = storage_of(with_state_change(RUN, INDEX, item, steps))
    contract = sp.Contract("approximate", permit={"optimizer.lr", "scheduler", "dataset"})
    manager = sp.CheckpointManager("memory://run", state(), storage=storage, contract=contract, signals=None)
    try:
        with bounded():
            manager.restore()
        COUNTS["restored"] += 1
    except SafepointError as exc:
        # What is other when it is read back is refused as if the fault were ours: here nobody saved it so.
        assert not isinstance(exc, InternalError) or exc.message.startswith("a restored item"), exc
        assert len(str(exc)) < 20_000, "a message repeats a hostile text at length"
        COUNTS[type(exc).__name__] += 1
    finally:
        with contextlib.suppress(SafepointError):
            manager.close()


def fuzz(examples: int) -> None:
    COUNTS.clear()
    settings(max_examples=examples, suppress_health_check=list(HealthCheck), deadline=None)(changed_states)()
    print("counted:", dict(sorted(COUNTS.items())))


def test_any_state_is_restored_or_refused_by_a_typed_error() -> None:
    """Spec: F2.7, C11.4"""
    fuzz(12)


@pytest.mark.soak
def test_any_state_is_restored_or_refused_by_a_typed_error_for_long() -> None:
    """Spec: F2.7, C11.4"""
    fuzz(3000)
