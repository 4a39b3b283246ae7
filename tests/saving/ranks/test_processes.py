"""Ranks in processes of their own, over gloo, with the manager: what each stores, and what all are told."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from safepoint.format.index import Index
from safepoint.format.manifest import Manifest
from safepoint.storage.local import LocalStorage
from tests.saving.ranks.job import indexes, manifests
from tests.warm import WarmPython

WORKER = Path(__file__).with_name("worker.py")
RANKS = 2


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory, warm_python: WarmPython) -> tuple[Path, dict[int, dict[str, Any]]]:
    """Run the job once; return its folder and what each rank said."""
    folder = tmp_path_factory.mktemp("ranks")
    ranks = warm_python.run_ranks(WORKER, folder, count=RANKS, logs=folder)
    assert not any(one.returncode for one in ranks), ranks
    return folder, {rank: dict(map(json.loads, one.output.splitlines())) for rank, one in enumerate(ranks)}


def stored(folder: Path) -> tuple[Manifest, list[Index]]:
    storage = LocalStorage(folder)
    newest = manifests(storage)[0]
    return newest, indexes(storage, newest)


def test_replicas_are_written_once_and_evenly_and_what_differs_by_each_rank(run: tuple[Path, Any]) -> None:
    """Spec: C2.1, F7.6"""
    manifest, found = stored(run[0] / "replicated")
    assert {name: item.kind for name, item in manifest.items.items()} == {
        "model": "replicated",
        "optimizer": "replicated",
        "generator": "per_rank",
        "rng": "per_rank",
        "notes": "global",
    }
    divided = [
        sum(chunk.size_bytes for t in index.tensors if t.item in ("model", "optimizer") for chunk in t.chunks)
        for index in found
    ]
    assert max(divided) <= 1.1 * sum(divided) / RANKS
    assert [{"rng", "generator"} <= index.items.keys() for index in found] == [True, True]
    assert found[0].items["generator"] != found[1].items["generator"]
    assert [sorted(index.items.keys() - {"rng", "generator"}) for index in found] == [
        ["model", "notes", "optimizer"],
        [],
    ]
    parameters = 64 * 64 + 64 + 2 * 64 + 64 + 1
    assert manifest.items["optimizer"].size_bytes == 2 * 4 * parameters
    assert manifest.items["model"].size_bytes == 4 * (parameters + 2 * 64)


def test_buffers_are_the_lowest_rank_s_and_all_else_is_compared(run: tuple[Path, Any]) -> None:
    """Spec: C5.4"""
    manifest, found = stored(run[0] / "replicated")
    assert manifest.agreement.endswith("equal, but for buffers, of which the lowest rank's are stored")
    assert "compare" in manifest.timings_s
    running = [(t.name, index.rank) for index in found for t in index.tensors if "running" in t.name]
    assert [rank for _, rank in running] == [0, 0]


def test_every_rank_hears_the_same_result_and_the_same_error(run: tuple[Path, Any]) -> None:
    """Spec: C7.1, C5.4"""
    storage, said = LocalStorage(run[0] / "replicated"), run[1]
    assert [one.step for one in manifests(storage)] == [4, 3, 2]
    assert said[0]["result"] == said[1]["result"]
    assert said[0]["result"][0] == manifests(storage)[1].generation
    assert said[0]["difference"] == said[1]["difference"]
    assert said[0]["owed"] == said[0]["difference"], "a background save's failure is owed to the next call as well"
    name, text = said[0]["difference"]
    assert name == "AbortedError"
    assert "model/" in text and "weight" in text and "rank 0 unlike rank 1" in text
    assert len(storage.list("generations")) == 3


def test_a_divided_model_is_written_by_those_who_hold_it(run: tuple[Path, Any]) -> None:
    """Spec: C2.1, C5.1"""
    manifest, found = stored(run[0] / "sharded")
    assert {name: manifest.items[name].kind for name in ("model", "optimizer")} == {
        "model": "sharded",
        "optimizer": "sharded",
    }
    first = [t for index in found for t in index.tensors if t.item == "model" and t.global_shape == (65, 64)]
    assert [(t.offset, t.shape) for t in first] == [((0, 0), (33, 64)), ((33, 0), (32, 64))]


def test_a_divided_base_that_does_not_change_is_referred_to(run: tuple[Path, Any]) -> None:
    """Spec: C13.3"""
    manifest, _ = stored(run[0] / "sharded")
    assert len(manifest.ancestors) == 1
    for rank in range(RANKS):
        assert run[1][rank]["sharded"] == [2, 4 * (65 * 64 + 65)]
        assert run[1][rank]["restored"] == [2, True]


def test_folders_that_are_not_shared_are_named_at_the_start(run: tuple[Path, Any]) -> None:
    """Spec: C1.9"""
    for rank in range(RANKS):
        name, text = run[1][rank]["apart"]
        assert name == "RequestError"
        assert "rank 1 sees no incarnations/000001.json" in text
