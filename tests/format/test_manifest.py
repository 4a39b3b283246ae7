"""A manifest speaks of its own folder, of one boundary, and of nothing it does not descend from."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest

from safepoint.errors import CorruptionError, FormatVersionError
from safepoint.format.manifest import decode_manifest
from safepoint.format.records import LineageLink, check_chain, is_on_chain
from tests.format.examples import example
from tests.format.sealing import sealed_tree, tree_of

Tree = dict[str, Any]
DIGEST = "0" * 32


def reference(step: int, incarnation: int = 1) -> Tree:
    generation = f"step-{step:012d}-i{incarnation:06d}-0badcafe"
    return {"generation": generation, "name": "rank-00000-of-00001.safetensors", "size_bytes": 8, "digest": DIGEST}


def decode(tree: Tree, generation: str) -> None:
    decode_manifest(sealed_tree(tree), where=f"generations/{generation}/manifest.json", generation=generation)


CHANGES: dict[str, Callable[[Tree], object]] = {
    "another generation": lambda t: t.update(generation="step-000000000008-i000001-0badcafe"),
    "no generation": lambda t: t.update(generation="latest"),
    "another step": lambda t: t.update(step=8),
    "another incarnation": lambda t: t.update(incarnation=2),
    "progress elsewhere": lambda t: t["progress"].update(step=6),
    "another boundary": lambda t: t.update(boundary="after_microbatch"),
    "no lineage": lambda t: t.update(lineage=[]),
    "lineage of another": lambda t: t["lineage"][0].update(incarnation=2),
    "a fresh start at a step": lambda t: t["lineage"][0].update(step=5),
    "older than what it resumed": lambda t: t.update(
        lineage=[{"incarnation": 1, "resumed": "step-000000000009-i000009-0badcafe", "step": 9}]
    ),
    "item outside the grammar": lambda t: t["items"].update({"a/b": t["items"]["model"]}),
    "item of no rank": lambda t: t["items"]["model"].update(ranks=[]),
    "item of a rank that is not there": lambda t: t["items"]["model"].update(ranks=[0, 1]),
    "item of a rank twice": lambda t: t["items"]["model"].update(ranks=[0, 0]),
    "object twice": lambda t: t["objects"].append(t["objects"][0]),
    "object by a path": lambda t: t["objects"][0].update(name="../../../secret"),
    "object without a digest": lambda t: t["objects"][0].update(digest="x"),
    "a later generation's object": lambda t: t["objects"].append(reference(8)),
    "an object off the lineage": lambda t: t["objects"].append(reference(3, 2)),
    "a metric that is no plain value": lambda t: t["metrics"].update(loss=0.5),
    "a probe that is no plain value": lambda t: t.update(probe={"$code": "1"}),
    "a mesh that is no plain value": lambda t: t.update(mesh=[1.5]),
    "config that is no plain value": lambda t: t["conditions"].update(config={"lr": {"$float": "fast"}}),
    "configuration that is no mapping": lambda t: t["conditions"].update(configuration={"optimizer": [1]}),
    "a data set that is no plain value": lambda t: t["conditions"].update(datasets={"data": {"$same": 1}}),
    "time as text": lambda t: t.update(timings_s={"write": "1"}),
}


@pytest.mark.parametrize("name", sorted(CHANGES))
def test_a_manifest_that_contradicts_its_place_or_itself_is_refused(name: str) -> None:
    """Spec: F7.2, F7.7, F5.5, C13.1"""
    case = example()
    tree = tree_of(case.manifest)
    decode(copy.deepcopy(tree), case.generation)
    CHANGES[name](tree)
    with pytest.raises(CorruptionError, match=r"manifest\.json"):
        decode(tree, case.generation)


def test_an_object_of_an_ancestor_may_be_named() -> None:
    case = example()
    tree = tree_of(case.manifest)
    tree["objects"].append(reference(3))
    decode(tree, case.generation)


def test_a_manifest_of_a_newer_format_is_not_damage() -> None:
    """Spec: F1.2"""
    case = example()
    with pytest.raises(FormatVersionError):
        decode(tree_of(case.manifest) | {"format": 2, "stripes": 4}, case.generation)


def test_every_flipped_byte_of_a_manifest_is_detected() -> None:
    """Spec: F2.2"""
    case = example()
    for position in range(len(case.manifest)):
        damaged = bytearray(case.manifest)
        damaged[position] ^= 1 << (position % 8)
        with pytest.raises(CorruptionError):
            decode_manifest(bytes(damaged), where="x", generation=case.generation)


FIRST = LineageLink(1, None, 0)
SECOND = LineageLink(2, "step-000000000100-i000001-0badcafe", 100)
FOURTH = LineageLink(4, "step-000000000150-i000002-0badcafe", 150)


def test_a_chain_tells_which_steps_of_which_incarnation_belong_to_it() -> None:
    """Spec: C9.3"""
    chain = (FIRST, SECOND, FOURTH)
    check_chain(chain, incarnation=4, where="x")
    live = {
        (incarnation, step): is_on_chain(chain, incarnation=incarnation, step=step)
        for incarnation, step in [(1, 99), (1, 100), (1, 101), (2, 150), (2, 151), (3, 1), (4, 151), (4, 10**9), (5, 1)]
    }
    assert [case for case, is_live in live.items() if is_live] == [(1, 99), (1, 100), (2, 150), (4, 151), (4, 10**9)]


@pytest.mark.parametrize(
    "chain",
    [
        (),
        (FIRST, SECOND),
        (FIRST, FOURTH),
        (SECOND, FIRST, FOURTH),
        (FIRST, SECOND, LineageLink(4, None, 0)),
        (FIRST, SECOND, LineageLink(4, "latest", 150)),
        (FIRST, SECOND, LineageLink(4, FOURTH.resumed, 151)),
        (FIRST, LineageLink(3, SECOND.resumed, 100), LineageLink(2, "step-000000000150-i000003-0badcafe", 150), FOURTH),
        (FIRST, SECOND, LineageLink(4, "step-000000000050-i000002-0badcafe", 50)),
        (LineageLink(4, None, 1),),
    ],
    ids=repr,
)
def test_a_chain_that_does_not_hold_together_is_refused(chain: tuple[LineageLink, ...]) -> None:
    """Spec: C9.1"""
    with pytest.raises(CorruptionError, match="lineage"):
        check_chain(chain, incarnation=4, where="x")


def test_a_chain_may_begin_with_a_generation_of_another_run() -> None:
    check_chain((LineageLink(4, "step-000000000100-i000009-0badcafe", 100),), incarnation=4, where="x")
