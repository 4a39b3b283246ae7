"""Records: one digest, one strict form, one kind of error."""

from __future__ import annotations

import json
from typing import Any

import msgspec
import pytest
import xxhash

from safepoint.errors import CorruptionError, FormatVersionError, RequestError
from safepoint.format.encoding import MAX_NESTING, parse_json, seal, unseal
from safepoint.format.records import Holder, IncarnationRecord, RunRecord
from tests.format.sealing import sealed, sealed_tree, tree_of

RUN = RunRecord(1, (), "a1b2", "2025-03-01T12:00:00+00:00", "00ff")
START = IncarnationRecord(1, "a1b2", 4, "00ff", Holder("h", "u", "b", "n", 1, "2"), 1, "now", {"torch": "2.13.0"})


def test_a_record_begins_with_the_digest_of_all_that_follows() -> None:
    """Spec: F2.1"""
    text = seal(RUN)
    assert text[:11] == b'{"digest":"'
    assert text[43:45] == b'",'
    assert text[11:43].decode() == xxhash.xxh3_128_hexdigest(text[43:])
    assert json.loads(text)["run"] == "a1b2"
    assert len(text.splitlines()) == 1 + len(RUN.__struct_fields__) + 1
    assert unseal(text, RunRecord, where="run.json") == RUN


def test_every_flipped_bit_is_detected_and_the_file_is_named() -> None:
    """Spec: F2.2, F2.7"""
    text = seal(START)
    for position in range(len(text)):
        for bit in range(8):
            damaged = bytearray(text)
            damaged[position] ^= 1 << bit
            with pytest.raises(CorruptionError, match=r"incarnations/000004\.json"):
                unseal(bytes(damaged), IncarnationRecord, where="incarnations/000004.json")


def test_every_truncation_and_extension_is_detected() -> None:
    """Spec: F2.2"""
    text = seal(START)
    others = [text[:length] for length in range(len(text))] + [text + b" ", text + b"\0", text + text, b"\0" * 4096]
    for damaged in others:
        with pytest.raises(CorruptionError):
            unseal(damaged, IncarnationRecord, where="x")


GOOD = tree_of(seal(START))


@pytest.mark.parametrize(
    "change",
    [
        {"unknown": 1},
        {"world_size": -1},
        {"world_size": 2**63},
        {"world_size": 1.0},
        {"world_size": True},
        {"world_size": "1"},
        {"world_size": None},
        {"world_size": [1]},
        {"holder": {}},
        {"holder": GOOD["holder"] | {"more": 1}},
        {"versions": {"torch": 2}},
        {"versions": []},
    ],
    ids=repr,
)
def test_a_field_that_is_unknown_or_of_another_type_is_refused(change: dict[str, object]) -> None:
    """Spec: F2.3"""
    assert unseal(sealed_tree(GOOD), IncarnationRecord, where="x") == START
    with pytest.raises(CorruptionError):
        unseal(sealed_tree(GOOD | change), IncarnationRecord, where="x")


@pytest.mark.parametrize("field", sorted(GOOD.keys() - {"elastic_run", "elastic_restart"}))
def test_a_missing_field_is_refused(field: str) -> None:
    """Spec: F2.3"""
    with pytest.raises(CorruptionError):
        unseal(
            sealed_tree({name: value for name, value in GOOD.items() if name != field}), IncarnationRecord, where="x"
        )


@pytest.mark.parametrize(
    "tail",
    [
        b'","run":"a","run":"a"}',
        b'","digest":"x"}',
        b'","holder":{"pid":1,"pid":1}}',
        b'","x":NaN}',
        b'","x":Infinity}',
        b'","x":-Infinity}',
        b'","x":1e999}',
        b'","x":' + b"9" * 5000 + b"}",
        b'","x":"\xff"}',
        b'","x":"\\ud800"}',
        b'","x":"\\ud83d\\ude00"}',
        b'","x":"\n"}',
        b'","x":1} {}',
        b'","x":1,}',
        b'","x":[1',
        b'","x":"' + b'\\"' * 1000,
        b'","x":' + b"[" * 300 + b"]" * 300 + b"}",
        b'","x":' + b"[" * 200000,
        b'","x":' + b'{"a":' * 300 + b"1" + b"}" * 301,
        b'abc","x":1}',
        b'":1}',
        b"",
    ],
    ids=lambda tail: repr(tail[:30]),
)
def test_text_that_is_no_strict_json_is_refused_although_its_digest_is_right(tail: bytes) -> None:
    """Spec: F2.1, F2.3"""
    with pytest.raises(CorruptionError) as caught:
        unseal(sealed(tail), RunRecord, where="run.json")
    assert "run.json" in str(caught.value)
    assert len(str(caught.value)) < 1000


def test_text_that_only_looks_like_a_surrogate_is_read() -> None:
    assert parse_json(b'["C:\\\\udata", "\\u00e4", "[[[["]', where="x") == ["C:\\udata", "\u00e4", "[[[["]


def test_nesting_is_counted_outside_of_strings_only() -> None:
    deepest = b"[" * 256 + b"]" * 256
    assert parse_json(deepest, where="x")
    assert parse_json(b'"' + b"[" * 1000 + b'\\""', where="x")
    with pytest.raises(CorruptionError, match="256 levels"):
        parse_json(b"[" + deepest + b"]", where="x")


@pytest.mark.timeout(20)
def test_a_text_of_open_strings_is_refused_in_linear_work() -> None:
    """A scan that tried again behind every quote would take hours for this text of one megabyte."""
    with pytest.raises(CorruptionError):
        unseal(sealed(b'","x":"' + b'\\"' * 500_000), RunRecord, where="x")


def test_a_newer_record_is_told_from_a_damaged_one_before_its_fields_are_judged() -> None:
    """Spec: F1.2"""
    newer = tree_of(seal(RUN)) | {"format": 2, "something": "of a later version"}
    with pytest.raises(FormatVersionError, match="version 2"):
        unseal(sealed_tree(newer), RunRecord, where="run.json")
    flagged = tree_of(seal(RUN)) | {"flags": ["striped"], "stripes": 4}
    with pytest.raises(FormatVersionError, match="striped"):
        unseal(sealed_tree(flagged), RunRecord, where="run.json")


def test_a_version_that_never_was_is_damage() -> None:
    """Spec: F1.3"""
    with pytest.raises(CorruptionError, match="impossible format version"):
        unseal(sealed_tree(tree_of(seal(RUN)) | {"format": 0}), RunRecord, where="run.json")


def test_a_record_of_another_kind_is_refused() -> None:
    with pytest.raises(CorruptionError, match="IncarnationRecord"):
        unseal(seal(RUN), IncarnationRecord, where="x")


def test_a_text_that_is_not_unicode_is_refused_when_it_is_sealed() -> None:
    with pytest.raises(RequestError, match="RunRecord"):
        seal(msgspec.structs.replace(RUN, created="\ud800"))


class Anything(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Hold any value."""

    value: Any


VALUES = [
    None, True, 0, -1, 2**63 - 1, -(2**63), 2**64 - 1, 1.5, -0.0, 1e300, "", "ä\u2028\U0001f600", "\x00\x1f\x7f\"\\/",
    [], {}, [[], {}, [{}]], {"": {"b": 1, "a": [1, "x"]}},
]  # fmt: skip


@pytest.mark.parametrize("value", VALUES, ids=repr)
def test_a_text_that_seal_has_made_is_decoded_as_any_other_text_of_the_same_record(value: object) -> None:
    """Spec: F2.3"""
    text = seal(Anything(value))
    other = sealed_tree({"value": value})
    assert other != text
    found, expected = (unseal(one, Anything, where="x").value for one in (text, other))
    assert repr(found) == repr(expected) == repr(value)


@pytest.mark.parametrize("kind", [list, dict])
def test_a_text_that_seal_has_made_is_refused_where_it_nests_too_deeply(kind: type) -> None:
    """Spec: F2.3"""
    value: Any = kind()
    for _ in range(MAX_NESTING - 2):
        value = [value] if kind is list else {"k": value}
    assert unseal(seal(Anything(value)), Anything, where="x").value == value
    with pytest.raises(CorruptionError, match="256 levels"):
        unseal(seal(Anything([value])), Anything, where="x")


@pytest.mark.parametrize("record", [RunRecord(2, (), "a1", "now", "00"), RunRecord(1, ("other",), "a1", "now", "00")])
def test_a_text_that_seal_has_made_of_a_newer_version_is_refused_as_that(record: RunRecord) -> None:
    """Spec: F1.2"""
    with pytest.raises(FormatVersionError):
        unseal(seal(record), RunRecord, where="run.json")
