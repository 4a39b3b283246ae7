"""What a manager compares of its environment comes from its own reader of variables."""

from __future__ import annotations

from pathlib import Path

import pytest

import safepoint as sp
from safepoint import conditions
from safepoint.testing.ambient import FakeAmbient, FakeWorld


def test_the_workspace_of_cublas_is_asked_of_the_managers_ambient(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only a machine with CUDA tells it in the manifest, so what is handed to the description is looked at."""
    asked: list[str | None] = []

    def describe(objects: object, *, workspace: str | None, **others: object) -> dict[str, str]:
        asked.append(workspace)
        return {}

    monkeypatch.setattr(conditions, "describe", describe)
    ambient = FakeAmbient(FakeWorld(), pid=1, variables={"CUBLAS_WORKSPACE_CONFIG": ":4096:8"})
    with sp.CheckpointManager(tmp_path, {"note": {"value": 1}}, ambient=ambient) as manager:
        manager.save()
    assert set(asked) == {":4096:8"}
