"""The specification is enough: a reader that knows nothing else finds what was written."""

from __future__ import annotations

import ast
import datetime
import json
import struct
from collections import OrderedDict
from pathlib import Path
from typing import Any

import pytest
import safetensors.numpy

from safepoint.format.plain import encode_plain
from safepoint.format.records import TombstoneRecord
from safepoint.storage.local import LocalStorage
from tests import build
from tests.format.sealing import sealed_tree, tree_of
from tests.played import branched, resumed
from tests.spec import reader

LIMIT = 1 << 20
LINES = 150


@pytest.fixture
def storage(tmp_path: Path) -> LocalStorage:
    return LocalStorage(tmp_path / "run")


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return tmp_path / "run"


def steps(root: Path) -> int:
    return reader.order(reader.read(root)[0])[0]


def test_the_reader_is_short_and_imports_nothing_of_the_package() -> None:
    source = Path(reader.__file__).read_text(encoding="utf-8")
    assert len(source.splitlines()) <= LINES
    imports = [node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Import | ast.ImportFrom)]
    names = {alias.name for node in imports if isinstance(node, ast.Import) for alias in node.names}
    names |= {str(node.module) for node in imports if isinstance(node, ast.ImportFrom)}
    assert {name.split(".")[0] for name in names} <= {
        "__future__",
        "base64",
        "collections",
        "json",
        "pathlib",
        "re",
        "safetensors",
        "typing",
        "xxhash",
    }


def test_it_finds_the_newest_live_checkpoint_with_every_byte(storage: LocalStorage, root: Path) -> None:
    branched(storage)
    name, manifest, tensors, plain = reader.read(root)
    assert name == "step-000000000200-i000002-0badcafe"
    assert manifest["progress"]["step"] == 200
    assert tensors == {
        "model/weight": [("float32", [4], [0], [4], struct.pack("<4f", 1, 2, 3, 4))],
        "model/bias": [("float32", [1], [0], [1], struct.pack("<f", 0.5))],
    }
    assert plain == {"model": None}


def test_it_reads_boxes_of_several_ranks_and_chunks_of_an_ancestor(storage: LocalStorage, root: Path) -> None:
    """Spec: C13.2"""
    chain = build.begin(storage)
    older = build.write_generation(storage, 10, chain=chain, items={"model": {"w": build.floats(1, 2, 3, 4, rows=2)}})
    tree = tree_of(storage.read(f"generations/{older}/rank-00000-of-00001.json", limit_bytes=LIMIT))
    entry = build.ObjectReference(**tree["objects"][0])
    begin = tree["header_bytes"]
    part = build.Values("float32", (4,), struct.pack("<4f", 1, 2, 7, 8), (6,), (0,), 2, {(0, 2): (entry, begin)})
    rest = build.Values("float32", (2,), struct.pack("<2f", 9, 10), (6,), (4,))
    newer = build.write_generation(storage, 20, chain=chain, ranks=[{"model": {"w": part}}, {"model": {"w": rest}}])
    name, _, tensors, _ = reader.read(root)
    assert name == newer
    assert tensors == {
        "model/w": [
            ("float32", [6], [0], [4], struct.pack("<4f", 1, 2, 7, 8)),
            ("float32", [6], [4], [2], struct.pack("<2f", 9, 10)),
        ]
    }
    build.flip(storage, f"generations/{older}/{entry.name}", begin)
    with pytest.raises(ValueError, match="can be used"):
        reader.read(root)


def test_it_falls_back_past_damage_and_passes_over_marks(storage: LocalStorage, root: Path) -> None:
    _, second = branched(storage)
    name = build.write_generation(storage, 210, chain=second)
    assert steps(root) == 210
    build.flip(storage, f"generations/{name}/rank-00000-of-00001.safetensors")
    assert steps(root) == 200
    mark = TombstoneRecord(1, build.RUN, "step-000000000200-i000002-0badcafe", 2, "old", "00")
    storage.put(f"generations/{mark.generation}/deleted.json", sealed_tree({**_fields(mark)}))
    assert steps(root) == 100
    storage.put(f"generations/{mark.generation}/pinned.json", b"whatever it says")
    assert steps(root) == 200, "a mark on what is pinned is void"
    storage.delete(f"generations/{mark.generation}/pinned.json")
    third = resumed(second, 3, mark.generation)
    build.write_incarnation(storage, 3, chain=third)
    assert steps(root) == 200, "a mark on what was resumed is void"
    storage.delete("incarnations/000003.resumed.json")
    storage.put("incarnations/000003.resumed.json", b"")
    with pytest.raises(ValueError, match=r"000003\.resumed\.json"):
        reader.read(root)


def test_it_reads_plain_values(storage: LocalStorage, root: Path) -> None:
    """Spec: F4.2"""
    values: dict[str, Any] = {
        "floats": [0.1, -0.0, float("inf"), 5e-324],
        "big": -(2**80),
        "text": "\udcff",
        "raw": b"\x00",
        "tuple": (1, (2,)),
        "set": {1, 2},
        "keys": {1: "a", (2, 3): "b"},
        "ordered": OrderedDict(b=1, a=2),
        "complex": complex(1, -2),
    }
    build.write_generation(storage, 1, chain=build.begin(storage), plain={"model": encode_plain(values)})
    found = reader.read(root)[3]["model"]
    assert found == values
    assert type(found["ordered"]) is OrderedDict
    assert str(found["floats"][1]) == "-0.0"
    assert reader.value(encode_plain([datetime.date(2025, 3, 1)])) == [("$date", "2025-03-01")]


def test_anyone_can_open_a_data_file_with_the_safetensors_package(storage: LocalStorage, root: Path) -> None:
    """The file was written by hand here; what the package writes is checked beside the golden files."""
    name = build.write_generation(storage, 1, chain=build.begin(storage))
    found = safetensors.numpy.load_file(root / "generations" / name / "rank-00000-of-00001.safetensors")
    assert {key: list(array) for key, array in found.items()} == {"model/weight": [1, 2, 3, 4], "model/bias": [0.5]}


def _fields(record: TombstoneRecord) -> dict[str, Any]:
    return {name: getattr(record, name) for name in record.__struct_fields__}


def test_it_says_when_a_newer_format_wrote_a_run(storage: LocalStorage, root: Path) -> None:
    """Spec: F1.2"""
    build.begin(storage)
    record = json.loads(storage.read("run.json", limit_bytes=LIMIT))
    del record["digest"]
    storage.put("run.json", sealed_tree(record | {"format": 2}))
    with pytest.raises(NotImplementedError, match="newer format"):
        reader.read(root)
