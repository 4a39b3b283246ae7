"""An index says what can be checked without a byte of data, and all of it is."""

from __future__ import annotations

import copy
import tracemalloc
from collections.abc import Callable
from typing import Any

import pytest

from safepoint.catalog import GenerationState, examine, list_generations, read_lineage
from safepoint.errors import CorruptionError
from safepoint.format.digest import digest_file
from safepoint.format.index import decode_index, entry_keys
from tests.format.examples import Example, example
from tests.format.sealing import sealed_tree, tree_of

Tree = dict[str, Any]
OTHER = "step-000000000003-i000001-0badcafe"


def weight(tree: Tree) -> Tree:
    return next(tensor for tensor in tree["tensors"] if tensor["name"] == "weight")  # type: ignore[no-any-return]


def part_of(tree: Tree) -> Tree:
    """Return an empty box at the end of the weight."""
    return weight(tree) | {"offset": [4], "shape": [0], "chunks": []}


def decode(tree: Tree) -> None:
    decode_index(sealed_tree(tree), where="rank-00000-of-00001.json")


def test_the_example_is_sound() -> None:
    found = decode_index(example().index, where="x")
    assert [(tensor.name, [chunk.rows for chunk in tensor.chunks]) for tensor in found.tensors] == [
        ("count", [(0, 1)]),
        ("weight", [(0, 2), (2, 4)]),
    ]


CHANGES: dict[str, Callable[[Tree], object]] = {
    "hole": lambda t: weight(t)["chunks"][1].update(offset_bytes=weight(t)["chunks"][1]["offset_bytes"] + 8),
    "overlap": lambda t: weight(t)["chunks"][1].update(offset_bytes=weight(t)["chunks"][0]["offset_bytes"]),
    "exchanged chunks": lambda t: weight(t)["chunks"].reverse(),
    "beyond the end": lambda t: weight(t)["chunks"][1].update(offset_bytes=10**15),
    "rows backwards": lambda t: weight(t)["chunks"][0].update(rows=[2, 0]),
    "no row": lambda t: weight(t)["chunks"][0].update(rows=[0, 0], size_bytes=0),
    "rows beyond": lambda t: weight(t)["chunks"][1].update(rows=[2, 5]),
    "rows moved": lambda t: weight(t)["chunks"][0].update(rows=[1, 3]),
    "rows lost": lambda t: weight(t)["chunks"].pop(),
    "rows doubled": lambda t: weight(t)["chunks"].append(weight(t)["chunks"][1]),
    "three row numbers": lambda t: weight(t)["chunks"][0].update(rows=[0, 1, 2]),
    "size of other rows": lambda t: weight(t)["chunks"][0].update(size_bytes=7),
    "no such object": lambda t: weight(t)["chunks"][0].update(object=1),
    "object below zero": lambda t: weight(t)["chunks"][0].update(object=-1),
    "no digest": lambda t: weight(t)["chunks"][0].update(digest="0" * 31),
    "another digest": lambda t: weight(t)["chunks"][0].update(digest="0" * 32),
    "another header": lambda t: t.update(header_digest="0" * 32),
    "no header digest": lambda t: t.update(header_digest=""),
    "longer header": lambda t: t.update(header_bytes=t["header_bytes"] + 8),
    "file longer than its chunks": lambda t: t["objects"][0].update(size_bytes=t["objects"][0]["size_bytes"] + 1),
    "file shorter than its chunks": lambda t: t["objects"][0].update(size_bytes=t["objects"][0]["size_bytes"] - 1),
    "unknown type": lambda t: weight(t).update(dtype="float17"),
    "wider type": lambda t: weight(t).update(dtype="float64"),
    "box outside": lambda t: weight(t).update(offset=[1]),
    "box larger than its tensor": lambda t: weight(t).update(global_shape=[3]),
    "axes of the offset": lambda t: weight(t).update(offset=[]),
    "axes of the tensor": lambda t: weight(t).update(global_shape=[4, 1]),
    "too many axes": lambda t: weight(t).update(global_shape=[1] * 65, shape=[1] * 65, offset=[0] * 65),
    "a shape of 10^15": lambda t: weight(t).update(global_shape=[10**15], shape=[10**15]),
    "a shape beyond all bounds": lambda t: weight(t).update(global_shape=[2**62, 2**62], shape=[4, 1], offset=[0, 0]),
    "tensor twice": lambda t: t["tensors"].append(weight(t)),
    "box of another type": lambda t: t["tensors"].append(part_of(t) | {"dtype": "uint8"}),
    "box of another tensor": lambda t: t["tensors"].append(part_of(t) | {"global_shape": [5]}),
    "tensor of no item": lambda t: t["items"].pop("model"),
    "item outside the grammar": lambda t: t["items"].update({"../up": {"type": "module", "plain": None}}),
    "object twice": lambda t: t["objects"].append(t["objects"][0]),
    "object outside the grammar": lambda t: t["objects"][0].update(name="../../run.json"),
    "object of another rank": lambda t: t["objects"][0].update(name="rank-00000-of-00002.safetensors"),
    "an index as data": lambda t: t["objects"].append(t["objects"][0] | {"name": "rank-00000-of-00001.json"}),
    "foreign generation": lambda t: t["objects"][0].update(generation="step-7"),
    "own file said to be an ancestor's": lambda t: t["objects"][0].update(generation=OTHER),
    "chunk behind the end of an ancestor's file": lambda t: (
        t["objects"][0].update(generation=OTHER),
        weight(t)["chunks"][1].update(offset_bytes=t["objects"][0]["size_bytes"] - 4),
    ),
    "no generation": lambda t: t.update(generation="latest"),
    "rank beyond the world": lambda t: t.update(rank=1),
}
# An ancestor's file may hold the bytes: whether this generation descends from it is the manifest's to say.
SOUND_ALONE = {"own file said to be an ancestor's"}


@pytest.mark.parametrize("name", sorted(CHANGES.keys() - SOUND_ALONE))
def test_an_index_that_contradicts_itself_is_refused(name: str) -> None:
    """Spec: F3.6, F3.7, F3.8, F3.9, F3.10, F5.5"""
    tree = tree_of(example().index)
    decode(copy.deepcopy(tree))
    CHANGES[name](tree)
    with pytest.raises(CorruptionError, match=r"rank-00000-of-00001\.json"):
        decode(tree)


def of_two_ranks() -> Tree:
    tree = tree_of(example().index) | {"world_size": 2}
    name = "rank-00000-of-00002.safetensors"
    return tree | {"objects": [tree["objects"][0] | {"name": name}]}


def test_several_boxes_of_one_tensor_are_told_apart_by_their_offsets() -> None:
    """Spec: F3.6"""
    tree = of_two_ranks()
    tree["tensors"].append(part_of(tree))
    decode(tree)
    tree["tensors"].append(part_of(tree))
    with pytest.raises(CorruptionError, match="listed twice"):
        decode(tree)


def test_one_of_several_ranks_may_store_tensors_of_an_item_whose_tree_another_stores() -> None:
    """Spec: F3.5, F3.6"""
    tree = of_two_ranks() | {"items": {}}
    decode(tree)
    for tensor in tree["tensors"]:
        tensor["item"] = "../up"
    with pytest.raises(CorruptionError, match="belongs to no item"):
        decode(tree)


def test_keys_tell_boxes_of_one_tensor_and_names_that_look_like_keys_apart() -> None:
    """Spec: F3.3"""
    boxes = [("m", "w", (0, 0)), ("m", "w", (2, 0)), ("m", "w@0,0", (0,)), ("m", "w@0,0@", (0,)), ("n", "w", (0,))]
    assert entry_keys(boxes) == ["m/w@0,0", "m/w@2,0", "m/w@0,0@", "m/w@0,0@@", "n/w"]


def huge() -> Tree:
    """Return an index that is sound in itself and speaks of 10^15 bytes."""
    tree = tree_of(example().index)
    size = 10**15
    chunk = {
        "rows": [0, size],
        "object": 0,
        "offset_bytes": tree["header_bytes"],
        "size_bytes": size,
        "digest": "0" * 32,
    }
    tree["tensors"] = [
        {"item": "model", "name": "weight", "dtype": "uint8", "global_shape": [size], "offset": [0], "shape": [size]}
        | {"chunks": [chunk]}
    ]
    tree["objects"][0]["size_bytes"] = tree["header_bytes"] + size
    tree["objects"][0]["digest"] = digest_file(tree["header_digest"], ["0" * 32])
    return tree


def test_an_index_of_a_million_gigabytes_allocates_nothing_and_is_met_by_the_file_s_size() -> None:
    """Spec: F2.6"""
    case = example()
    text = sealed_tree(huge())
    tracemalloc.start()
    decode_index(text, where="x")
    manifest = tree_of(case.manifest)
    for entry in manifest["objects"]:
        entry["size_bytes"] = 10**15
    case.storage.put(case.manifest_path, sealed_tree(manifest))
    (found,) = [examine(case.storage, name, read_lineage(case.storage)) for name in list_generations(case.storage)]
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 1 << 20
    assert found.state is GenerationState.DAMAGED
    assert found.refusal is not None and "expected 1000000000000000 bytes" in found.refusal.reason


@pytest.mark.timeout(20)
def test_many_objects_and_many_chunks_are_checked_in_linear_work() -> None:
    tree = tree_of(example().index)
    tree["objects"] += [
        tree["objects"][0] | {"name": f"rank-00000-of-00001.part-{part:03d}.safetensors"} for part in range(1, 1000)
    ]
    row = {"object": 0, "offset_bytes": 0, "size_bytes": 8, "digest": "0" * 32}
    count = {
        "item": "model",
        "name": "long",
        "dtype": "int64",
        "global_shape": [20000],
        "offset": [0],
        "shape": [20000],
    }
    tree["tensors"] += [count | {"chunks": [row | {"rows": [n, n + 1]} for n in range(20000)]}]
    with pytest.raises(CorruptionError):
        decode(tree)


def test_every_flipped_byte_of_an_index_is_detected() -> None:
    """Spec: F2.2"""
    text = example().index
    for position in range(len(text)):
        damaged = bytearray(text)
        damaged[position] ^= 1 << (position % 8)
        with pytest.raises(CorruptionError):
            decode_index(bytes(damaged), where="x")


def test_the_digest_of_a_data_file_is_that_of_its_parts_in_order() -> None:
    """Spec: F3.10"""
    import xxhash

    case: Example = example()
    tree = tree_of(case.index)
    data = case.storage.read(f"generations/{case.generation}/rank-00000-of-00001.safetensors", limit_bytes=1 << 20)
    begin = tree["header_bytes"]
    parts = [data[:begin], data[begin : begin + 8], data[begin + 8 : begin + 16], data[begin + 16 :]]
    expected = xxhash.xxh3_128_hexdigest(b"".join(xxhash.xxh3_128_digest(part) for part in parts))
    assert tree["objects"][0]["digest"] == expected
