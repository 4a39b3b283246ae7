"""Which generations are committed: marks, lost and damaged files, newer formats, a storage that fails."""

from __future__ import annotations

import itertools

import msgspec
import pytest

from safepoint.catalog import GenerationState, examine_all, read_lineage
from safepoint.errors import FormatVersionError, StorageError
from safepoint.format.encoding import seal
from safepoint.format.records import RunRecord, TombstoneRecord
from safepoint.storage.memory import MemoryStorage
from tests import build
from tests.format.sealing import sealed_tree, tree_of
from tests.played import GENERATION_50, GENERATION_100, branched, damaged_files, live, steps, the


@pytest.fixture
def storage() -> MemoryStorage:
    return MemoryStorage()


def tombstone(storage: MemoryStorage, generation: str, incarnation: int, *, run: str = build.RUN, of: str = "") -> None:
    record = TombstoneRecord(1, run, of or generation, incarnation, "no rule keeps it", "00")
    storage.put(f"generations/{generation}/deleted.json", seal(record))


def test_a_valid_tombstone_deletes_whatever_is_left_of_a_generation(storage: MemoryStorage) -> None:
    """Spec: C8.1, C12.3"""
    branched(storage)
    tombstone(storage, GENERATION_50, 2)
    for file in ("", "rank-00000-of-00001.safetensors", "rank-00000-of-00001.json", "manifest.json"):
        if file:
            storage.delete(f"generations/{GENERATION_50}/{file}")
        assert the(storage, GENERATION_50).state is GenerationState.DELETED
        assert live(storage) == [200, 100]


@pytest.mark.parametrize(
    ("generation", "incarnation", "run", "of"),
    [
        (GENERATION_100, 2, build.RUN, ""),
        (GENERATION_50, 3, build.RUN, ""),
        (GENERATION_50, 2, "ffff", ""),
        (GENERATION_50, 2, build.RUN, GENERATION_100),
    ],
    ids=["on what was resumed", "by one off the lineage", "of another run", "of another generation"],
)
def test_a_void_tombstone_is_passed_over(
    storage: MemoryStorage, generation: str, incarnation: int, run: str, of: str
) -> None:
    """Spec: C12.3"""
    branched(storage)
    build.write_incarnation(storage, 3)
    tombstone(storage, generation, incarnation, run=run, of=of)
    assert live(storage) == [200, 100, 50]


def test_a_damaged_tombstone_is_void(storage: MemoryStorage) -> None:
    """Spec: C12.3"""
    branched(storage)
    tombstone(storage, GENERATION_50, 2)
    build.flip(storage, f"generations/{GENERATION_50}/deleted.json")
    assert live(storage) == [200, 100, 50]


FILES = ("rank-00000-of-00001.safetensors", "rank-00000-of-00001.json", "manifest.json")
DAMAGES = ("missing", "empty", "longer")


@pytest.mark.parametrize(("file", "how"), list(itertools.product(FILES, DAMAGES)))
def test_a_generation_with_a_lost_or_resized_file_is_not_committed(storage: MemoryStorage, file: str, how: str) -> None:
    """Spec: C8.1"""
    branched(storage)
    path = f"generations/{GENERATION_100}/{file}"
    data = storage.read(path, limit_bytes=1 << 20)
    storage.delete(path)
    if how != "missing":
        storage.put(path, b"" if how == "empty" else data + b" ")
    found = the(storage, GENERATION_100)
    assert live(storage) == [200, 50]
    assert found.refusal is not None and found.refusal.file == file
    assert found.state is (
        GenerationState.ABANDONED if (file, how) == ("manifest.json", "missing") else GenerationState.DAMAGED
    )


def test_a_generation_whose_ancestor_s_object_is_gone_is_damaged(storage: MemoryStorage) -> None:
    """Spec: C8.1, C13.2"""
    chain = build.begin(storage)
    older = build.write_generation(storage, 10, chain=chain)
    newer = build.write_generation(storage, 20, chain=chain)
    path = f"generations/{newer}/manifest.json"
    tree = tree_of(storage.read(path, limit_bytes=1 << 20))
    borrowed = tree_of(storage.read(f"generations/{older}/manifest.json", limit_bytes=1 << 20))["objects"][0]
    storage.put(path, sealed_tree(tree | {"objects": [*tree["objects"], borrowed]}))
    assert live(storage) == [20, 10]
    storage.delete(f"generations/{older}/{borrowed['name']}")
    refusal = the(storage, newer).refusal
    assert refusal is not None and refusal.file == f"{older}/{borrowed['name']}"
    assert live(storage) == []


def test_an_ancestor_need_not_be_committed_any_more(storage: MemoryStorage) -> None:
    chain = build.begin(storage)
    older = build.write_generation(storage, 10, chain=chain)
    newer = build.write_generation(storage, 20, chain=chain)
    path = f"generations/{newer}/manifest.json"
    borrowed = tree_of(storage.read(f"generations/{older}/manifest.json", limit_bytes=1 << 20))["objects"][0]
    tree = tree_of(storage.read(path, limit_bytes=1 << 20))
    storage.put(path, sealed_tree(tree | {"objects": [*tree["objects"], borrowed]}))
    storage.delete(f"generations/{older}/manifest.json")
    assert live(storage) == [20]


def test_an_exchanged_manifest_is_damage(storage: MemoryStorage) -> None:
    """Spec: F6.3"""
    branched(storage)
    paths = [f"generations/{name}/manifest.json" for name in (GENERATION_50, GENERATION_100)]
    one, two = (storage.read(path, limit_bytes=1 << 20) for path in paths)
    storage.put(paths[0], two)
    storage.put(paths[1], one)
    assert live(storage) == [200]
    assert steps(storage, GenerationState.DAMAGED) == [100, 50]


def test_an_object_larger_than_its_kind_may_be_is_not_read(storage: MemoryStorage) -> None:
    """Spec: F2.5"""
    branched(storage)
    padding = b" " * (1 << 20)
    path = "incarnations/000002.resumed.json"
    storage.put(path, storage.read(path, limit_bytes=1 << 20) + padding)
    assert path in damaged_files(storage)
    (reason,) = (entry.reason for entry in read_lineage(storage).damage if entry.file == path)
    assert "larger than its kind may be" in reason


def test_a_newer_format_stops_the_reader_and_is_shown_in_a_list(storage: MemoryStorage) -> None:
    """Spec: F1.2"""
    branched(storage)
    path = f"generations/{GENERATION_100}/manifest.json"
    tree = tree_of(storage.read(path, limit_bytes=1 << 20))
    storage.put(path, sealed_tree(tree | {"format": 2, "stripes": 4}))
    with pytest.raises(FormatVersionError):
        the(storage, GENERATION_100)
    (shown,) = [found for found in examine_all(storage, read_lineage(storage)) if found.name.step == 100]
    assert shown.state is GenerationState.DAMAGED
    assert shown.refusal is not None and "newer format" in shown.refusal.reason
    newer = msgspec.structs.replace(RunRecord(1, (), build.RUN, "", "00"), flags=("striped",))
    storage.put("run.json", seal(newer))
    with pytest.raises(FormatVersionError):
        read_lineage(storage)


class Broken(MemoryStorage):
    """Answer like a storage whose device fails for one path."""

    failing = ""

    def read(self, path: str, *, limit_bytes: int) -> bytes:
        if path == self.failing:
            raise StorageError("could not read: the device failed", where=path)
        return super().read(path, limit_bytes=limit_bytes)


@pytest.mark.parametrize(
    "path", ["run.json", "incarnations/000002.resumed.json", f"generations/{GENERATION_100}/manifest.json"]
)
def test_a_storage_that_cannot_answer_is_not_an_absent_checkpoint(path: str) -> None:
    """Spec: C8.5"""
    storage = Broken()
    branched(storage)
    storage.failing = path
    with pytest.raises(StorageError, match="the device failed"):
        examine_all(storage, read_lineage(storage))
