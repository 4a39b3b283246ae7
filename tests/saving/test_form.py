"""The form of a data file: its header is JSON that any reader of safetensors files takes, and entries have no gap."""

from __future__ import annotations

import json
import math

from hypothesis import given, settings
from hypothesis import strategies as st

from safepoint.format.dtypes import DTYPES
from safepoint.saving.form import encode_header, form_of
from safepoint.saving.layout import LayoutBox

_NAMES = st.one_of(
    st.sampled_from(['a"b', "line\nend", "\0", "%s", "\\", "é", "\U0001f600", "\u2028", "\x7f", "", "a,b"]), st.text()
)


@st.composite
def boxes(draw: st.DrawFn) -> list[LayoutBox]:
    names = draw(st.lists(st.tuples(st.sampled_from(["model", "optimizer"]), _NAMES), unique=True, max_size=6))
    found = []
    for item, name in names:
        shape = tuple(draw(st.lists(st.integers(0, 4), max_size=3)))
        dtype = draw(st.sampled_from(["float32", "bool", "complex128", "bfloat16"]))
        found.append(LayoutBox(item, name, dtype, shape, (0,) * len(shape), shape))
    return found


def header_of(held: list[LayoutBox]) -> bytes:
    """Return what the header says, by Python's own encoder."""
    entries: dict[str, object] = {"__metadata__": {"format": "pt"}}
    begin = 0
    for box in held:
        dtype = DTYPES[box.dtype]
        lengths = [*box.shape] if dtype.safetensors else [*box.shape, dtype.size_bytes]
        end = begin + math.prod(box.shape) * dtype.size_bytes
        entries[f"{box.item}/{box.name}"] = {
            "dtype": dtype.safetensors or "U8",
            "shape": lengths,
            "data_offsets": [begin, end],
        }
        begin = end
    return json.dumps(entries, separators=(",", ":")).encode("ascii")


@settings(max_examples=60)
@given(boxes())
def test_a_header_is_the_text_of_its_entries_padded_to_a_page(held: list[LayoutBox]) -> None:
    """Spec: F3."""
    header = encode_header(held)
    text = header_of(held)
    assert len(header) % 4096 == 0
    assert int.from_bytes(header[:8], "little") == len(header) - 8
    assert header[8:].rstrip(b" ") == text
    assert len(header) < 8 + len(text) + 4096


@settings(max_examples=60)
@given(boxes())
def test_entries_follow_each_other_by_falling_item_size_and_name(held: list[LayoutBox]) -> None:
    """Spec: F3."""
    form = form_of(held, is_alone=True)
    expected = sorted(held, key=lambda box: (-DTYPES[box.dtype].size_bytes, box.item, box.name))
    assert [entry.box for entry in form.entries] == expected
    assert [held[entry.number] for entry in form.entries] == expected
    assert form.header == encode_header(expected)
    end = len(form.header)
    for entry in form.entries:
        assert entry.offset_bytes == end
        for chunk in entry.chunks:
            assert chunk.offset_bytes == end
            end += chunk.size_bytes
        assert end == entry.offset_bytes + entry.size_bytes
    assert form.size_bytes == end
    assert form.extents == (len(form.header), *(entry.size_bytes for entry in form.entries if entry.size_bytes))
