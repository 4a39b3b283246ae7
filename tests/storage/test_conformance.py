"""The public conformance suite, run on each storage of this project."""

from __future__ import annotations

from pathlib import Path

import pytest

from safepoint.faults.disk import SimulatedDisk
from safepoint.faults.script import FaultScript
from safepoint.faults.storage import FaultyStorage
from safepoint.storage.local import LocalStorage
from safepoint.storage.memory import MemoryStorage
from safepoint.testing.storage import StorageConformance


class TestMemoryStorage(StorageConformance):
    def make_storage(self) -> MemoryStorage:
        return MemoryStorage()


class TestLocalStorage(StorageConformance):
    @pytest.fixture(autouse=True)
    def _keep_folder(self, tmp_path: Path) -> None:
        self._folder = tmp_path

    def make_storage(self) -> LocalStorage:
        return LocalStorage(self._folder / "above" / "run")


class TestSimulatedDisk(StorageConformance):
    def make_storage(self) -> SimulatedDisk:
        return SimulatedDisk()


class TestFaultyStorageWithoutFaults(StorageConformance):
    def make_storage(self) -> FaultyStorage:
        return FaultyStorage(MemoryStorage(), FaultScript())
