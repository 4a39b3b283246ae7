"""Names: what parses is ours, to the letter; everything else is foreign."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from safepoint.errors import RequestError
from safepoint.format.names import (
    GenerationName,
    check_item_name,
    data_name,
    index_name,
    is_data_name,
    is_object_name,
    next_nonce,
    parse_incarnation_file,
)


def test_names_are_those_of_the_specification() -> None:
    assert str(GenerationName(1000, 4, "005f2c9a")) == "step-000000001000-i000004-005f2c9a"
    assert data_name(0, 4) == "rank-00000-of-00004.safetensors"
    assert data_name(0, 4, 2) == "rank-00000-of-00004.part-002.safetensors"
    assert index_name(3, 4) == "rank-00003-of-00004.json"


@given(st.integers(0, 10**12 - 1), st.integers(0, 10**6 - 1), st.integers(0, 2**32 - 1))
def test_a_generation_s_name_comes_back_from_its_text(step: int, incarnation: int, nonce: int) -> None:
    name = GenerationName(step, incarnation, f"{nonce:08x}")
    assert GenerationName.parse(str(name)) == name


@pytest.mark.parametrize(
    "text",
    [
        "",
        "999",
        "step-20",
        "step-000000000020",
        "step-000000000020-i000001",
        "step-000000000020-i000001-0",
        "step-000000000020-i000001-0BADCAFE",
        "step-000000000020-i000001-0badcafe ",
        "step-000000000020-i000001-0badcafe\n",
        "step-000000000020-i000001-0badcafe.bak",
        "Step-000000000020-i000001-0badcafe",
        "step-+00000000020-i000001-0badcafe",
        "step-٠٠٠٠٠٠٠٠٠٠٢٠-i000001-0badcafe",
        "../step-000000000020-i000001-0badcafe",
    ],
)
def test_a_folder_that_is_not_named_to_the_letter_is_foreign(text: str) -> None:
    """Spec: F5.4"""
    assert GenerationName.parse(text) is None


def test_steps_are_compared_as_numbers() -> None:
    names = [GenerationName(step, 1, "00000000") for step in (9, 100, 10)]
    assert [name.step for name in sorted(names)] == [9, 10, 100]


def test_each_attempt_at_a_step_has_a_greater_nonce_than_the_one_before() -> None:
    """Spec: F5.2"""
    names = [GenerationName(7, 1, "ff000000"), GenerationName(8, 1, "00ffffff")]
    for expected in ("00", "01", "02"):
        nonce = next_nonce(names, step=7, incarnation=2, entropy="f00f00")
        assert nonce == f"{expected}f00f00"
        names.append(GenerationName(7, 2, nonce))
    del names[2]
    assert next_nonce(names, step=7, incarnation=2, entropy="000000") == "03000000"
    assert next_nonce(names, step=7, incarnation=1, entropy="000000") == "ff000000"


@pytest.mark.parametrize(
    ("name", "is_data", "is_object"),
    [
        ("rank-00000-of-00001.safetensors", True, True),
        ("rank-00001-of-00002.part-001.safetensors", True, True),
        ("rank-00000-of-00001.json", False, True),
        ("rank-00001-of-00001.safetensors", False, False),
        ("rank-00004-of-00002.json", False, False),
        ("rank-0-of-1.json", False, False),
        ("rank-00000-of-00001.part-01.safetensors", False, False),
        ("rank-00000-of-00001.safetensors\n", False, False),
        ("manifest.json", False, False),
        ("../rank-00000-of-00001.json", False, False),
    ],
)
def test_only_the_files_of_a_rank_are_objects(name: str, is_data: bool, is_object: bool) -> None:
    """Spec: F5.4"""
    assert (is_data_name(name), is_object_name(name)) == (is_data, is_object)


@pytest.mark.parametrize(
    ("name", "number"),
    [
        ("000004.json", 4),
        ("000004.resumed.json", 4),
        ("000004.refused.json", 4),
        ("000004.alive", 4),
        ("000004.txt", None),
        ("4.json", None),
        ("000004.json.bak", None),
    ],
)
def test_any_file_of_an_incarnation_tells_its_number(name: str, number: int | None) -> None:
    """Spec: F6.4"""
    assert parse_incarnation_file(name) == number


@pytest.mark.parametrize("name", ["model", "a", "0", "_x", "optimizer.d-1", "x" * 128])
def test_an_item_may_have_this_name(name: str) -> None:
    assert check_item_name(name) == name


@pytest.mark.parametrize("name", ["", ".", "..", "-a", "a/b", "__metadata__", "x" * 129, "ä", "a b", "a\n", 7, None])
def test_an_item_may_not_have_this_name(name: object) -> None:
    """Spec: F5.5"""
    with pytest.raises(RequestError, match="item's name"):
        check_item_name(name)
