"""Strategies for plain values, and a comparison that sees types, bits, order and aliasing."""

from __future__ import annotations

import datetime
import math
import pathlib
from collections import OrderedDict

from hypothesis import strategies as st

from safepoint.format.plain import DtypeLeaf, NumpyScalarLeaf, ScalarLeaf, SizeLeaf, TensorLeaf, ViewLeaf

FIXED_OFFSETS = st.integers(min_value=-82_800, max_value=82_800).map(
    lambda seconds: datetime.timezone(datetime.timedelta(seconds=seconds))
)

# Strings as Python has them: lone surrogates included, as in a file name that is not UTF-8.
TEXTS = st.text(st.characters(exclude_categories=()), max_size=8)
NUMBERS = st.one_of(
    st.integers(),
    st.integers(min_value=-(1 << 600), max_value=1 << 600),
    st.sampled_from([2**63 - 1, 2**63, -(2**63), -(2**63) - 1]),
)
HASHABLE_LEAVES = st.one_of(
    st.none(),
    st.booleans(),
    NUMBERS,
    st.floats(allow_nan=False),
    st.complex_numbers(allow_nan=False),
    TEXTS,
    st.binary(max_size=8),
    st.datetimes(timezones=st.none() | FIXED_OFFSETS),
    st.dates(),
    st.times(timezones=st.none()),
    st.timedeltas(),
    TEXTS.filter(lambda text: "\0" not in text).map(pathlib.PurePosixPath),
    TEXTS.filter(lambda text: "\0" not in text).map(pathlib.PureWindowsPath),
)
COUNTS = st.integers(min_value=0, max_value=2**40)
TENSORS = st.one_of(
    st.builds(TensorLeaf, st.text(max_size=8), st.just("parameter"), st.just("cuda"), st.booleans()),
    st.builds(ScalarLeaf, st.just("float32"), st.binary(min_size=4, max_size=4)),
    st.builds(
        ViewLeaf,
        st.text(max_size=8),
        COUNTS,
        st.lists(COUNTS, max_size=3).map(tuple),
        st.lists(COUNTS, max_size=3).map(tuple),
    ),
    st.builds(SizeLeaf, st.lists(COUNTS, max_size=4).map(tuple)),
    st.builds(DtypeLeaf, st.sampled_from(["bfloat16", "float32"])),
    st.builds(NumpyScalarLeaf, st.just("<f8"), st.binary(min_size=8, max_size=8)),
)
KEYS = st.recursive(HASHABLE_LEAVES, lambda inner: st.lists(inner, max_size=3).map(tuple), max_leaves=4)
LEAVES = st.one_of(HASHABLE_LEAVES, st.floats(), st.complex_numbers(), TENSORS)


def _containers(inner: st.SearchStrategy[object]) -> st.SearchStrategy[object]:
    pairs = st.lists(st.tuples(KEYS, inner), max_size=4)
    return st.one_of(
        st.lists(inner, max_size=4),
        st.lists(inner, max_size=4).map(tuple),
        pairs.map(dict),
        pairs.map(OrderedDict),
        st.dictionaries(st.text(max_size=5), inner, max_size=4),
        st.sets(KEYS, max_size=4),
        st.frozensets(KEYS, max_size=4),
    )


PLAIN = st.recursive(LEAVES, _containers, max_leaves=25)


def fingerprint(value: object) -> object:
    """Return what two values share exactly when they have the same types, bits and order."""
    kind = type(value).__name__
    if isinstance(value, float):
        return kind, "nan" if math.isnan(value) else value.hex()
    if isinstance(value, complex):
        return kind, fingerprint(value.real), fingerprint(value.imag)
    if isinstance(value, list | tuple):
        return kind, [fingerprint(element) for element in value]
    if isinstance(value, set | frozenset):
        return kind, sorted(repr(fingerprint(element)) for element in value)
    if isinstance(value, dict):
        return kind, [(fingerprint(key), fingerprint(element)) for key, element in value.items()]
    if isinstance(value, datetime.datetime | datetime.time):
        return kind, value.isoformat(), value.fold
    return kind, repr(value)
