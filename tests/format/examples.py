"""A small checkpoint's records as bytes, to be damaged by tests."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from safepoint.storage.memory import MemoryStorage
from tests import build

LIMIT = 1 << 20


@dataclass(frozen=True)
class Example:
    """Hold a generation with two tensors, one of them in two chunks."""

    storage: MemoryStorage
    generation: str

    @property
    def index_path(self) -> str:
        return f"generations/{self.generation}/rank-00000-of-00001.json"

    @property
    def manifest_path(self) -> str:
        return f"generations/{self.generation}/manifest.json"

    @property
    def index(self) -> bytes:
        return self.storage.read(self.index_path, limit_bytes=LIMIT)

    @property
    def manifest(self) -> bytes:
        return self.storage.read(self.manifest_path, limit_bytes=LIMIT)


def example(plain: Mapping[str, Any] | None = None) -> Example:
    """Return a run with one generation of step 7."""
    storage = MemoryStorage()
    chain = build.begin(storage)
    items = {"model": {"weight": build.floats(1.0, 2.0, 3.0, 4.0, rows=2), "count": build.integers(5)}}
    return Example(storage, build.write_generation(storage, 7, chain=chain, items=items, plain=plain))
