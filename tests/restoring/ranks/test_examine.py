"""Whatever is wrong with any index of many ranks is found, by whichever rank reads it, and holds for all."""

from __future__ import annotations

import tracemalloc
from collections.abc import Callable

import msgspec
import pytest

from safepoint.catalog import examine_all, read_lineage
from safepoint.errors import CorruptionError
from safepoint.format.encoding import seal
from safepoint.format.manifest import Manifest
from safepoint.format.names import MANIFEST, generation_path
from safepoint.format.plain import encode_plain
from safepoint.storage.memory import MemoryStorage
from tests.build import Values, begin, flip, write_generation
from tests.restoring.ranks.jobs import View, dealt, holds, part_of, run_of, same, start, write


def manifest_of(storage: MemoryStorage) -> Manifest:
    (generation,) = examine_all(storage, read_lineage(storage))
    assert generation.manifest is not None
    return generation.manifest


@pytest.mark.parametrize("rank", [1, 2])
def test_a_rank_that_does_not_see_the_index_that_it_reads_takes_all_to_the_older_checkpoint(rank: int) -> None:
    """Spec: C10.2, C10.6"""
    storage = run_of(1, 2, world_size=3)
    views = [View(storage), View(storage), View(storage)]
    views[rank].hidden = "generations/step-000000000002-*.json"
    started = start(views, [{"model": part_of(number, 3)} for number in range(3)])
    assert all(holds(one, 1) for one in started.parts)
    (refusal,) = started.reports()[0].refused.values()
    assert same([report.refused for report in started.reports()])
    assert refusal.file == f"rank-0000{rank}-of-00003.json" and f"[rank {rank}: " in refusal.reason


@pytest.mark.parametrize("now", [1, 2, 3, 5])
@pytest.mark.parametrize("rank", [0, 2])
def test_a_damaged_index_is_found_whoever_reads_it(rank: int, now: int) -> None:
    """Spec: C10.2, F2.2"""
    storage = run_of(1, world_size=3)
    name = write(storage, 2, 3)
    flip(storage, generation_path(name, f"rank-0000{rank}-of-00003.json"), 300)
    started = start([storage] * now, [{"model": part_of(number, now)} for number in range(now)])
    assert all(holds(one, 1) for one in started.parts)
    (refusal,) = started.reports()[0].refused.values()
    assert refusal.file == f"rank-0000{rank}-of-00003.json" and "does not match its manifest" in refusal.reason


def other_object(manifest: Manifest, suffix: str) -> Manifest:
    """Return a manifest that names other digests of data files, or other ones of indexes."""
    objects = [
        msgspec.structs.replace(entry, digest="0" * 32) if entry.name.endswith(suffix) else entry
        for entry in manifest.objects
    ]
    return msgspec.structs.replace(manifest, objects=tuple(objects))


def other_item(manifest: Manifest, **changes: object) -> Manifest:
    changed = msgspec.structs.replace(manifest.items["model"], **changes)
    return msgspec.structs.replace(manifest, items={"model": changed})


CONTRADICTIONS: dict[str, tuple[Callable[[Manifest], Manifest], str]] = {
    "the digest of a data file": (
        lambda m: other_object(m, "00001-of-00002.safetensors"),
        "names another object than the manifest",
    ),
    "the digest of an index": (lambda m: other_object(m, "00001-of-00002.json"), "does not match its manifest"),
    "a data file that is not named": (
        lambda m: msgspec.structs.replace(m, objects=tuple(one for one in m.objects if one.name[-5:] == ".json")),
        "does not name an object it needs",
    ),
    "an index that is not named": (
        lambda m: msgspec.structs.replace(m, objects=m.objects[:1]),
        "does not name an object it needs",
    ),
    "the digest of an item": (lambda m: other_item(m, digest="0" * 32), "item 'model' has another digest"),
    "the type of an item": (lambda m: other_item(m, type="optimizer"), "item 'model' has another type"),
    "an item's ranks": (lambda m: other_item(m, ranks=(1,)), "item 'model' is none of this rank's"),
    "an item that no index lists": (
        lambda m: msgspec.structs.replace(m, items=m.items | {"other": m.items["model"]}),
        "the manifest names other items",
    ),
    "items without the one that is stored": (
        lambda m: msgspec.structs.replace(m, items={}),
        "the manifest names other items",
    ),
    "more ranks than stored": (lambda m: msgspec.structs.replace(m, world_size=3), "does not name an object it needs"),
    "so many ranks that a list of them would not fit": (
        lambda m: msgspec.structs.replace(m, world_size=2**62),
        "does not name an object it needs",
    ),
}


@pytest.mark.parametrize("now", [1, 2, 3])
@pytest.mark.parametrize("name", CONTRADICTIONS)
def test_a_manifest_that_the_indexes_contradict_is_refused_by_every_rank(name: str, now: int) -> None:
    """Spec: F7.4, F7.5, F7.7, C11.1"""
    change, words = CONTRADICTIONS[name]
    storage = run_of(1, world_size=2)
    manifest = manifest_of(storage)
    changed = change(manifest)
    storage.put(generation_path(manifest.generation, MANIFEST), seal(changed))
    with pytest.raises(CorruptionError, match=words):
        dealt(storage, changed, now)


def test_indexes_that_list_the_same_boxes_are_damage_whoever_reads_them() -> None:
    """Spec: C5.1, C11.5"""
    storage = MemoryStorage()
    whole = Values("float32", (2,), bytes(8))
    low, high = (Values("float32", (2,), bytes(8), (4,), (offset,)) for offset in (0, 2))
    ranks = [{"model": {"w": whole, "v": high}}, {"model": {"w": whole}}, {"model": {"v": low}}]
    write_generation(storage, 1, chain=begin(storage), ranks=ranks, kinds={"model": "sharded"})
    for now in (1, 2, 3, 4):
        with pytest.raises(CorruptionError, match=r"overlap.*model/w"):
            dealt(storage, manifest_of(storage), now)


def test_boxes_of_a_rank_s_own_item_make_its_own_tensor_whole() -> None:
    """Spec: C5.1, C11.6"""
    storage = MemoryStorage()
    halves = [Values("float32", (2,), bytes(8), (4,), (2 * rank,)) for rank in range(2)]
    ranks = [{"gen": {"state": half}} for half in halves]
    trees = [{"gen": encode_plain(rank)} for rank in range(2)]
    write_generation(storage, 1, chain=begin(storage), ranks=ranks, plain_of_ranks=trees, kinds={"gen": "per_rank"})
    for now in (1, 2, 3):
        with pytest.raises(CorruptionError, match=r"gap.*gen/state"):
            dealt(storage, manifest_of(storage), now)


@pytest.mark.parametrize("rank", [0, 1, 2])
def test_a_tree_that_one_rank_alone_decodes_and_that_is_none_takes_all_to_the_older_checkpoint(rank: int) -> None:
    """Spec: C10.2, C10.6"""
    storage = run_of(1, world_size=3)
    trees = [{"gen": {"$unheard": 1} if number == rank else encode_plain(number)} for number in range(3)]
    nothing: list[dict[str, dict[str, Values]]] = [{}, {}, {}]
    chain = read_lineage(storage).chain
    write_generation(storage, 2, chain=chain, ranks=nothing, plain_of_ranks=trees, kinds={"gen": "per_rank"})
    started = start([storage] * 3, [{"model": part_of(number, 3)} for number in range(3)])
    assert all(holds(one, 1) for one in started.parts)
    (refusal,) = started.reports()[0].refused.values()
    assert same([report.refused for report in started.reports()])
    assert refusal.file == f"rank-0000{rank}-of-00003.json" and "a tag of this format" in refusal.reason


def test_one_process_reads_the_indexes_of_many_ranks_in_a_fraction_of_the_memory_of_their_texts() -> None:
    world_size, count = 24, 150
    storage = MemoryStorage()
    ranks = [
        {
            "model": {
                f"layers.{number}.weight": Values("uint8", (1,), bytes([rank]), (world_size,), (rank,))
                for number in range(count)
            }
        }
        for rank in range(world_size)
    ]
    write_generation(storage, 1, chain=begin(storage), ranks=ranks, kinds={"model": "sharded"})
    manifest = manifest_of(storage)
    texts = sum(entry.size_bytes for entry in manifest.objects if entry.name.endswith(".json"))
    dealt(storage, manifest, 1)
    tracemalloc.start()
    (saved,) = dealt(storage, manifest, 1)
    kept, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert len(saved.tensors["model", "layers.7.weight"]) == world_size
    # A box with one chunk takes some 350 bytes of text, and as records more than twice of that.
    assert kept < texts / 4 and peak < texts, (kept, peak, texts)
