"""What a restore can keep: one reason for each thing that differs, and no more."""

from __future__ import annotations

import copy
from typing import Any

import msgspec
import pytest

from safepoint.contract import Reason, configuration_reasons, differing_leaves, judge, lowest, plain_text
from safepoint.format.manifest import Conditions
from safepoint.format.plain import encode_plain

ENVIRONMENT = {
    "python": "3.11.2",
    "torch": "2.13.0",
    "safepoint": "0.1.0",
    "device": "cuda",
    "cpu_capability": "AVX2",
    "deterministic_algorithms": "True",
}
CONFIGURATION: dict[str, Any] = {
    "optimizer": {"kind": "optimizer", "groups": [{"lr": encode_plain(0.1), "betas": encode_plain((0.9, 0.95))}]},
    "scheduler": {"kind": "scheduler", "T_max": 100},
}
SAVED = Conditions(
    world_size=4,
    global_batch=32,
    accumulation=2,
    environment=ENVIRONMENT,
    structure={"model": "aa", "ema": "bb"},
    configuration=CONFIGURATION,
    datasets={"data": {"name": "digits", "length": 1797}},
    config=encode_plain({"dropout": 0.1, "tags": ["a", "b"], "amp": True}),
    counts={"optimizer": 7},
)


def changed(**fields: Any) -> Conditions:
    return msgspec.structs.replace(SAVED, **fields)


def told(current: Conditions, saved: Conditions = SAVED) -> list[tuple[str, str, str, str, str]]:
    return [(r.word, r.level, r.subject, r.saved, r.current) for r in judge(saved, current).reasons]


def test_equal_conditions_promise_exactness_without_a_reason() -> None:
    promise = judge(SAVED, copy.deepcopy(SAVED))
    assert (promise.level, promise.reasons, str(promise)) == ("exact", (), "exact")


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"world_size": 8}, ("world_size", "same_data", "world size", "4", "8")),
        ({"global_batch": 64}, ("global_batch", "approximate", "global batch", "32", "64")),
        ({"global_batch": None}, ("global_batch", "approximate", "global batch", "32", "None")),
        ({"accumulation": 4}, ("accumulation", "same_data", "microbatches per update", "2", "4")),
        (
            {"structure": {"model": "ab", "ema": "bb"}},
            ("model.structure", "same_data", "structure of 'model'", "aa", "ab"),
        ),
        (
            {"datasets": {"data": {"name": "digits", "length": 1800}}},
            ("dataset", "approximate", "data set data.length", "1797", "1800"),
        ),
        ({"datasets": {}}, ("dataset", "approximate", "data set data", "{'name': 'digits', 'length': 1797}", "absent")),
        (
            {"config": encode_plain({"dropout": 0.2, "tags": ["a", "b"], "amp": True})},
            ("config", "approximate", "config dropout", "0.1", "0.2"),
        ),
        (
            {"config": encode_plain({"dropout": 0.1, "tags": ["a", "c"], "amp": True})},
            ("config", "approximate", "config tags[1]", "'b'", "'c'"),
        ),
        (
            {"config": encode_plain({"dropout": 0.1, "tags": ["a", "b"], "amp": 1})},
            ("config", "approximate", "config amp", "True", "1"),
        ),
        (
            {"config": encode_plain({"dropout": 0.1, "tags": ("a", "b"), "amp": True})},
            ("config", "approximate", "config tags", "['a', 'b']", "tuple ['a', 'b']"),
        ),
    ],
    ids=repr,
)
def test_one_difference_gives_one_reason_with_both_sides(change: dict[str, Any], reason: tuple[str, ...]) -> None:
    current = changed(**change)
    assert told(current) == [reason]
    assert judge(SAVED, current).level == reason[1]


@pytest.mark.parametrize(
    ("key", "word", "level"),
    [
        ("python", "versions", "same_data"),
        ("torch", "versions", "same_data"),
        ("safepoint", "versions", "exact"),
        ("device", "device", "same_data"),
        ("cpu_capability", "device", "same_data"),
        ("deterministic_algorithms", "determinism", "same_data"),
    ],
)
def test_each_part_of_the_environment_has_its_word(key: str, word: str, level: str) -> None:
    current = changed(environment=ENVIRONMENT | {key: "another"})
    assert told(current) == [(word, level, key, ENVIRONMENT[key], "another")]
    absent = changed(environment={name: value for name, value in ENVIRONMENT.items() if name != key})
    assert told(absent) == [(word, level, key, ENVIRONMENT[key], "absent")]
    assert told(SAVED, absent) == [(word, level, key, "absent", ENVIRONMENT[key])]


def test_another_world_size_keeps_the_data_only_when_the_global_batch_is_known_and_equal() -> None:
    assert judge(SAVED, changed(world_size=8)).level == "same_data"
    unknown = changed(global_batch=None)
    assert judge(unknown, msgspec.structs.replace(unknown, world_size=8)).level == "approximate"
    assert judge(SAVED, changed(world_size=8, global_batch=64)).level == "approximate"


def test_another_world_size_says_what_an_update_becomes_and_how_to_keep_it() -> None:
    expected = [
        ("world_size", "approximate", "world size", "4", "2"),
        ("global_batch", "approximate", "samples per update", "64", "32 (accumulation=4 keeps them)"),
        ("global_batch", "approximate", "samples between two steps of a schedule that counts updates", "64", "32"),
        ("global_batch", "approximate", "global batch", "32", "16"),
    ]
    assert told(changed(world_size=2, global_batch=16)) == expected
    # An accumulation that is not declared is taken to stay as it was.
    assert told(changed(world_size=2, global_batch=16, accumulation=None)) == expected
    odd = told(changed(world_size=3, global_batch=24, configuration={"optimizer": CONFIGURATION["optimizer"]}))
    assert odd[1][4] == "48 (no accumulation keeps them)"


def test_the_accumulation_that_keeps_the_samples_of_an_update_keeps_the_data() -> None:
    promise = judge(SAVED, changed(world_size=2, global_batch=16, accumulation=4))
    assert promise.level == "same_data"
    assert [reason.word for reason in promise.reasons] == ["world_size", "global_batch", "accumulation"]


def test_an_accumulation_that_is_not_known_is_no_difference() -> None:
    assert told(changed(accumulation=None)) == []


def test_what_lowered_the_promise_at_the_save_still_lowers_it() -> None:
    saved = changed(reasons={"epoch_end": "a schedule per epoch", "data.position": "two batches not counted"})
    assert told(SAVED, saved) == [
        ("epoch_end", "same_data", "a schedule per epoch", "", ""),
        ("data.position", "approximate", "two batches not counted", "", ""),
    ]
    assert str(judge(saved, SAVED).reasons[0]) == "a schedule per epoch → same_data"


def test_an_item_on_one_side_only_is_not_the_judge_s_to_compare() -> None:
    assert told(changed(structure={"model": "aa"}, configuration={})) == []


def test_a_hyper_parameter_is_named_by_its_item_and_a_schedule_by_one_word() -> None:
    current = copy.deepcopy(CONFIGURATION)
    current["optimizer"]["groups"][0]["lr"] = encode_plain(0.2)
    current["scheduler"]["T_max"] = 200
    assert configuration_reasons(CONFIGURATION, current) == [
        Reason("optimizer.lr", "same_data", "optimizer configuration groups[0].lr", "0.1", "0.2"),
        Reason("scheduler", "same_data", "scheduler configuration T_max", "100", "200"),
    ]


def test_further_reasons_lower_the_level_as_the_judge_s_own_do() -> None:
    further = Reason("data.position", "approximate", "batches handed out", "7", "9")
    promise = judge(SAVED, changed(world_size=8), further=[further])
    assert promise.level == "approximate"
    assert [reason.word for reason in promise.reasons] == ["world_size", "data.position"]


def test_judging_changes_nothing_and_gives_the_same_answer_again() -> None:
    saved, current = copy.deepcopy(SAVED), changed(world_size=8, config=encode_plain({"dropout": 0.2}))
    first = judge(saved, current)
    assert judge(saved, current) == first
    assert msgspec.json.encode(saved) == msgspec.json.encode(SAVED)


@pytest.mark.parametrize(
    ("levels", "expected"),
    [
        ([], "exact"),
        (["exact"], "exact"),
        (["exact", "same_data"], "same_data"),
        (["same_data", "approximate"], "approximate"),
    ],
)
def test_the_lowest_level_counts(levels: list[Any], expected: str) -> None:
    assert lowest(levels) == expected


@pytest.mark.parametrize(
    ("saved", "current", "leaves"),
    [
        ({"a": 1, "b": 2}, {"b": 2, "a": 1}, []),
        ({"a": {"b": 1}}, {"a": {"c": 1}}, [("a.b", "1", "absent"), ("a.c", "absent", "1")]),
        ([1, 2], [1], [("", "[1, 2]", "[1]")]),
        ({"$float": "nan"}, {"$float": "nan"}, []),
        ({"$float": "inf"}, {"$float": "0x1.0000000000000p-1"}, [("", "inf", "0.5")]),
        (0, False, [("", "0", "False")]),
        ([[0]], [[False]], [("[0][0]", "0", "False")]),
        (None, {}, [("", "None", "{}")]),
    ],
    ids=repr,
)
def test_leaves_that_differ_are_named_by_their_place(saved: Any, current: Any, leaves: list[Any]) -> None:
    assert differing_leaves(saved, current) == leaves


def test_values_are_shown_to_people_without_their_tags() -> None:
    assert (
        plain_text(encode_plain({"betas": (0.9, 0.95), "path": b"a"}))
        == "{'betas': tuple [0.9, 0.95], 'path': bytes 'YQ=='}"
    )
