"""Plain values: what goes in comes out, and nothing else gets in."""

from __future__ import annotations

import datetime
import enum
import math
import pathlib
import zoneinfo
from collections import OrderedDict, defaultdict

import msgspec
import numpy
import pytest
from hypothesis import given, settings

from safepoint.errors import CorruptionError, RequestError
from safepoint.format.encoding import parse_json
from safepoint.format.plain import MAX_DEPTH, Same, Shared, TensorLeaf, decode_plain, encode_plain
from tests.format.plain_values import PLAIN, fingerprint

UTC = datetime.timezone.utc

# Written by hand from the table of the specification.
PINNED = [
    (None, None),
    (True, True),
    (7, 7),
    (-(2**63), -(2**63)),
    (2**63, {"$int": "0x8000000000000000"}),
    (-(2**63) - 1, {"$int": "-0x8000000000000001"}),
    (1.5, {"$float": "0x1.8000000000000p+0"}),
    (-0.0, {"$float": "-0x0.0p+0"}),
    (5e-324, {"$float": "0x0.0000000000001p-1022"}),
    (math.inf, {"$float": "inf"}),
    (math.nan, {"$float": "nan"}),
    (complex(0.0, -0.0), {"$complex": ["0x0.0p+0", "-0x0.0p+0"]}),
    ("größe", "größe"),
    ("\ud800", {"$str": "eda080"}),
    (b"\x00\xff", {"$bytes": "AP8="}),
    ([1, "a"], [1, "a"]),
    ((1,), {"$tuple": [1]}),
    ({"b": 1, "a": 2}, {"b": 1, "a": 2}),
    ({1: 2}, {"$dict": [[1, 2]]}),
    ({"$float": 1}, {"$dict": [["$float", 1]]}),
    ({"ä": 1}, {"$dict": [["ä", 1]]}),
    (OrderedDict(a=1), {"$ordered": [["a", 1]]}),
    ({10, 9}, {"$set": [10, 9]}),
    (frozenset({"x"}), {"$frozenset": ["x"]}),
    (datetime.datetime(2025, 3, 1, 12, 0, 0, 5, UTC), {"$datetime": "2025-03-01T12:00:00.000005+00:00"}),
    (datetime.date(2025, 3, 1), {"$date": "2025-03-01"}),
    (datetime.time(1, 2), {"$time": "01:02:00"}),
    (datetime.datetime(2025, 10, 26, 2, 30, fold=1), {"$datetime": ["2025-10-26T02:30:00", 1]}),
    (datetime.time(2, 30, fold=1), {"$time": ["02:30:00", 1]}),
    (datetime.timedelta(days=-1, microseconds=3), {"$timedelta": [-1, 0, 3]}),
    (pathlib.PurePosixPath("a/b"), {"$path": ["pure_posix", "a/b"]}),
    (pathlib.PurePosixPath("a\udcff"), {"$path": ["pure_posix", {"$str": "61edb3bf"}]}),
    (TensorLeaf("w", "parameter", "cuda", True), {"$tensor": ["w", "parameter", "cuda", True]}),
    ([Shared(0, [1]), Same(0)], [{"$shared": [0, [1]]}, {"$same": 0}]),
]


@pytest.mark.parametrize(("value", "form"), PINNED, ids=lambda side: repr(side)[:40])
def test_each_type_has_the_form_that_the_specification_states(value: object, form: object) -> None:
    """Spec: F4.2"""
    assert fingerprint(encode_plain(value)) == fingerprint(form)
    assert fingerprint(decode_plain(form)) == fingerprint(value)


@settings(max_examples=150)
@given(PLAIN)
def test_what_is_decoded_has_the_types_order_and_bits_of_what_was_encoded(value: object) -> None:
    """Spec: F4.2"""
    text = msgspec.json.encode(encode_plain(value))
    assert fingerprint(decode_plain(parse_json(text, where="x"), where="x")) == fingerprint(value)


@settings(max_examples=75)
@given(PLAIN)
def test_encoding_what_was_decoded_gives_the_same_bytes(value: object) -> None:
    form = encode_plain(value)
    again = encode_plain(decode_plain(form))
    assert msgspec.json.encode(again) == msgspec.json.encode(form)


def test_equal_sets_have_equal_forms_however_they_were_built() -> None:
    """Spec: F4.6"""
    one, other = set(range(0, 24, 8)), set(range(16, -1, -8))
    assert list(one) != list(other), "the two sets must differ in order for this test to mean something"
    assert encode_plain(one) == encode_plain(other)


class Colour(enum.IntEnum):
    RED = 1


class Text(str):
    pass


@pytest.mark.parametrize(
    "value",
    [
        object(),
        Colour.RED,
        Text("a"),
        numpy.float64(1.0),
        numpy.zeros(2),
        defaultdict(int),
        bytearray(b"a"),
        range(3),
        print,
        datetime.datetime(2025, 1, 1, tzinfo=zoneinfo.ZoneInfo("Europe/Berlin")),
        1 << (1 << 18),
    ],
    ids=lambda value: type(value).__name__,
)
def test_a_value_outside_the_set_is_refused_by_its_path(value: object) -> None:
    """Spec: F4.3"""
    with pytest.raises(RequestError) as caught:
        encode_plain({"a": [1, {"b": (value,)}]}, path="model")
    assert caught.value.where == "model.a[1].b[0]"


def test_the_longest_integer_comes_back() -> None:
    longest = (1 << (1 << 18)) - 1
    assert decode_plain(encode_plain(-longest)) == -longest


def test_a_value_may_nest_sixty_four_levels_and_not_one_more() -> None:
    """Spec: F4.4"""
    deepest: object = 1
    for _ in range(MAX_DEPTH):
        deepest = (deepest,)
    form = encode_plain(deepest)
    assert fingerprint(decode_plain(form)) == fingerprint(deepest)
    with pytest.raises(RequestError, match="nests too deeply"):
        encode_plain((deepest,))
    with pytest.raises(CorruptionError, match="64 levels"):
        decode_plain({"$tuple": [form]})


@pytest.mark.parametrize(
    "form",
    [
        1.5,
        2**63,
        {"$unknown": 1},
        {"$float": 1.5},
        {"$float": "1.5"},
        {"$float": "NaN"},
        {"$float": "0x1p+0"},
        {"$float": "0x1.0p+9999999"},
        {"$float": "0x1.8000000000000p+0", "other": 1},
        {"a": 1, "$float": "nan"},
        {"$int": "0x5"},
        {"$int": "8000000000000000"},
        {"$int": "0x" + "f" * (1 << 17)},
        {"$str": "61"},
        {"$str": "ED A0 80"},
        {"$bytes": "A"},
        {"$bytes": "AP8=\n"},
        {"$complex": ["nan"]},
        {"$complex": "ab"},
        {"$tuple": {}},
        {"$tuple": "ab"},
        {"$set": [1, 1]},
        {"$set": [1, True]},
        {"$set": [[1]]},
        {"$dict": [[1, 2], [1, 3]]},
        {"$dict": [[[1], 2]]},
        {"$dict": ["ab"]},
        {"$dict": [[1, 2, 3]]},
        {"$ordered": {"a": 1}},
        {"$datetime": "2025-03-01T12:00"},
        {"$datetime": ["2025-03-01T12:00:00", 0]},
        {"$datetime": ["2025-03-01T12:00:00", True]},
        {"$datetime": ["2025-03-01T12:00:00"]},
        {"$time": ["12:00:00", 2]},
        {"$date": ["2025-03-01", 1]},
        {"$datetime": "2025-02-30T12:00:00"},
        {"$date": "20250301"},
        {"$timedelta": [0, 86400, 0]},
        {"$timedelta": [0, 0]},
        {"$timedelta": [10**12, 0, 0]},
        {"$timedelta": [1.5, 0, 0]},
        {"$path": ["c", "x"]},
        {"$path": ["posix", 1]},
        {"$path": [{}, "x"]},
        {"$size": [1, -1]},
        {"$size": [True]},
        {"$numpy": ["<f8", "0 0"]},
        {"$tensor": ["w", "tensor", "cpu", 1]},
        {"$tensor": ["w", "tensor", "cpu"]},
        {"$view": ["w", -1, [], [], "tensor", "cpu", False]},
        {"$scalar": ["float32", "zz", "tensor", "cpu", False]},
        {"$same": 0},
        {"$same": True},
        {"$shared": "ab"},
        [{"$shared": [0, 1]}, {"$shared": [0, 1]}],
        [{"$same": 0}, {"$shared": [0, 1]}],
        {"$": 1},
    ],
    ids=lambda form: repr(form)[:50],
)
def test_a_form_that_no_writer_makes_is_refused(form: object) -> None:
    """Spec: F4.5"""
    with pytest.raises(CorruptionError) as caught:
        decode_plain(form, where="rank-00000-of-00001.json: model")
    assert caught.value.where == "rank-00000-of-00001.json: model"


@pytest.mark.parametrize(
    "form",
    [
        {"ä": 1},
        {"$bytes": "AP9="},
        {"$set": [9, 10]},
        {"$frozenset": ["b", "a"]},
        {"$path": ["pure_posix", "a//b"]},
        {"$path": ["pure_windows", "a/b"]},
    ],
    ids=repr,
)
def test_a_second_form_of_a_value_is_refused(form: object) -> None:
    """Spec: F4.1, F4.5, F4.6"""
    with pytest.raises(CorruptionError):
        decode_plain(form)


def test_a_list_that_contains_itself_is_told_by_its_number() -> None:
    form = {"$shared": [3, [1, {"$same": 3}]]}
    assert decode_plain(form) == Shared(3, [1, Same(3)])


@pytest.mark.parametrize("kind", [datetime.datetime(2000, 1, 1), datetime.datetime(2000, 1, 1).time()])
def test_a_time_whose_offset_is_no_whole_second_is_refused_by_its_path(kind: datetime.datetime | datetime.time) -> None:
    offset = datetime.timezone(datetime.timedelta(microseconds=1))
    with pytest.raises(RequestError, match="when"):
        encode_plain({"when": kind.replace(tzinfo=offset)}, path="state")


MANY = {f"k{number}": TensorLeaf(f"state/k{number}", "parameter", "cuda", bool(number % 2)) for number in range(20)}


@pytest.mark.parametrize("element", [TensorLeaf("x", "buffer"), Same(1), {"inner": TensorLeaf("x")}, None, "\ud800"])
@pytest.mark.parametrize("key", ["last", "a$", "$last", "ü", 7, ("a",)])
def test_many_leaves_have_the_forms_of_each_alone(key: object, element: object) -> None:
    whole = {**MANY, key: element}
    forms = [(encode_plain(name), encode_plain(one)) for name, one in whole.items()]
    expected = dict(forms) if key in ("last", "a$") else {"$dict": [list(pair) for pair in forms]}
    assert msgspec.json.encode(encode_plain(whole)) == msgspec.json.encode(expected)


def test_many_leaves_nest_no_deeper_than_others() -> None:
    whole: object = dict(MANY)
    for _ in range(MAX_DEPTH - 1):
        whole = [whole]
    assert encode_plain(whole)
    with pytest.raises(RequestError, match="nests too deeply"):
        encode_plain([whole])
