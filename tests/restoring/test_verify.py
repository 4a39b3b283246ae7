"""Every byte that a manifest names is read, and whatever contradicts its digest is named."""

from __future__ import annotations

import json
import os
import random
from collections.abc import Callable
from pathlib import Path

import pytest

from safepoint.ambient import SystemAmbient
from safepoint.catalog import examine_all, read_lineage
from safepoint.errors import CorruptionError, StorageError
from safepoint.format.digest import digest_bytes, digest_file
from safepoint.format.encoding import seal, unseal
from safepoint.format.index import Index, ObjectReference
from safepoint.format.manifest import Manifest
from safepoint.format.names import generation_path
from safepoint.format.records import LineageLink
from safepoint.notes import read_verified
from safepoint.restoring import reread as rereading
from safepoint.restoring.header import check_header
from safepoint.restoring.verify import Verification, note_verified, verify_generation
from safepoint.storage import local_direct, local_reads
from safepoint.storage.base import Storage
from safepoint.storage.local import LocalStorage
from safepoint.storage.memory import MemoryStorage
from tests.build import MODEL, RUN, Values, begin, flip, floats, integers, write_generation

CHAIN = (LineageLink(1, None, 0),)
DATA = "rank-00000-of-00001.safetensors"
INDEX = "rank-00000-of-00001.json"
LIMIT = 1 << 30
ITEMS = {"model": {"weight": floats(*range(12), rows=5), "bias": floats(0.5)}, "optimizer": {"count": integers(1, 2)}}


@pytest.fixture
def storage() -> MemoryStorage:
    storage = MemoryStorage()
    begin(storage)
    return storage


def verify(storage: Storage, name: str) -> Verification:
    (found,) = [entry for entry in examine_all(storage, read_lineage(storage)) if entry.text == name]
    return verify_generation(storage, found)


def said(verification: Verification) -> str:
    return "\n".join(map(str, verification.findings))


def test_a_sound_checkpoint_holds_and_every_byte_of_its_objects_is_read(storage: MemoryStorage) -> None:
    name = write_generation(storage, 7, chain=CHAIN, items=ITEMS)
    found = verify(storage, name)
    assert found.holds
    assert found.objects == 2
    assert found.bytes_read == sum(storage.size(generation_path(name, file)) for file in (DATA, INDEX))


def test_each_flipped_byte_of_each_object_is_found(storage: MemoryStorage, chance: random.Random) -> None:
    name = write_generation(storage, 7, chain=CHAIN, items=ITEMS)
    for file in (DATA, INDEX, "manifest.json"):
        path = generation_path(name, file)
        whole = storage.read(path, limit_bytes=LIMIT)
        for offset in chance.sample(range(len(whole)), 40):
            flip(storage, path, offset)
            found = verify(storage, name)
            assert [finding for finding in found.findings if finding.file.endswith(file)], (file, offset)
            storage.put(path, whole)
    assert verify(storage, name).holds


def test_a_damaged_chunk_is_named_by_tensor_rows_and_both_digests(storage: MemoryStorage) -> None:
    name = write_generation(storage, 7, chain=CHAIN, items=ITEMS)
    path = generation_path(name, DATA)
    # The counts (2 × 8 bytes) lie first, then the bias, then the weight's rows of 4 bytes: row 6 is in rows 5 to 10.
    offset = 4096 + 16 + 4 + 6 * 4
    whole = storage.read(path, limit_bytes=LIMIT)
    flip(storage, path, offset)
    (finding,) = verify(storage, name).findings
    assert (finding.file, finding.tensor, finding.rows) == (DATA, "model/weight", (5, 10))
    assert finding.expected == digest_bytes(whole[offset - 4 : offset + 16])
    assert finding.found == digest_bytes(storage.read(path, limit_bytes=LIMIT)[offset - 4 : offset + 16])


def test_all_damage_is_told_at_once(storage: MemoryStorage) -> None:
    name = write_generation(storage, 7, chain=CHAIN, items=ITEMS)
    for offset in (100, 4096, 4096 + 17, -1):
        flip(storage, generation_path(name, DATA), offset)
    assert {finding.tensor for finding in verify(storage, name).findings} == {
        "",
        "optimizer/count",
        "model/bias",
        "model/weight",
    }


def test_a_truncated_file_names_its_size_and_the_tensors_that_are_lost(storage: MemoryStorage) -> None:
    name = write_generation(storage, 7, chain=CHAIN, items=ITEMS)
    path = generation_path(name, DATA)
    whole = storage.read(path, limit_bytes=LIMIT)
    storage.put(path, whole[:-3])
    size, lost = verify(storage, name).findings
    assert (size.expected, size.found) == (f"{len(whole)} bytes", f"{len(whole) - 3} bytes")
    assert (lost.tensor, lost.rows) == ("model/weight", (10, 12))


@pytest.mark.parametrize("file", [DATA, INDEX])
def test_a_missing_file_is_named(storage: MemoryStorage, file: str) -> None:
    name = write_generation(storage, 7, chain=CHAIN)
    storage.delete(generation_path(name, file))
    assert f"{file}: the file is missing" in said(verify(storage, name))


def test_files_of_two_generations_that_were_swapped_are_found(storage: MemoryStorage) -> None:
    one = write_generation(storage, 1, chain=CHAIN)
    two = write_generation(
        storage, 2, chain=CHAIN, items={"model": {"weight": floats(9.0, 8.0, 7.0, 6.0), "bias": floats(1.0)}}
    )
    for file in (DATA, INDEX):
        paths = generation_path(one, file), generation_path(two, file)
        first, second = (storage.read(path, limit_bytes=LIMIT) for path in paths)
        storage.put(paths[0], second)
        storage.put(paths[1], first)
        assert not verify(storage, one).holds
        assert not verify(storage, two).holds
        storage.put(paths[0], first)
        storage.put(paths[1], second)


def test_a_chunk_of_an_ancestor_is_read_where_it_lies(storage: MemoryStorage) -> None:
    base = write_generation(storage, 1, chain=CHAIN, items={"model": {"frozen": floats(1.0, 2.0)}})
    path = generation_path(base, DATA)
    header = storage.read(path, limit_bytes=LIMIT)[:4096]
    digest = digest_file(digest_bytes(header), [digest_bytes(floats(1.0, 2.0).data)])
    reference = ObjectReference(base, DATA, storage.size(path), digest)
    frozen = Values("float32", (2,), floats(1.0, 2.0).data, borrowed={(0, 2): (reference, 4096)})
    name = write_generation(storage, 2, chain=CHAIN, items={"model": {"frozen": frozen, "bias": floats(3.0)}})
    assert verify(storage, name).holds
    flip(storage, path)
    (finding,) = verify(storage, name).findings
    assert finding.tensor == "model/frozen"
    storage.delete(path)
    assert f"{base}/{DATA}: the file is missing" in said(verify(storage, name))


def test_memory_is_bounded_by_the_buffer_and_progress_reaches_the_whole(
    storage: MemoryStorage, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rereading, "BUFFER_BYTES", 1000)
    write_generation(storage, 1, chain=CHAIN, items={"model": {"w": integers(*range(1000))}})
    longest = 0
    read_into = storage.read_into

    def watched(path: str, offset_bytes: int, buffer: memoryview) -> None:
        nonlocal longest
        longest = max(longest, len(buffer))
        read_into(path, offset_bytes, buffer)

    monkeypatch.setattr(storage, "read_into", watched)
    calls: list[tuple[int, int]] = []
    (found,) = examine_all(storage, read_lineage(storage))
    report = verify_generation(storage, found, on_progress=lambda done, total: calls.append((done, total)))
    assert report.holds
    assert longest <= 4096, "the header is read whole, the tensor of 8,000 bytes is not"
    assert calls == sorted(calls)
    assert calls[-1] == (report.bytes_read, report.bytes_read)


@pytest.mark.parametrize("offers_direct", [True, False])
def test_all_that_a_manifest_names_is_read_past_the_cache(
    offers_direct: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Spec: C8.4"""
    local = LocalStorage(tmp_path)
    begin(local)
    name = write_generation(local, 7, chain=CHAIN, items=ITEMS)
    passed, given_up = [], []

    def pass_cache(descriptor: int, *, is_on: bool) -> bool:
        passed.append(os.path.basename(os.readlink(f"/proc/self/fd/{descriptor}")))
        return offers_direct and local_direct.pass_cache(descriptor, is_on=is_on)

    monkeypatch.setattr(local_reads, "pass_cache", pass_cache)
    monkeypatch.setattr(os, "posix_fadvise", lambda descriptor, *range_and_advice: given_up.append(range_and_advice))
    found = verify(local, name)
    assert found.holds and set(passed) == {DATA, INDEX}
    data = local.size(generation_path(name, DATA))
    index = local.size(generation_path(name, INDEX))
    expected = [] if offers_direct else [(0, data, os.POSIX_FADV_DONTNEED), (0, index, os.POSIX_FADV_DONTNEED)]
    assert sorted(given_up) == sorted(expected)


def test_files_are_verified_by_several_threads_as_any_other_storage_is(tmp_path: Path, chance: random.Random) -> None:
    items = {"model": {f"w{number}": floats(*range(number * 50), rows=30) for number in range(1, 12)}}
    local, other = LocalStorage(tmp_path), MemoryStorage()
    for one in (local, other):
        begin(one)
        name = write_generation(one, 7, chain=CHAIN, items=items)
    path = generation_path(name, DATA)
    for _ in range(4):
        place = chance.randrange(4096, other.size(path))
        for one in (local, other):
            flip(one, path, place)
    assert said(verify(local, name)) == said(verify(other, name)) != ""


def test_a_tensor_of_which_one_rank_has_stored_no_part_is_found(storage: MemoryStorage) -> None:
    def box(start: int) -> dict[str, dict[str, Values]]:
        return {"model": {"w": Values("float32", (2,), floats(1.0, 2.0).data, global_shape=(6,), offset=(start,))}}

    kinds = {"model": "sharded"}
    whole = write_generation(storage, 1, chain=CHAIN, ranks=[box(0), box(2), box(4)], kinds=kinds)
    gap = write_generation(storage, 2, chain=CHAIN, ranks=[box(0), box(4)], kinds=kinds)
    twice = write_generation(storage, 3, chain=CHAIN, ranks=[box(0), box(2), box(2), box(4)], kinds=kinds)
    assert verify(storage, whole).holds
    assert "gap" in said(verify(storage, gap))
    assert "overlap" in said(verify(storage, twice))


def test_per_rank_items_are_whole_on_each_rank(storage: MemoryStorage) -> None:
    ranks = [{"rng": {"state": integers(rank)}} for rank in range(2)]
    name = write_generation(storage, 1, chain=CHAIN, ranks=ranks, kinds={"rng": "per_rank"})
    assert verify(storage, name).holds


def test_an_item_of_a_rank_that_the_manifest_says_had_none_is_found(storage: MemoryStorage) -> None:
    """What a restore refuses does not hold.

    Spec: F7.7
    """
    ranks = [{"rng": {"state": integers(rank)}} for rank in range(2)]
    name = write_generation(storage, 1, chain=CHAIN, ranks=ranks, kinds={"rng": "per_rank"}, holders={"rng": (0,)})
    (finding,) = verify(storage, name).findings
    assert finding.file == "rank-00001-of-00002.json" and "is none of this rank's" in finding.found


def test_a_rank_whose_index_the_manifest_does_not_name_is_found(storage: MemoryStorage) -> None:
    name = write_generation(storage, 1, chain=CHAIN, ranks=[MODEL, {"model": {}}])
    path = generation_path(name, "manifest.json")
    manifest = unseal(storage.read(path, limit_bytes=LIMIT), Manifest, where=path)
    objects = tuple(entry for entry in manifest.objects if "00001-of" not in entry.name)
    storage.put(path, seal(_replace(manifest, objects=objects)))
    assert "not every rank has an index" in said(verify(storage, name))


def test_an_item_that_was_exchanged_with_its_index_is_found(storage: MemoryStorage) -> None:
    """The files agree with each other, but not with what the manifest says of the item."""
    name = write_generation(storage, 1, chain=CHAIN)
    path = generation_path(name, "manifest.json")
    manifest = unseal(storage.read(path, limit_bytes=LIMIT), Manifest, where=path)
    items = {"model": _replace(manifest.items["model"], digest="f" * 32)}
    storage.put(path, seal(_replace(manifest, items=items)))
    assert "another digest in the index" in said(verify(storage, name))


def test_an_item_of_several_ranks_that_was_exchanged_is_found_though_it_is_spread_over_their_indexes(
    storage: MemoryStorage,
) -> None:
    """Spec: F7.5"""
    boxes = [Values("float32", (1,), floats(1.0).data, global_shape=(2,), offset=(n,)) for n in range(2)]
    ranks = [{"model": {"w": box}, "rng": {"state": integers(n)}} for n, box in enumerate(boxes)]
    kinds = {"model": "sharded", "rng": "per_rank"}
    name = write_generation(storage, 1, chain=CHAIN, ranks=ranks, kinds=kinds)
    assert verify(storage, name).holds
    path = generation_path(name, "manifest.json")
    manifest = unseal(storage.read(path, limit_bytes=LIMIT), Manifest, where=path)
    for item in ("model", "rng"):
        items = {**manifest.items, item: _replace(manifest.items[item], digest="f" * 32)}
        storage.put(path, seal(_replace(manifest, items=items)))
        assert f"item '{item}' has another digest in the index" in said(verify(storage, name))


def test_a_tensor_of_an_item_that_the_manifest_does_not_name_is_found(storage: MemoryStorage) -> None:
    ranks = [{"model": {"w": floats(1.0)}}, {"ghost": {"w": floats(1.0)}}]
    trees = [{"model": None}, {}]
    name = write_generation(storage, 1, chain=CHAIN, ranks=ranks, plain_of_ranks=trees)
    assert "no item of the manifest" in said(verify(storage, name))


def _entries(change: Callable[[dict[str, dict[str, object]]], object]) -> Callable[[bytes], bytes]:
    def changed(header: bytes) -> bytes:
        entries = json.loads(header[8:])
        change(entries)
        text = json.dumps(entries).encode()
        return header[:8] + text + b" " * (len(header) - 8 - len(text))

    return changed


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (_entries(lambda e: e["model/bias"].update(dtype="I32")), "contradicts the index"),
        (_entries(lambda e: e["model/weight"].update(shape=[2, 6])), "contradicts the index"),
        (_entries(lambda e: e["model/weight"].update(data_offsets=[0, 48])), "contradicts the index"),
        (_entries(lambda e: e["model/weight"].update(shape=[12.0])), "contradicts the index"),
        (_entries(lambda e: e["model/bias"].update(more=1)), "other fields"),
        (_entries(lambda e: e.pop("model/bias")), "does not list a tensor"),
        (_entries(lambda e: e.update(other=e["model/bias"])), "the index does not"),
        (_entries(lambda e: e.update(__metadata__={"a": 1})), "no texts"),  # type: ignore[dict-item]  # wrong on purpose
        (lambda header: (len(header) - 9).to_bytes(8, "little") + header[8:], "another length"),
        (lambda header: header.replace(b'"model/bias":', b'"model/bias";'), "cannot be decoded"),
        (lambda header: header[:8] + b"[]".ljust(len(header) - 8), "no JSON object"),
    ],
)
def test_a_header_that_tells_another_story_than_the_index_is_found(
    storage: MemoryStorage, change: Callable[[bytes], bytes], words: str
) -> None:
    """What the safetensors package would show of the file is what a restore would take from it."""
    name = write_generation(storage, 1, chain=CHAIN, items=ITEMS)
    header = storage.read(generation_path(name, DATA), limit_bytes=LIMIT)[:4096]
    index = unseal(storage.read(generation_path(name, INDEX), limit_bytes=LIMIT), Index, where=INDEX)
    check_header(header, index, 0, where=DATA)
    with pytest.raises(CorruptionError, match=words):
        check_header(change(header), index, 0, where=DATA)


def test_a_storage_that_does_not_answer_raises_and_concludes_nothing(
    storage: MemoryStorage, monkeypatch: pytest.MonkeyPatch
) -> None:
    name = write_generation(storage, 1, chain=CHAIN)

    def fail(path: str, offset_bytes: int, buffer: memoryview) -> None:
        raise StorageError("could not read: the device failed", where=path, errno=5)

    monkeypatch.setattr(storage, "read_into", fail)
    with pytest.raises(StorageError, match="device"):
        verify(storage, name)


def test_what_holds_is_noted_once_and_the_note_speaks_of_one_manifest(storage: MemoryStorage) -> None:
    name = write_generation(storage, 1, chain=CHAIN)
    found = verify(storage, name)
    assert note_verified(storage, found, run=RUN, ambient=SystemAmbient())
    first = read_verified(storage, name)
    assert first is not None
    assert note_verified(storage, found, run=RUN, ambient=SystemAmbient())
    assert read_verified(storage, name) == first
    path = generation_path(name, "manifest.json")
    manifest = unseal(storage.read(path, limit_bytes=LIMIT), Manifest, where=path)
    storage.put(path, seal(_replace(manifest, nonce="01")))
    assert read_verified(storage, name) is None
    assert note_verified(storage, found, run=RUN, ambient=SystemAmbient())
    assert read_verified(storage, name) is not None


def test_what_does_not_hold_is_not_noted(storage: MemoryStorage) -> None:
    name = write_generation(storage, 1, chain=CHAIN)
    flip(storage, generation_path(name, DATA))
    assert not note_verified(storage, verify(storage, name), run=RUN, ambient=SystemAmbient())
    assert read_verified(storage, name) is None


def _replace(record: object, **changes: object) -> object:
    return type(record)(**{**{name: getattr(record, name) for name in record.__struct_fields__}, **changes})  # type: ignore[attr-defined]
