"""Checkpoints written by each version of the format are still read: by the specification alone, and by the package.

The golden folders were written by ``python -m tests.golden.make``; ``expected.json`` was taken from the live objects.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import msgspec
import pytest
import safetensors.torch
import torch
import xxhash

from safepoint.catalog import GenerationState, examine_all, read_lineage
from safepoint.contract import Contract
from safepoint.manager import CheckpointManager
from safepoint.restoring.outcome import RestoreReport
from safepoint.storage.local import LocalStorage
from safepoint.testing.ambient import FakeAmbient, FakeWorld
from tests.format.plain_values import fingerprint
from tests.golden import programs
from tests.golden.make import described
from tests.spec import reader

VERSIONS = sorted(path for path in (Path(__file__).parents[1] / "golden").iterdir() if path.name.startswith("v"))
version = pytest.mark.parametrize("version", VERSIONS, ids=lambda path: path.name)
every_run = pytest.mark.parametrize(
    "folder",
    [run for path in VERSIONS for run in sorted(path.iterdir())],
    ids=lambda path: f"{path.parent.name}-{path.name}",
)


def expected(folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((folder / "expected.json").read_text(encoding="utf-8"))
    return found


def restored(folder: Path, items: dict[str, Any], tmp_path: Path) -> RestoreReport:
    """Restore a copy: joining a run writes into it."""
    shutil.copytree(folder / "run", tmp_path / "run")
    ambient = FakeAmbient(FakeWorld(2_000_000_000.0), pid=99)
    with CheckpointManager(tmp_path / "run", items, contract=Contract("approximate"), ambient=ambient) as manager:
        return manager.restore()


def data_files(folder: Path) -> list[Path]:
    return sorted((folder / "run" / "generations").glob("*/*.safetensors"))


def test_a_golden_folder_is_small() -> None:
    for path in VERSIONS:
        assert sum(file.stat().st_size for file in path.rglob("*") if file.is_file()) < 300_000
    assert VERSIONS


@every_run
def test_the_independent_reader_finds_what_was_saved(folder: Path) -> None:
    """Spec: F3.4, F7.4"""
    name, manifest, tensors, plain = reader.read(folder / "run")
    wanted = expected(folder)
    assert reader.order(name)[0] == manifest["step"] == wanted["step"]
    for key, (dtype, shape, data) in wanted.get("tensors", {}).items():
        # Tied weights are stored once, under the first of their names.
        if key != "model/head.weight":
            assert tensors[key] == [(dtype, shape, [0] * len(shape), shape, bytes.fromhex(data))], key
    moments = sorted(box[4].hex() for key, (box,) in tensors.items() if key.startswith("optimizer/"))
    assert moments == wanted.get("moments", [])
    assert plain.get("state", {"state": {}})["state"].get("visited") == wanted.get("visited")


@every_run
def test_a_data_file_is_a_safetensors_file_on_a_page_boundary_in_falling_item_size(folder: Path) -> None:
    """Spec: F3.1, F3.2, F3.3"""
    for path in data_files(folder):
        data = path.read_bytes()
        length = int.from_bytes(data[:8], "little")
        header = json.loads(data[8 : 8 + length])
        assert (8 + length) % 4096 == 0
        assert data[8 : 8 + length].rstrip(b" ").endswith(b"}")
        index = json.loads(path.with_suffix(".json").read_text(encoding="utf-8"))
        entries = [(key, *entry["data_offsets"]) for key, entry in header.items() if key != "__metadata__"]
        assert [f"{tensor['item']}/{tensor['name']}" for tensor in index["tensors"]] == [key for key, _, _ in entries]
        ends = [0, *(end for _, _, end in entries)]
        assert [start for _, start, _ in entries] == ends[:-1] and ends[-1] == len(data) - 8 - length
        sizes = [torch.empty(0, dtype=getattr(torch, tensor["dtype"])).element_size() for tensor in index["tensors"]]
        assert sizes == sorted(sizes, reverse=True)
        assert set(safetensors.torch.load_file(path)) == {key for key, _, _ in entries}


@every_run
def test_an_item_s_digest_follows_from_its_tree_and_its_chunks(folder: Path) -> None:
    """Spec: F7.3"""
    for path in data_files(folder):
        index = json.loads(path.with_suffix(".json").read_text(encoding="utf-8"))
        manifest = json.loads((path.parent / "manifest.json").read_text(encoding="utf-8"))
        for name, item in index["items"].items():
            own = sorted((t for t in index["tensors"] if t["item"] == name), key=lambda tensor: tensor["name"])
            rows = [[t["name"], t["dtype"], t["shape"], [chunk["digest"] for chunk in t["chunks"]]] for t in own]
            lines = [item["type"].encode(), msgspec.json.encode(item["plain"]), *map(msgspec.json.encode, rows)]
            assert manifest["items"][name]["digest"] == xxhash.xxh3_128_hexdigest(b"\n".join(lines))


@version
def test_a_training_loop_gets_its_weights_moments_and_streams_back(version: Path, tmp_path: Path) -> None:
    items, wanted = programs.training(), expected(version / "training")
    with torch.no_grad():
        for parameter in items["model"].parameters():
            parameter.fill_(9)
    report = restored(version / "training", items, tmp_path)
    assert report.step == wanted["step"]
    state = items["model"].state_dict()
    for key, (dtype, shape, data) in wanted["tensors"].items():
        assert described(state[key.removeprefix("model/")]) == (dtype, shape, data), key
    assert items["model"].head.weight is items["model"].embed.weight
    moments = [slot for entry in items["optimizer"].state.values() for slot in entry.values() if slot.dim()]
    assert sorted(described(slot)[2] for slot in moments) == wanted["moments"]
    assert items["optimizer"].param_groups[0]["lr"] == wanted["lr"]
    assert torch.rand(2, generator=items["noise"]).tolist() == wanted["next"]
    assert items["data"].position == wanted["step"]


@version
def test_values_of_every_kind_come_back(version: Path, tmp_path: Path) -> None:
    """Spec: F4.2"""
    wanted = programs.values()["values"]
    items: dict[str, Any] = {"values": {}}
    report = restored(version / "values", items, tmp_path)
    found = items["values"]
    assert report.step == 0 and report.generation is not None
    assert list(found) == list(wanted)
    assert fingerprint(found["plain"]) == fingerprint(wanted["plain"])
    for name, value in wanted.items():
        if isinstance(value, torch.Tensor):
            assert described(found[name]) == described(value), name
            assert found[name].stride() == value.stride(), name
    assert found["alias"][0] is found["alias"][1]
    found["alias"][0][2] = 77
    assert found["alias"][2].tolist() == [77, 3]


@version
def test_a_run_that_branched_goes_on_from_its_branch(version: Path, tmp_path: Path) -> None:
    """Spec: C9.3"""
    folder = version / "branched"
    storage = LocalStorage(folder / "run")
    wanted = expected(folder)
    found = examine_all(storage, read_lineage(storage))
    for state, key in ((GenerationState.COMMITTED, "live"), (GenerationState.SUPERSEDED, "superseded")):
        assert [[g.name.step, g.name.incarnation] for g in found if g.state is state] == wanted[key]
    items = programs.counter()
    assert restored(folder, items, tmp_path).step == wanted["step"]
    assert items["state"]["visited"] == wanted["visited"]
    assert items["state"]["weight"].tolist() == [float(sum(wanted["visited"]))] * 2
